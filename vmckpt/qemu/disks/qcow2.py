"""QEMU's qcow2 format (docs/interop/qcow2.txt): reading and writing the cluster tables.

Only clusters of 64 KiB, QEMU's default.
"""

import os
import struct
from typing import Any, NamedTuple

import numpy as np

CLUSTER_BITS = 16
CLUSTER_BYTES = 1 << CLUSTER_BITS

_MAGIC = 0x514649FB
_HEADER = struct.Struct(">IIQIIQIIQQIIQQQQII")
_HEADER_BYTES = 104
_BACKING_FORMAT = 0xE2792ACA
_COPIED, _COMPRESSED, _ZERO = 1 << 63, 1 << 62, 1
_OFFSET = (1 << 56) - (1 << 9)
# Incompatible features: only this one does not change the clusters.
_DIRTY = 1
# The last cluster of a file: at most so many times the disk's length, and some more for what
# snapshots have left. Its writer chooses it, and refcounts take memory by it.
_MOST_TIMES, _MOST_MORE = 8, 1 << 20
_PER_TABLE = CLUSTER_BYTES // 8
_PER_REFCOUNTS = CLUSTER_BYTES // 2


class UnfitError(Exception):
    """The image cannot be read here, and why."""


class Clusters(NamedTuple):
    """The clusters of an image.

    `file_clusters`: for each cluster of the disk, its cluster in the file; 0: none, it is zero.
    `is_clean`: its refcounts need no repair.
    """

    size_bytes: int
    file_clusters: Any
    is_clean: bool

    @property
    def are_all_there(self) -> bool:
        """Whether every cluster of the disk is allocated: writes move nothing."""
        return bool(self.is_clean and self.file_clusters.all())


