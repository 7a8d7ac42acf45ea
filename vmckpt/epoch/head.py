"""What a waiting QEMU reads before the devices: which machine they are of, and RAM in no file.

`ReadHead` reads it out of QEMU: it knows where each block of RAM is, and tracks their pages like
those of the RAM file. `LearnedHead` is for a QEMU that does not say where they are (7.2),
and for kernels that cannot track them: it is learned once, in the pause of an epoch whose devices
were migrated as well. Both then hold the same devices, to the byte, and what precedes them is the
head of all later epochs. That is only so for VMs whose other RAM is ROMs, which change only at a
reset (the firmware gets its tables again). For a while after a reset, and for VMs with other memory
(a graphics card's), devices are migrated.
"""

import struct
import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from vmckpt.errors import OperationFailedError
from vmckpt.memory.private.other_blocks import OtherBlocks
from vmckpt.memory.ram_file import PAGE_BYTES, Span
from vmckpt.qemu.monitor import Events
from vmckpt.qemu.stream_head import RamBlock, stream_head

# migration/savevm.c: magic and version, and sections of the stream.
HEAD_BYTES, _SECTION_FULL, _SECTION_HEAD = 8, 4, struct.Struct(">BIB")
# The rest of a migration stream's end: a description in JSON, for people.
NO_DESCRIPTION = struct.pack(">BI", 6, 2) + b"{}"
# In a migrated stream the word for QEMU's state differs; this much may differ, in one section.
_MOST_DIFFERING_BYTES = 128
# By then firmware has read its tables, on slow machines too.
_SETTLED_AFTER_RESET_S = 60.0
# Names of blocks: ROMs of the machine and of devices.
_ROMS, _ROM_BEGINS, _ROM_ENDS = ("pc.bios", "pc.rom"), "/rom@", ".rom"
# What QEMU says is bounded: more than this is read of no guest's cards and ROMs.
MOST_OTHER_BYTES = 1 << 30
_END_OF_ADDRESSES = 1 << 56


class Head(Protocol):
    """The head of one VM's stream. `follows_blocks`: it is made of the blocks that QEMU lists."""

    @property
    def follows_blocks(self) -> bool:
        """See the class."""

    def is_known(self) -> bool:
        """Whether the next epoch has it, so that its devices need not be migrated."""

    def can_be_learned(self) -> bool:
        """Whether a migration of the devices would teach it, as far as is known."""

    def learn(self, migrated: bytes, saved: bytes) -> None:
        """Find it in the `migrated` state and the `saved` one of the same pause."""

    def take(self) -> None:
        """Copy what was written in other memory since the last time.

        While the VM runs, copies may be torn: what is written meanwhile is copied the next time.
        """

    def needs_list(self) -> bool:
        """Whether `list_blocks` must be called in the pause, after `take`."""

    def list_blocks(self, blocks: Sequence[RamBlock]) -> None:
        """QEMU lists these in the current pause. Raises as `require_same`."""

    def require_same(self, blocks: Sequence[RamBlock]) -> None:
        """QEMU lists these later. Raises OperationFailedError: they are not where they were."""

    def content(self) -> bytes:
        """It, as of the last `take`; the same object if nothing changed."""


class ReadHead:
    """The head, from the memory of QEMU's process."""

    follows_blocks = True

    def __init__(
        self, machine: str, blocks: Sequence[RamBlock], ram: tuple[str, ...], memory: OtherBlocks
    ) -> None:
        self._machine, self._blocks, self._memory = machine, tuple(blocks), memory
        self._ram = ram
        self._image = bytearray()
        self._content: bytes | None = None
        self._is_listed, self._resizable, at = False, list[Span](), 0
        for block in others(blocks, ram):
            if _is_rom(block.name) or block.used_bytes != block.total_bytes:
                self._resizable.append((at, at + block.total_bytes))
            at += block.total_bytes

    def is_known(self) -> bool:
        """It always is."""
        return True

    def can_be_learned(self) -> bool:
        """There is nothing to learn."""
        return False

    def learn(self, migrated: bytes, saved: bytes) -> None:
        """There is nothing to learn."""

    def take(self) -> None:
        """See `Head`. The first one copies everything: it is best made before a pause."""
        written = self._memory.take_spans()
        if not self._image:
            written = [(0, self._memory.size_bytes)]
            self._image = bytearray(self._memory.size_bytes)
        if not written:
            return
        self._content = None
        # QEMU resizes a block only with new content (hw/core/loader.c, hw/i386/acpi-build.c).
        if any(a < end and start < b for start, end in written for a, b in self._resizable):
            self._is_listed = False
        copied, at = self._memory.copy(written), 0
        for start, end in written:
            self._image[start:end] = copied[at : at + end - start]
            at += end - start

    def needs_list(self) -> bool:
        """At first, and whenever a block that can be resized was written."""
        return not self._is_listed

    def list_blocks(self, blocks: Sequence[RamBlock]) -> None:
        """See `Head`."""
        self.require_same(blocks)
        if tuple(blocks) != self._blocks:
            self._blocks, self._content = tuple(blocks), None
        self._is_listed = True

    def require_same(self, blocks: Sequence[RamBlock]) -> None:
        """See `Head`."""
        is_sound = all(map(_is_sound, others(blocks, self._ram)))
        if not is_sound or _layout(blocks) != _layout(self._blocks):
            raise OperationFailedError(
                "the layout of the VM's memory has changed",
                why=f"QEMU listed {len(self._blocks)} RAM blocks before, and now lists "
                f"{len(blocks)}, or different ones",
                remedy="a device was plugged in or unplugged: try again",
            )

    def content(self) -> bytes:
        """See `Head`."""
        if self._content is None:
            contents, at = dict[str, bytes](), 0
            for block in others(self._blocks, self._ram):
                contents[block.name] = bytes(self._image[at : at + block.used_bytes])
                at += block.total_bytes
            self._content = stream_head(self._machine, self._blocks, contents)
        return self._content


