"""Write whole disk images: raw and qcow2.

An image is written for a checkpoint's disk, whose chunks have the size of qcow2's clusters, or
empty over a backing file. Clusters are stored in the order in which they arrive; the tables follow.
"""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from vmckpt.qemu.disks.qcow2 import CLUSTER_BYTES, clusters_of, write_at, write_tables
from vmckpt.state.durable import sync_directory

Chunks = Iterable[tuple["np.ndarray[Any, Any]", Any]]


def write_image(
    path: Path, kind: str, size_bytes: int, chunks: Chunks, *, fills: bool = False
) -> None:
    """Write a new image of format `kind` at `path`, which must not exist; chunks are clusters.

    With `fills` the image already exists, created from some of the chunks, and receives all of
    them. A QEMU may have it open, as the destination of a migration does, but not use it yet. On an
    error nothing remains. Raises OSError, and what `chunks` raises.
    """
    new = 0 if fills else os.O_CREAT | os.O_EXCL
    fd = os.open(path, os.O_RDWR | new | os.O_CLOEXEC, 0o600)
    try:
        if kind == "raw":
            _write_raw(fd, size_bytes, chunks)
        else:
            _write_qcow2(fd, size_bytes, chunks, None)
        os.fdatasync(fd)
        sync_directory(path.parent)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def while_wanted(chunks: Chunks, still_wanted: Callable[[], None]) -> Chunks:
    """The chunks, until `still_wanted` raises (`sequence.in_thread.until_cancelled`)."""
    for one in chunks:
        still_wanted()
        yield one


def write_overlay(path: Path, size_bytes: int, backing: Path, backing_kind: str) -> None:
    """Write an empty qcow2 overlay at `path`, which must not exist, over a read-only image.

    On an error nothing remains. Raises OSError.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        _write_qcow2(fd, size_bytes, (), (str(backing), backing_kind))
        os.fdatasync(fd)
        sync_directory(path.parent)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def _write_raw(fd: int, size_bytes: int, chunks: Chunks) -> None:
    os.truncate(fd, size_bytes)
    for numbers, contents in chunks:
        view = memoryview(contents).cast("B")
        for i, number in enumerate(numbers.tolist()):
            start = number * CLUSTER_BYTES
            data = view[i * CLUSTER_BYTES : (i + 1) * CLUSTER_BYTES]
            write_at(fd, data[: size_bytes - start], start)


def _write_qcow2(fd: int, size_bytes: int, chunks: Chunks, backing: tuple[str, str] | None) -> None:
    file_clusters = np.zeros(clusters_of(size_bytes), np.uint64)
    free = 1  # the first is the header
    for numbers, contents in chunks:
        write_at(fd, memoryview(contents).cast("B"), free * CLUSTER_BYTES)
        file_clusters[numbers] = np.arange(free, free + len(numbers), dtype=np.uint64)
        free += len(numbers)
    write_at(fd, write_tables(fd, size_bytes, file_clusters, free, backing), 0)
