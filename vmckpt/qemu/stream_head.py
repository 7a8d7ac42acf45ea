"""The head of a migration stream: all that precedes the devices (QEMU's migration/savevm.c, ram.c).

`xen-save-devices-state` gives the devices alone. A waiting QEMU first reads which machine they are
of, and the RAM: a list of all blocks, then pages of those that are not in its memory already.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

_PAGE_BYTES = 4096
_MAGIC = struct.pack(">II", 0x5145564D, 3)
_CONFIGURATION, _SUBSECTION, _START, _END, _FOOTER = 0x07, 0x05, 0x01, 0x03, 0x7E
_U32, _U64 = struct.Struct(">I"), struct.Struct(">Q")
# Of the RAM section: its name, instance and version. Its number only has to differ from others.
_RAM_NUMBER, _RAM_INSTANCE, _RAM_VERSION = 9999, 0, 4
# Flags in the low bits of a page's offset.
_ZERO, _SIZES, _PAGE, _END_OF_PART, _SAME_BLOCK = 0x02, 0x04, 0x08, 0x10, 0x20


class RamBlock(NamedTuple):
    """A block of a guest's RAM, ROMs included, as its QEMU lists it.

    `total_bytes`: what it may grow to at a reset. `address`: where it is in QEMU's memory; None:
    this QEMU does not say.
    """

    name: str
    used_bytes: int
    total_bytes: int
    address: int | None


def stream_head(machine: str, blocks: Sequence[RamBlock], contents: Mapping[str, bytes]) -> bytes:
    """What a QEMU of that machine type, with `x-ignore-shared`, reads before the devices.

    `contents` of blocks that are not shared files, by name, in whole pages.
    """
    sizes = [_short(block.name) + _U64.pack(block.used_bytes) + _U64.pack(0) for block in blocks]
    total_bytes = sum(block.used_bytes for block in blocks)
    return b"".join(
        [
            _MAGIC,
            bytes([_CONFIGURATION]) + _long(machine),
            bytes([_SUBSECTION]) + _short("configuration/capabilities") + _U32.pack(1),
            _U32.pack(1) + _short("x-ignore-shared"),
            _section(_START) + _short("ram") + _U32.pack(_RAM_INSTANCE) + _U32.pack(_RAM_VERSION),
            _U64.pack(total_bytes | _SIZES),
            *sizes,
            _end_of_part(),
            _section(_END),
            *(page for name, content in contents.items() for page in _pages(name, content)),
            _end_of_part(),
        ]
    )


def _pages(name: str, content: bytes) -> Iterator[bytes]:
    """All pages of a block: zeroes overwrite too, since a new QEMU's ROMs are not zero."""
    zeroes, block = bytes(_PAGE_BYTES), _short(name)
    for at in range(0, len(content), _PAGE_BYTES):
        page = content[at : at + _PAGE_BYTES]
        flags = _ZERO if page == zeroes else _PAGE
        yield _U64.pack(at | flags | (_SAME_BLOCK if at else 0))
        if not at:
            yield block
        yield b"\0" if flags == _ZERO else page


def _section(kind: int) -> bytes:
    return bytes([kind]) + _U32.pack(_RAM_NUMBER)


def _end_of_part() -> bytes:
    return _U64.pack(_END_OF_PART) + bytes([_FOOTER]) + _U32.pack(_RAM_NUMBER)


def _short(text: str) -> bytes:
    words = text.encode()
    return bytes([len(words)]) + words


def _long(text: str) -> bytes:
    words = text.encode()
    return _U32.pack(len(words)) + words