class LearnedHead:
    """The head, from a migration."""

    follows_blocks = False

    def __init__(self, resets: Events, *, has_only_roms: bool) -> None:
        self._resets, self._is_refused = resets, not has_only_roms
        self._reset_s: float | None = None
        self._content: bytes | None = None

    def is_known(self) -> bool:
        """Not for a while after a reset, and not before it was learned."""
        return not self._may_change() and self._content is not None

    def can_be_learned(self) -> bool:
        """See `Head`."""
        return not self._is_refused and not self._may_change()

    def learn(self, migrated: bytes, saved: bytes) -> None:
        """See `Head`."""
        self._content = head_of(migrated, saved)
        self._is_refused = self._content is None

    def take(self) -> None:
        """ROMs do not change."""

    def needs_list(self) -> bool:
        """It has no use for it."""
        return False

    def list_blocks(self, blocks: Sequence[RamBlock]) -> None:
        """It has no use for it."""

    def require_same(self, blocks: Sequence[RamBlock]) -> None:
        """It has no use for it."""

    def content(self) -> bytes:
        """See `Head`."""
        return self._content or b""

    def _may_change(self) -> bool:
        if self._resets.drain():
            self._reset_s, self._content = time.monotonic(), None
        if self._reset_s is None:
            return False
        return time.monotonic() - self._reset_s < _SETTLED_AFTER_RESET_S


def head_of(migrated: bytes, saved: bytes) -> bytes | None:
    """What precedes the devices in a migration's stream; None: it holds them differently."""
    devices = saved.removesuffix(NO_DESCRIPTION)
    if len(devices) < _SECTION_HEAD.size or devices[0] != _SECTION_FULL:
        return None
    first = devices[: _SECTION_HEAD.size + devices[_SECTION_HEAD.size - 1]]
    at = migrated.find(first)
    there = migrated[at : at + len(devices)]
    if at < HEAD_BYTES or len(there) != len(devices):
        return None
    differing = np.frombuffer(there, np.uint8) != np.frombuffer(devices, np.uint8)
    return migrated[:at] if np.count_nonzero(differing) <= _MOST_DIFFERING_BYTES else None


def guest_blocks(blocks: Sequence[RamBlock], ram: tuple[str, ...]) -> list[RamBlock] | None:
    """The blocks of the guest's RAM, in the order of their names; None: QEMU does not list them."""
    named = [[block for block in blocks if block.component == name] for name in ram]
    is_clear = bool(named) and all(len(found) == 1 for found in named)
    return [found[0] for found in named] if is_clear else None


def others(blocks: Sequence[RamBlock], ram: tuple[str, ...]) -> list[RamBlock]:
    """All blocks except the guest's RAM."""
    return [block for block in blocks if block.component not in ram]


def readable(blocks: Sequence[RamBlock], ram: tuple[str, ...]) -> list[Span] | None:
    """The addresses of all blocks except the guest's RAM; None: they are unknown or implausible.

    Implausible: not what a QEMU can report.
    """
    rest, spans = others(blocks, ram), list[Span]()
    if guest_blocks(blocks, ram) is None:
        return None
    for block in rest:
        if block.address is None or not _is_sound(block):
            return None
        spans.append((block.address, block.address + block.total_bytes))
    total_bytes = sum(block.total_bytes for block in rest)
    return spans if total_bytes <= MOST_OTHER_BYTES else None


def has_only_roms(blocks: Sequence[RamBlock], ram: tuple[str, ...]) -> bool:
    """Whether all of a VM's RAM except its own is ROMs. False if QEMU does not list it."""
    is_there = guest_blocks(blocks, ram) is not None
    return is_there and all(_is_rom(block.name) for block in others(blocks, ram))


def _is_rom(name: str) -> bool:
    return name in _ROMS or name.startswith(_ROM_BEGINS) or name.endswith(_ROM_ENDS)


def _is_sound(block: RamBlock) -> bool:
    """Whether it consists of whole pages, at a valid address, and is no longer than allowed."""
    numbers = (block.used_bytes, block.total_bytes, block.address or 0)
    is_whole = not any(n % PAGE_BYTES for n in numbers) and max(numbers) < _END_OF_ADDRESSES
    return is_whole and 0 < block.used_bytes <= block.total_bytes


def _layout(blocks: Sequence[RamBlock]) -> list[tuple[str, int, int | None]]:
    return [(block.name, block.total_bytes, block.address) for block in blocks]
