"""The head of a migration stream, and what is read of a QEMU for it."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest

from vmckpt.epoch.head import MOST_OTHER_BYTES, ReadHead, readable
from vmckpt.errors import OperationFailedError
from vmckpt.memory.private.other_blocks import OtherBlocks
from vmckpt.memory.ram_file import PAGE_BYTES, Span
from vmckpt.qemu.stream_head import (
    RamBlock,
    RamPages,
    plain_end,
    plain_page,
    plain_stream,
    read_stream_head,
    stream_head,
)

RAM = RamBlock("ram0", 1 << 26, 1 << 26, 0x7F0000000000)
CARD = RamBlock("0000:00:01.0/vga.vram", 2 * PAGE_BYTES, 2 * PAGE_BYTES, 0x10000)
TABLES = RamBlock("/rom@etc/acpi/tables", PAGE_BYTES, 2 * PAGE_BYTES, 0x20000)
BLOCKS = (RAM, CARD, TABLES)

# As QEMU 10.0 wrote it for such a machine, but for the RAM section's number, its parent addresses
# (which are read for shared files alone, and are 0 for theirs), and sections of nothing at its end.
GOLDEN = (
    b"QEVM\0\0\0\3" + b"\x07\0\0\0\x08pc-q35-1"
    b"\x05\x1aconfiguration/capabilities\0\0\0\1" + b"\0\0\0\1\x0fx-ignore-shared"
    b"\x01\0\0\x27\x0f\3ram\0\0\0\0\0\0\0\4" + b"\0\0\0\0\x04\0\x30\x04"
    b"\x04ram0\0\0\0\0\x04\0\0\0" + bytes(8) + b"\x150000:00:01.0/vga.vram"
    b"\0\0\0\0\0\0\x20\0" + bytes(8) + b"\x14/rom@etc/acpi/tables\0\0\0\0\0\0\x10\0" + bytes(8)
    + b"\0\0\0\0\0\0\0\x10\x7e\0\0\x27\x0f" + b"\x03\0\0\x27\x0f"
    b"\0\0\0\0\0\0\0\x02\x150000:00:01.0/vga.vram\0"
    b"\0\0\0\0\0\0\x10\x28" + b"v" * PAGE_BYTES
    + b"\0\0\0\0\0\0\0\x08\x14/rom@etc/acpi/tables" + b"t" * PAGE_BYTES
    + b"\0\0\0\0\0\0\0\x10\x7e\0\0\x27\x0f"
)  # fmt: skip


def test_its_bytes() -> None:
    contents = {CARD.name: bytes(PAGE_BYTES) + b"v" * PAGE_BYTES, TABLES.name: b"t" * PAGE_BYTES}
    assert stream_head("pc-q35-1", BLOCKS, contents) == GOLDEN


DEVICES = b"\x04devices\0"
# The same machine as an ordinary stream, whose RAM has a page of zeroes and one of text.
PLAIN = (
    b"QEVM\0\0\0\3" + b"\x07\0\0\0\x08pc-q35-1"
    b"\x01\0\0\x27\x0f\3ram\0\0\0\0\0\0\0\4" + b"\0\0\0\0\x04\0\x30\x04"
    b"\x04ram0\0\0\0\0\x04\0\0\0" + b"\x150000:00:01.0/vga.vram"
    b"\0\0\0\0\0\0\x20\0" + b"\x14/rom@etc/acpi/tables\0\0\0\0\0\0\x10\0"
    b"\0\0\0\0\0\0\0\x10\x7e\0\0\x27\x0f" + b"\x03\0\0\x27\x0f"
    b"\0\0\0\0\0\0\0\x02\x150000:00:01.0/vga.vram\0"
    b"\0\0\0\0\0\0\x10\x28" + b"v" * PAGE_BYTES
    + b"\0\0\0\0\0\0\0\x08\x14/rom@etc/acpi/tables" + b"t" * PAGE_BYTES
    + b"\0\0\0\0\0\0\x70\x02\x04ram0\0" + b"\0\0\0\0\0\0\x30\x28" + b"r" * PAGE_BYTES
    + b"\0\0\0\0\0\0\0\x10\x7e\0\0\x27\x0f" + DEVICES
)  # fmt: skip


def test_it_is_read_back_and_becomes_an_ordinary_stream() -> None:
    head = read_stream_head(GOLDEN + DEVICES)
    assert (head.machine, head.absent, head.rest) == ("pc-q35-1", ("ram0",), DEVICES)
    assert head.blocks == tuple((block.name, block.used_bytes) for block in BLOCKS)
    ram = [RamPages(np.array([7]), b""), RamPages(np.array([3]), b"r" * PAGE_BYTES)]
    assert b"".join(plain_stream(head, ram)) == PLAIN


@pytest.mark.parametrize("count", [0, 1, 2, 1024, 1025, 3000])
@pytest.mark.parametrize("empty", [False, True])
def test_many_pages_are_what_each_of_them_is(count: int, empty: bool) -> None:
    head = read_stream_head(GOLDEN + DEVICES)
    numbers = np.arange(5, 5 + 2 * count, 2)
    pages = [b"" if empty else bytes([n % 251 + 1]) * PAGE_BYTES for n in range(count)]
    stream = b"".join(plain_end(head, [RamPages(numbers, b"".join(pages))]))
    expected = b""
    for number, page in zip(numbers.tolist(), pages, strict=True):
        one = plain_page(head, number, page)
        same = (int.from_bytes(one[:8], "big") | 0x20).to_bytes(8, "big") + one[13:]
        expected += same if expected else one
    assert stream == expected + b"\0\0\0\0\0\0\0\x10\x7e\0\0\x27\x0f" + DEVICES


MODULE = RamBlock("/objects/dimm0", 3 * PAGE_BYTES, 3 * PAGE_BYTES, 0x6F0000000000)
NODES = [RamBlock(f"ram-node{n}", 2 * PAGE_BYTES, 2 * PAGE_BYTES, 0x1000000 * n) for n in (1, 2)]
# Two of another kind are between the blocks of the guest's RAM.
SEVERAL = (MODULE, CARD, NODES[0], TABLES, NODES[1])
RAM_NAMES = ("dimm0", "ram-node1", "ram-node2")


def test_ram_in_several_blocks_is_one_image() -> None:
    contents = {CARD.name: bytes(2 * PAGE_BYTES), TABLES.name: b"t" * PAGE_BYTES}
    head = read_stream_head(stream_head("pc-q35-1", SEVERAL, contents) + DEVICES)
    assert head.absent == ("/objects/dimm0", "ram-node1", "ram-node2")
    assert [size // PAGE_BYTES for size in head.ram_sizes] == [3, 2, 2]
    assert head.first_pages == (0, 3, 5, 7)
    # As the store delivers them: in any order.
    numbers = [1, 2, 3, 4, 5, 0, 6]
    contents_of = b"".join(bytes([97 + number]) * PAGE_BYTES for number in numbers)
    stream = b"".join(plain_end(head, [RamPages(np.array(numbers), contents_of)]))

    def named(offset: int, name: str, byte: bytes) -> bytes:
        word = (offset * PAGE_BYTES | 8).to_bytes(8, "big")
        return word + bytes([len(name)]) + name.encode() + byte * PAGE_BYTES

    def same(offset: int, byte: bytes) -> bytes:
        return (offset * PAGE_BYTES | 0x28).to_bytes(8, "big") + byte * PAGE_BYTES

    expected = [
        named(1, "/objects/dimm0", b"b") + same(2, b"c"),
        named(0, "ram-node1", b"d") + same(1, b"e"),
        named(0, "ram-node2", b"f"),
        named(0, "/objects/dimm0", b"a"),
        named(1, "ram-node2", b"g"),
    ]
    assert stream == b"".join(expected) + b"\0\0\0\0\0\0\0\x10\x7e\0\0\x27\x0f" + DEVICES
    # A mark for each block.
    marks = [plain_page(head, number, b"m" * PAGE_BYTES) for number in head.first_pages[:-1]]
    assert marks == [named(0, name, b"m") for name in head.absent]


def test_other_memory_is_all_but_several_blocks() -> None:
    assert readable(SEVERAL, RAM_NAMES) == [(0x10000, 0x12000), (0x20000, 0x22000)]
    assert readable(SEVERAL, (*RAM_NAMES, "dimm1")) is None


@pytest.mark.parametrize(
    "stream",
    [
        b"",
        PLAIN,
        *(GOLDEN[:length] for length in (8, 20, 100, 150, 220, 300, len(GOLDEN) - 1)),
        GOLDEN.replace(b"\x04\0\x30\x04", b"\x04\0\x30\x00"),
        GOLDEN.replace(b"\x04\0\x30\x04", b"\x04\0\x20\x04"),
    ],
)
def test_what_is_no_such_stream_is_refused(stream: bytes) -> None:
    with pytest.raises(ValueError, match="stream"):
        read_stream_head(stream)


class Memory:
    """Other memory of a QEMU: the card's two pages, and the tables' two."""

    size_bytes = 4 * PAGE_BYTES

    def __init__(self) -> None:
        self.content = bytearray(b"01t\0")
        self.written: list[Span] = []
        self.copied = 0

    def write(self, page: int, byte: bytes) -> None:
        self.content[page : page + 1] = byte
        self.written.append((page * PAGE_BYTES, (page + 1) * PAGE_BYTES))

    def take_spans(self) -> list[Span]:
        taken, self.written = self.written, []
        return taken

    def copy(self, spans: Sequence[Span]) -> bytes:
        whole = b"".join(bytes([byte]) * PAGE_BYTES for byte in self.content)
        self.copied += sum(end - start for start, end in spans) // PAGE_BYTES
        return b"".join(whole[start:end] for start, end in spans)


def head_of(memory: Memory) -> ReadHead:
    return ReadHead("pc-q35-1", BLOCKS, ("ram0",), cast("OtherBlocks", memory))


def expected(card: bytes, tables: bytes, blocks: Sequence[RamBlock] = BLOCKS) -> bytes:
    grown = {
        name: b"".join(bytes([byte]) * PAGE_BYTES for byte in content)
        for name, content in ((CARD.name, card), (TABLES.name, tables))
    }
    return stream_head("pc-q35-1", blocks, grown)


def test_only_what_was_written_is_copied_again() -> None:
    memory = Memory()
    head = head_of(memory)
    memory.write(1, b"x")
    head.take()
    assert memory.copied == 4
    head.list_blocks(BLOCKS)
    first = head.content()
    assert first == expected(b"0x", b"t")
    head.take()
    assert head.content() is first
    memory.write(0, b"y")
    head.take()
    assert head.content() == expected(b"yx", b"t")
    assert memory.copied == 5


def test_a_block_that_grew_at_a_reset_is_sent_as_it_is_now() -> None:
    memory = Memory()
    head = head_of(memory)
    head.take()
    head.list_blocks(BLOCKS)
    head.content()
    memory.write(3, b"T")
    head.take()
    assert head.needs_list()
    grown = (RAM, CARD, TABLES._replace(used_bytes=2 * PAGE_BYTES))
    head.list_blocks(grown)
    assert head.content() == expected(b"01", b"tT", grown)


def test_qemu_lists_its_blocks_when_one_that_can_be_resized_was_written() -> None:
    """Which takes up to half a millisecond of a pause."""
    memory = Memory()
    head = head_of(memory)
    assert head.needs_list()
    head.take()
    head.list_blocks(BLOCKS)
    memory.write(0, b"y")  # the card's
    head.take()
    assert not head.needs_list()
    memory.write(2, b"T")
    head.take()
    head.take()
    assert head.needs_list()


def test_what_grows_after_the_pause_counts_in_the_next_one() -> None:
    head = head_of(Memory())
    head.take()
    head.list_blocks(BLOCKS)
    head.require_same((RAM, CARD, TABLES._replace(used_bytes=2 * PAGE_BYTES)))
    assert head.content() == expected(b"01", b"t")


@pytest.mark.parametrize(
    "blocks",
    [
        (RAM, CARD),
        (*BLOCKS, CARD._replace(name="another")),
        (RAM, CARD._replace(address=0x40000), TABLES),
        (RAM, CARD._replace(total_bytes=3 * PAGE_BYTES), TABLES),
        (RAM, CARD, TABLES._replace(used_bytes=3 * PAGE_BYTES)),
        (RAM, CARD, TABLES._replace(used_bytes=17)),
    ],
)
def test_memory_that_changed_its_place_is_an_error(blocks: Sequence[RamBlock]) -> None:
    head = head_of(Memory())
    head.take()
    with pytest.raises(OperationFailedError, match="layout of the VM's memory"):
        head.list_blocks(blocks)
    with pytest.raises(OperationFailedError, match="layout of the VM's memory"):
        head.require_same(blocks)


def test_other_memory_is_all_but_the_guests_ram() -> None:
    assert readable(BLOCKS, ("ram0",)) == [(0x10000, 0x12000), (0x20000, 0x22000)]
    assert readable((RAM,), ("ram0",)) == []


@pytest.mark.parametrize(
    "change",
    [
        {"address": None},
        {"address": 0x10001},
        {"address": 2**64 - PAGE_BYTES},
        {"used_bytes": 0},
        {"used_bytes": 3 * PAGE_BYTES},
        {"used_bytes": 100},
        {"total_bytes": 2 * PAGE_BYTES + 1},
        {"total_bytes": MOST_OTHER_BYTES},
    ],
)
def test_what_a_qemu_cannot_have_is_not_read(change: dict[str, Any]) -> None:
    assert readable((RAM, TABLES, CARD._replace(**change)), ("ram0",)) is None


@pytest.mark.parametrize("blocks", [(), (CARD,), (RAM, RAM._replace(name="x/ram0"))])
def test_without_one_ram_file_nothing_is_read(blocks: Sequence[RamBlock]) -> None:
    assert readable(blocks, ("ram0",)) is None
