"""qcow2 images as copies: every cluster of the disk is allocated in the file beforehand.

So writes to the disk go to known positions, bypass the QEMU that waits with the image, and change
none of its tables: what QEMU has read of them stays valid. What was never written is a hole in the
file, as in a raw image.
"""

import os

import numpy as np

from vmckpt.qemu.disks.qcow2 import (
    CLUSTER_BYTES,
    Clusters,
    clusters_of,
    write_at,
    write_tables,
)


def create(fd: int, size_bytes: int) -> None:
    """Turn an empty file into an image, all zero and contiguous. Raises OSError."""
    count = clusters_of(size_bytes)
    file_clusters = np.arange(1, count + 1, dtype=np.uint64)
    write_at(fd, write_tables(fd, size_bytes, file_clusters, count + 1), 0)


def allocate_all(fd: int, found: Clusters) -> None:
    """Allocate every cluster of an image; the disk's content does not change.

    If killed at any moment it is either the old image or the new one: new tables are written past
    the end of the file, and one header replaces the other. Raises OSError.
    """
    if found.are_all_there:
        return
    file_clusters = found.file_clusters.copy()
    missing = np.flatnonzero(file_clusters == 0)
    first = max(-(-os.fstat(fd).st_size // CLUSTER_BYTES), int(file_clusters.max(initial=0)) + 1)
    file_clusters[missing] = np.arange(first, first + len(missing), dtype=np.uint64)
    header = write_tables(fd, found.size_bytes, file_clusters, first + len(missing))
    os.fsync(fd)
    write_at(fd, header, 0)
    os.fsync(fd)
