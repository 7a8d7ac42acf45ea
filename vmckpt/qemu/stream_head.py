"""The head of a migration stream: all that precedes the devices (QEMU's migration/savevm.c, ram.c).

`xen-save-devices-state` gives the devices alone. A waiting QEMU first reads which machine they are
of, and the RAM: a list of all blocks, then pages of those that are not in its memory already.
"""

import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_PAGE_BYTES, _PIECE_PAGES = 4096, 1024
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

    @property
    def component(self) -> str:
        """The last part of its name, which may be the path of its back end: the back end's id."""
        return self.name.rpartition("/")[2]


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


class StreamHead(NamedTuple):
    """What `stream_head` made. `pages`: those of `contents`, as in the stream; `rest`: what follows
    it. `absent`: the blocks that `contents` did not have: the guest's RAM.
    """

    machine: str
    blocks: tuple[tuple[str, int], ...]
    pages: bytes
    absent: tuple[str, ...]
    rest: bytes

    @property
    def ram_sizes(self) -> tuple[int, ...]:
        """The sizes of the absent blocks."""
        sizes = dict(self.blocks)
        return tuple(sizes[name] for name in self.absent)

    @property
    def first_pages(self) -> tuple[int, ...]:
        """The number of each absent block's first page, and of the page behind the last block."""
        return tuple(accumulate((size // _PAGE_BYTES for size in self.ram_sizes), initial=0))


def read_stream_head(stream: bytes) -> StreamHead:
    """The inverse of `stream_head`. Raises ValueError: it is not such a stream."""
    try:
        return _read(stream)
    except (struct.error, IndexError, UnicodeDecodeError) as exc:
        raise ValueError(f"the stream ends early or is not one: {exc}") from exc


def _read(stream: bytes) -> StreamHead:
    at = len(_MAGIC)
    _require(stream[:at] == _MAGIC and stream[at] == _CONFIGURATION, "it begins otherwise")
    (length,) = _U32.unpack_from(stream, at + 1)
    machine = stream[at + 5 : at + 5 + length].decode()
    fixed = stream_head(machine, (), {})
    # All that precedes the sizes is fixed but for the machine, and an empty list ends it.
    at = len(fixed) - 2 * len(_end_of_part()) - len(_section(_END)) - _U64.size
    _require(stream[:at] == fixed[:at], "its configuration is another")
    total, at = _number(stream, at)
    _require(bool(total & _SIZES), "it does not list its blocks")
    left, blocks = total & ~(_PAGE_BYTES - 1), list[tuple[str, int]]()
    while left > 0:
        name, at = _name(stream, at)
        used_bytes, at = _number(stream, at)
        at += _U64.size
        blocks.append((name, used_bytes))
        left -= used_bytes
    _require(left == 0, "its blocks' sizes are not their sum")
    between = _end_of_part() + _section(_END)
    _require(stream[at : at + len(between)] == between, "its list of blocks has no end")
    begin = at = at + len(between)
    seen = list[str]()
    while True:
        word, after = _number(stream, at)
        if word & _END_OF_PART:
            break
        if not word & _SAME_BLOCK:
            name, after = _name(stream, after)
            seen.append(name)
        at = after + (1 if word & _ZERO else _PAGE_BYTES)
    end = at + len(_end_of_part())
    _require(stream[at:end] == _end_of_part(), "its pages have no end")
    absent = tuple(name for name, _ in blocks if name not in seen)
    return StreamHead(machine, tuple(blocks), stream[begin:at], absent, stream[end:])


class RamPages(NamedTuple):
    """Pages of the guest's RAM: their numbers (int64), and their contents; b"": all are zeroes.

    Its blocks count as one image, in the order in which QEMU lists them.
    """

    numbers: NDArray[np.int64]
    contents: bytes | memoryview


def plain_stream(head: StreamHead, ram: Iterable[RamPages]) -> Iterator[bytes]:
    """The same machine as an ordinary migration stream: all of its RAM is in it.

    `ram`: pages of the blocks that are absent from the head.
    """
    yield plain_begin(head)
    yield from plain_end(head, ram)


def plain_begin(head: StreamHead) -> bytes:
    """Of `plain_stream`, all that precedes `ram`."""
    total_bytes = sum(size for _, size in head.blocks)
    return b"".join(
        [
            _MAGIC,
            bytes([_CONFIGURATION]) + _long(head.machine),
            _section(_START) + _short("ram") + _U32.pack(_RAM_INSTANCE) + _U32.pack(_RAM_VERSION),
            _U64.pack(total_bytes | _SIZES),
            *(_short(block) + _U64.pack(size) for block, size in head.blocks),
            _end_of_part(),
            _section(_END),
            head.pages,
        ]
    )


def plain_page(head: StreamHead, number: int, page: bytes | memoryview) -> bytes:
    """Of `plain_stream`, one page of `ram`; others may follow. b"": it is zeroes."""
    firsts = head.first_pages
    block = bisect_right(firsts, number) - 1
    word = (number - firsts[block]) * _PAGE_BYTES | (_PAGE if page else _ZERO)
    return b"".join([_U64.pack(word), _short(head.absent[block]), page or b"\0"])


def plain_end(head: StreamHead, ram: Iterable[RamPages]) -> Iterator[bytes]:
    """Of `plain_stream`, `ram` and all that follows it."""
    firsts, last = np.array(head.first_pages), -1
    for numbers, contents in ram:
        view = memoryview(contents).cast("B")
        blocks = np.searchsorted(firsts, numbers, side="right") - 1
        for at, end in _pieces(blocks):
            some, block = numbers[at:end], int(blocks[at])
            pages = view[at * _PAGE_BYTES : end * _PAGE_BYTES]
            if block != last:
                yield plain_page(head, int(some[0]), pages[:_PAGE_BYTES])
                some, pages, last = some[1:], pages[_PAGE_BYTES:], block
            yield _records(some - firsts[block], pages)
    yield _end_of_part() + head.rest


def _pieces(blocks: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """The spans of at most `_PIECE_PAGES` pages, each of one block."""
    changes = (np.flatnonzero(np.diff(blocks)) + 1).tolist()
    for first, end in pairwise([0, *changes, len(blocks)]):
        for at in range(first, end, _PIECE_PAGES):
            yield at, min(at + _PIECE_PAGES, end)


def _records(numbers: NDArray[np.int64], pages: memoryview) -> bytes:
    """Further pages of the same block."""
    kind, count = (_PAGE if pages else _ZERO) | _SAME_BLOCK, len(numbers)
    words = (numbers.astype(">u8") * _PAGE_BYTES | kind).astype(">u8").view(np.uint8)
    content = np.frombuffer(pages, np.uint8) if pages else np.zeros(count, np.uint8)
    width = _PAGE_BYTES if pages else 1
    return np.hstack([words.reshape(count, _U64.size), content.reshape(count, width)]).tobytes()


def _require(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise ValueError(f"the stream of devices is not vmckpt's: {otherwise}")


def _number(stream: bytes, at: int) -> tuple[int, int]:
    return _U64.unpack_from(stream, at)[0], at + _U64.size


def _name(stream: bytes, at: int) -> tuple[str, int]:
    end = at + 1 + stream[at]
    return stream[at + 1 : end].decode(), end


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