def clusters_of(size_bytes: int) -> int:
    """The number of clusters of a disk; the last one may be short."""
    return -(-size_bytes // CLUSTER_BYTES)


def tables_bytes(size_bytes: int) -> int:
    """The approximate overhead of an image besides its disk, when every cluster is allocated."""
    return 10 * clusters_of(size_bytes) + 6 * CLUSTER_BYTES


class _Head(NamedTuple):
    """What the header of a stand-alone image says."""

    size_bytes: int
    level1_at: int
    level1_entries: int
    is_clean: bool


def size_of(fd: int) -> int:
    """The length of the disk of a stand-alone image, as it says. Raises UnfitError, OSError."""
    return _read_head(fd).size_bytes


def read_clusters(fd: int) -> Clusters:
    """Read the cluster map of a stand-alone image, which takes memory by `size_of` it.

    Raises UnfitError, OSError.
    """
    head = _read_head(fd)
    return Clusters(head.size_bytes, _read_file_clusters(fd, head), head.is_clean)


def _read_head(fd: int) -> _Head:
    head = os.pread(fd, _HEADER_BYTES, 0).ljust(_HEADER_BYTES, b"\0")
    (
        magic, version, backing, _, bits, size_bytes, is_encrypted, entries, level1_at, _, _,
        snapshots, _, features, _, _, _, _,
    ) = _HEADER.unpack(head)  # fmt: skip
    if magic != _MAGIC or version not in (2, 3):
        raise UnfitError("it is not a qcow2 image")
    features = features if version > 2 else 0
    if bits != CLUSTER_BITS:
        raise UnfitError("its clusters are not of 64 KiB")
    for is_so, why in (
        (backing, "it has a backing file"),
        (is_encrypted, "it is encrypted"),
        (snapshots, "it holds snapshots"),
        (features & ~_DIRTY, f"it is damaged, or made in a way ({features:#x}) that is not known"),
    ):
        if is_so:
            raise UnfitError(why)
    return _Head(size_bytes, level1_at, entries, features == 0)


def _read_file_clusters(fd: int, head: _Head) -> Any:
    count = clusters_of(head.size_bytes)
    tables = -(-count // _PER_TABLE)
    if head.level1_entries < tables:
        raise UnfitError("its tables are shorter than its disk")
    level1 = _table(fd, head.level1_at, 8 * tables)
    file_clusters = np.zeros(tables * _PER_TABLE, np.uint64)
    for table, entry in enumerate(level1.tolist()):
        if not entry & _OFFSET:
            continue
        level2 = _table(fd, entry & _OFFSET, CLUSTER_BYTES)
        if (level2 & np.uint64(_COMPRESSED)).any():
            raise UnfitError("it has compressed clusters")
        at = np.where(level2 & np.uint64(_ZERO), np.uint64(0), level2 & np.uint64(_OFFSET))
        if (at % np.uint64(CLUSTER_BYTES)).any():
            raise UnfitError("a cluster of it is not where clusters can be")
        file_clusters[table * _PER_TABLE : table * _PER_TABLE + len(at)] = at >> np.uint64(
            CLUSTER_BITS
        )
    file_clusters = file_clusters[:count]
    used = np.sort(file_clusters[file_clusters != 0])
    if (used[1:] == used[:-1]).any():
        raise UnfitError("two clusters of it are in one place")
    last = max(int(used.max(initial=0)), os.fstat(fd).st_size // CLUSTER_BYTES)
    if last > _MOST_TIMES * count + _MOST_MORE:
        raise UnfitError("it is much longer than its disk")
    return file_clusters


def _table(fd: int, at: int, length: int) -> Any:
    if at + length > os.fstat(fd).st_size:
        raise UnfitError("its tables are shorter than its disk")
    data = os.pread(fd, length, at)
    if len(data) < length:  # cut short by an unreadable sector, or the end of the file
        data += os.pread(fd, length - len(data), at + len(data))
    if len(data) < length:
        raise UnfitError("its tables are shorter than its disk")
    return np.frombuffer(data, ">u8").astype(np.uint64)


def write_tables(
    fd: int, size_bytes: int, file_clusters: Any, free: int, backing: tuple[str, str] | None = None
) -> bytes:
    """Write the tables of an image from cluster `free` on, where nothing may be that it needs.

    Returns the header that activates them, to be written to the image's start. `backing`: path and
    format of the file that has the unallocated clusters. Raises OSError.
    """
    first = free
    tables = -(-clusters_of(size_bytes) // _PER_TABLE)
    level1 = np.zeros(max(1, -(-tables // _PER_TABLE)) * _PER_TABLE, np.uint64)
    for table in range(tables):
        part = file_clusters[table * _PER_TABLE : (table + 1) * _PER_TABLE]
        if not part.any():
            continue
        entries = np.zeros(_PER_TABLE, np.uint64)
        entries[: len(part)] = _entries(part)
        write_at(fd, entries.astype(">u8").tobytes(), free * CLUSTER_BYTES)
        level1[table] = free
        free += 1
    level1_at = free
    write_at(fd, _entries(level1).astype(">u8").tobytes(), level1_at * CLUSTER_BYTES)
    free += len(level1) // _PER_TABLE
    refcounts_at, length = _write_refcounts(fd, file_clusters, first, free)
    return _header(size_bytes, tables, level1_at, (refcounts_at, length), backing)


def _entries(file_clusters: Any) -> Any:
    """Table entries for clusters that belong to one user; 0 stays 0."""
    flagged = (file_clusters << np.uint64(CLUSTER_BITS)) | np.uint64(_COPIED)
    return np.where(file_clusters == 0, np.uint64(0), flagged)


def _write_refcounts(fd: int, file_clusters: Any, first: int, free: int) -> tuple[int, int]:
    """Count each cluster in use once, refcounts' own too; return the table's cluster and length."""
    blocks, length = 1, 1
    while blocks * _PER_REFCOUNTS < free + blocks + length:
        blocks += 1
        length = -(-blocks // _PER_TABLE)
    total = free + blocks + length
    counts = np.zeros(blocks * _PER_REFCOUNTS, ">u2")
    counts[0] = 1
    counts[file_clusters[file_clusters != 0].astype(np.int64)] = 1
    counts[first:total] = 1
    write_at(fd, counts.tobytes(), free * CLUSTER_BYTES)
    table = np.zeros(length * _PER_TABLE, ">u8")
    table[:blocks] = (np.arange(blocks) + free) << CLUSTER_BITS
    write_at(fd, table.tobytes(), (free + blocks) * CLUSTER_BYTES)
    return free + blocks, length


def _header(
    size_bytes: int,
    tables: int,
    level1_at: int,
    refcounts: tuple[int, int],
    backing: tuple[str, str] | None,
) -> bytes:
    extensions, name = b"", b""
    if backing:
        kind = backing[1].encode()
        extensions = struct.pack(">II", _BACKING_FORMAT, len(kind)) + kind.ljust(8, b"\0")
        name = backing[0].encode()
    extensions += struct.pack(">II", 0, 0)
    name_at = _HEADER_BYTES + len(extensions) if name else 0
    head = _HEADER.pack(
        _MAGIC, 3, name_at, len(name), CLUSTER_BITS, size_bytes, 0, max(1, tables),
        level1_at * CLUSTER_BYTES, refcounts[0] * CLUSTER_BYTES, refcounts[1],
        0, 0, 0, 0, 0, 4, _HEADER_BYTES,
    )  # fmt: skip
    return head + extensions + name


def write_at(fd: int, data: Any, at: int) -> None:
    """Write all of the data. Raises OSError."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, at)
        view, at = view[written:], at + written
