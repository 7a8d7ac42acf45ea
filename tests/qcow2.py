"""qcow2 read and written the plain way, apart from vmckpt's own code."""

import struct
from pathlib import Path

CLUSTER_BYTES = 1 << 16
_OFFSET = (1 << 56) - (1 << 9)


def read_qcow2(path: Path) -> bytes:
    """What a guest would read: header, first table, second table, cluster."""
    data = path.read_bytes()
    size = struct.unpack_from(">Q", data, 24)[0]
    entries, level1 = struct.unpack_from(">IQ", data, 36)
    found = bytearray(size)
    for table in range(entries):
        level2 = struct.unpack_from(">Q", data, level1 + 8 * table)[0] & _OFFSET
        for slot in range(8192 if level2 else 0):
            entry = struct.unpack_from(">Q", data, level2 + 8 * slot)[0]
            start, place = (table * 8192 + slot) * CLUSTER_BYTES, entry & _OFFSET
            if place and not entry & 1:
                part = data[place : place + CLUSTER_BYTES][: size - start]
                found[start : start + len(part)] = part
    return bytes(found)


def with_snapshots(path: Path, *snapshots: tuple[str, float]) -> None:
    """A qcow2 image's header and table of snapshots."""
    head = struct.pack(">4sI52xIQ", b"QFI\xfb", 3, len(snapshots), 512)
    table = b""
    for number, (name, taken_unix_s) in enumerate(snapshots):
        words = str(number).encode(), name.encode()
        sizes = map(len, words)
        taken = divmod(round(taken_unix_s * 1e9), 10**9)
        one = struct.pack(">QIHHIIQII", 0, 0, *sizes, *taken, 0, 0, 16)
        one += bytes(16) + b"".join(words)
        table += one.ljust(-(-len(one) // 8) * 8, b"\0")
    path.write_bytes(head.ljust(512, b"\0") + table)
