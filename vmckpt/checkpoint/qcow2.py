"""Disk images written whole: raw ones, and qcow2 in QEMU's format (docs/interop/qcow2.txt).

An image is made for a checkpoint's disk, whose chunks are as large as qcow2's clusters, or empty
over a backing file. Clusters lie in the order in which they come; the tables follow.
"""

import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

CLUSTER_BITS = 16
CLUSTER_BYTES = 1 << CLUSTER_BITS
_MAGIC = 0x514649FB
_HEADER = struct.Struct(">IIQIIQIIQQIIQQQQII")
_HEADER_BYTES = 104
_BACKING_FORMAT = 0xE2792ACA
_COPIED = 1 << 63
_PER_TABLE = CLUSTER_BYTES // 8
_PER_REFCOUNTS = CLUSTER_BYTES // 2

Chunks = Iterable[tuple["np.ndarray[Any, Any]", Any]]


def write_image(
    path: Path, kind: str, size_bytes: int, chunks: Chunks, *, fills: bool = False
) -> None:
    """A new image of the format `kind` at `path`, which must not be there; chunks are clusters.

    With `fills` one is there, made so of some of the chunks, and is given all of them, for a QEMU
    that has opened it as the target of a migration does, and does not use it yet. On an error
    nothing is left. Raises OSError, and what `chunks` raises.
    """
    new = 0 if fills else os.O_CREAT | os.O_EXCL
    fd = os.open(path, os.O_RDWR | new | os.O_CLOEXEC, 0o600)
    try:
        if kind == "raw":
            _write_raw(fd, size_bytes, chunks)
        else:
            _write_qcow2(fd, size_bytes, chunks, None)
        os.fdatasync(fd)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def write_overlay(path: Path, size_bytes: int, backing: Path, backing_kind: str) -> None:
    """A new, empty qcow2 at `path` over an image that is only read. Raises OSError."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        _write_qcow2(fd, size_bytes, (), (str(backing), backing_kind))
    finally:
        os.close(fd)


def _write_raw(fd: int, size_bytes: int, chunks: Chunks) -> None:
    os.truncate(fd, size_bytes)
    for numbers, contents in chunks:
        view = memoryview(contents).cast("B")
        for place, number in enumerate(numbers.tolist()):
            start = number * CLUSTER_BYTES
            data = view[place * CLUSTER_BYTES : (place + 1) * CLUSTER_BYTES]
            _write(fd, data[: size_bytes - start], start)


def _write_qcow2(fd: int, size_bytes: int, chunks: Chunks, backing: tuple[str, str] | None) -> None:
    clusters = -(-size_bytes // CLUSTER_BYTES)
    places = np.zeros(clusters, np.uint64)
    free = 1  # the first is the header's
    for numbers, contents in chunks:
        _write(fd, memoryview(contents).cast("B"), free * CLUSTER_BYTES)
        places[numbers] = np.arange(free, free + len(numbers), dtype=np.uint64)
        free += len(numbers)
    tables = -(-clusters // _PER_TABLE)
    level1 = np.zeros(max(1, -(-tables // _PER_TABLE)) * _PER_TABLE, np.uint64)
    for table in range(tables):
        part = places[table * _PER_TABLE : (table + 1) * _PER_TABLE]
        if not part.any():
            continue
        entries = np.zeros(_PER_TABLE, np.uint64)
        entries[: len(part)] = _entries(part)
        _write(fd, entries.astype(">u8").tobytes(), free * CLUSTER_BYTES)
        level1[table] = free
        free += 1
    level1_at = free
    _write(fd, _entries(level1).astype(">u8").tobytes(), level1_at * CLUSTER_BYTES)
    free += len(level1) // _PER_TABLE
    free = _write_refcounts(fd, free)
    header = _header(size_bytes, tables, level1_at, free - 1, backing)
    _write(fd, header.ljust(CLUSTER_BYTES, b"\0"), 0)


def _entries(places: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Table entries for clusters that belong to one user; 0 stays 0."""
    flagged = (places << np.uint64(CLUSTER_BITS)) | np.uint64(_COPIED)
    return np.where(places == 0, np.uint64(0), flagged)


def _write_refcounts(fd: int, free: int) -> int:
    """Every cluster so far, and those that say so, once; the table of them comes last."""
    blocks = 1
    while blocks * _PER_REFCOUNTS < free + blocks + 1:
        blocks += 1
    total = free + blocks + 1
    counts = np.zeros(blocks * _PER_REFCOUNTS, ">u2")
    counts[:total] = 1
    _write(fd, counts.tobytes(), free * CLUSTER_BYTES)
    table = np.zeros(_PER_TABLE, ">u8")
    table[:blocks] = (np.arange(blocks) + free) << CLUSTER_BITS
    _write(fd, table.tobytes(), (free + blocks) * CLUSTER_BYTES)
    return total


def _header(
    size_bytes: int, tables: int, level1_at: int, refcounts_at: int, backing: tuple[str, str] | None
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
        level1_at * CLUSTER_BYTES, refcounts_at * CLUSTER_BYTES, 1, 0, 0, 0, 0, 0, 4, _HEADER_BYTES,
    )  # fmt: skip
    return head + extensions + name


def _write(fd: int, data: Any, at: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, at)
        view, at = view[written:], at + written
