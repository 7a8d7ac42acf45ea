"""Memory that a replication takes: had on both hosts before it begins, and no more later."""

import asyncio
import gc
import math
import os
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tests.faulty_host import Fault, FaultyHost
from vmckpt.epoch.epoch import Epoch, Pages, Pause
from vmckpt.epoch.output import HeldOutput
from vmckpt.errors import OperationFailedError, RefusedError
from vmckpt.hosts.host import FreeMemory, Promise
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes import promises
from vmckpt.hosts.processes.kernel import PageTracking
from vmckpt.hosts.processes.process import ProcessId
from vmckpt.memory.ram_file import PAGE_BYTES, Span
from vmckpt.options.replication import ReplicationOptions
from vmckpt.preflight.finding import OK, REFUSE, WARN
from vmckpt.preflight.replication.memory import (
    checks,
    epoch_limit_bytes,
    epoch_room_bytes,
    primary_bytes,
    standby_bytes,
)
from vmckpt.replicate.disks.intake import FLOOD_BYTES, Intake
from vmckpt.replicate.disks.known import BLOCK_BYTES, DIGEST_BYTES, KnownBlocks, blocks_of
from vmckpt.replicate.disks.mirrors import Mirrors, MirrorSource
from vmckpt.replicate.primary import epochs as epochs_module
from vmckpt.replicate.primary.epochs import COPIES_AHEAD, COPY_BYTES, Epochs
from vmckpt.replicate.primary.stream import StandbyLostError
from vmckpt.replicate.promised import promised
from vmckpt.replicate.wire.epoch import Assembler, Composer
from vmckpt.replicate.wire.errors import WireError
from vmckpt.replicate.wire.frames import (
    HEAD_BYTES,
    Buffer,
    FrameKind,
    Inbound,
    Outbound,
    require_whole,
)
from vmckpt.replicate.wire.messages import (
    Begin,
    Digests,
    DiskWrite,
    HelloDisk,
    decode_writes,
    encode_digests,
    encode_writes,
)
from vmckpt.replicate.wire.pages import Encoder, Shadow
from vmckpt.replicate.wire.sections import Packer
from vmckpt.vm.inventory import Vm
from vmckpt.vm.paths import IN_MEMORY, vm_dir
from vmckpt.vm.record import Platform, Qemu
from vmckpt.vm.spec.spec import parse_spec

MIB, GIB = 1 << 20, 1 << 30
ZEROES = bytes(COPY_BYTES)


def sized(
    name: str, path: Path, free_bytes: int, how: PageTracking = PageTracking.PROTECTION
) -> FaultyHost:
    """Another machine, with so much memory that no one has yet."""
    faults = (
        Fault("available_memory_bytes", answers=free_bytes),
        Fault("memory_room", answers=FreeMemory(0, 0, is_given=False)),
        Fault("page_tracking", answers=how),
    )
    return FaultyHost(name, path, "127.0.0.1", is_this_machine=False, faults=faults)


def vm_on(host: LocalHost, text: str) -> Vm:
    spec = parse_spec(f'name = "web"\n{text}', "test", host.state_dir)
    directory = vm_dir(host.state_dir, "web")
    qemu = Qemu(directory.qemu("0"), ProcessId(1, 1), Platform("q35", "tcg", "qemu64"))
    return Vm(spec, host, directory, qemu)


def found(vm: Vm, standby: LocalHost) -> list[tuple[str, str]]:
    async def ask() -> list[tuple[str, str]]:
        return [(one.code, one.verdict) async for one in checks(vm, standby)]

    return asyncio.run(ask())


def test_a_host_that_runs_the_guest_needs_as_much_again(tmp_path: Path) -> None:
    """96 GiB, of which the guest has 64: there is no room for the copy of them."""
    full = sized("lab-a", tmp_path, 30 * GIB)
    roomy = sized("lab-b", tmp_path, 90 * GIB)
    of_64 = 'memory = "64G"'
    assert found(vm_on(full, of_64), roomy) == [("memory-primary", REFUSE), ("memory-standby", OK)]
    accepted = vm_on(full, f"{of_64}\novercommit = true")
    assert found(accepted, roomy) == [("memory-primary", WARN), ("memory-standby", OK)]

    async def refused() -> Any:
        return await anext(checks(vm_on(full, of_64), roomy))

    check = asyncio.run(refused())
    assert "68.1 GiB" in check.reason
    assert "30.0 GiB are free" in check.reason
    assert "lab-a" in check.remedy
    assert "overcommit = true" in check.remedy


def test_a_standby_needs_an_epoch_besides_the_guest(tmp_path: Path) -> None:
    large = sized("lab-a", tmp_path, 200 * GIB)
    guest = vm_on(large, 'memory = "64G"')
    assert found(guest, sized("lab-b", tmp_path, 65 * GIB))[1] == ("memory-standby", REFUSE)
    assert found(guest, sized("lab-b", tmp_path, 70 * GIB))[1] == ("memory-standby", OK)


def test_where_memory_is_compared_there_are_two_copies(tmp_path: Path) -> None:
    comparing = sized("lab-a", tmp_path, 90 * GIB, PageTracking.COMPARISON)
    guest = vm_on(comparing, 'memory = "64G"')
    assert found(guest, sized("lab-b", tmp_path, 90 * GIB))[0] == ("memory-primary", REFUSE)
    comparing = sized("lab-a", tmp_path, 140 * GIB, PageTracking.COMPARISON)
    guest = vm_on(comparing, 'memory = "64G"')
    assert found(guest, sized("lab-b", tmp_path, 90 * GIB))[0] == ("memory-primary", OK)


def test_what_is_needed_is_bounded_and_more_than_what_is_sent() -> None:
    for ram_bytes in (16 * MIB, 256 * MIB, GIB, 3 * GIB, 64 * GIB, 1024 * GIB):
        limit_bytes = epoch_limit_bytes(ram_bytes)
        assert min(ram_bytes, 256 * MIB) <= limit_bytes <= 4 * GIB
        room_bytes = epoch_room_bytes(ram_bytes, has_disks=False)
        # What the standby has of a page is 4096 bytes and its number.
        assert room_bytes > limit_bytes // PAGE_BYTES * (PAGE_BYTES + 16)
        assert standby_bytes(ram_bytes, has_disks=False) > room_bytes
        assert primary_bytes(ram_bytes, "page protection", has_disks=False) > ram_bytes


def test_what_large_disks_take_is_needed_too(tmp_path: Path) -> None:
    """Digests of 16 TiB are 8 GiB, of which nothing was promised: other guests died of it."""
    large = 16 << 40
    digests_bytes = DIGEST_BYTES * blocks_of(large)
    for how in PageTracking:
        more = primary_bytes(GIB, how, has_disks=True, copied_bytes=large)
        assert more - primary_bytes(GIB, how, has_disks=True) >= digests_bytes
    host = sized("lab-a", tmp_path, 8 * GIB)
    vm = vm_on(host, 'memory = "1G"')

    async def ask(**sizes: int) -> list[str]:
        return [one.verdict async for one in checks(vm, sized("lab-b", tmp_path, 8 * GIB), **sizes)]

    assert asyncio.run(ask()) == [OK, OK]
    assert asyncio.run(ask(copied_bytes=large)) == [REFUSE, OK]
    assert asyncio.run(ask(copied_bytes=large, qcow2_bytes=large)) == [REFUSE, REFUSE]


QCOW2 = """
import sys
from pathlib import Path
from vmckpt.memory.allocator import keep_freed_memory
from vmckpt.replicate.disks.copies import StandbyFile, prepare
from vmckpt.replicate.disks.image import opened
def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) << 10
keep_freed_memory()
path, size, before = Path(sys.argv[1]), int(sys.argv[2]), peak()
for run in ("1", "2"):
    prepare([StandbyFile(path, size, "qcow2")], "web", run)
with opened(path, "qcow2"):
    print(peak() - before)
"""


def test_a_large_qcow2_copy_takes_no_more_than_that(tmp_path: Path) -> None:
    size = 128 * GIB
    words = [sys.executable, "-c", QCOW2, str(tmp_path / "disk.qcow2"), str(size)]
    took_bytes = int(subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout)
    promised_bytes = standby_bytes(GIB, has_disks=True, qcow2_bytes=size)
    assert took_bytes <= promised_bytes - standby_bytes(GIB, has_disks=True)


class Agreeing:
    """A QEMU that does as it is asked, and reports that its mirror is ready."""

    is_lent = False

    async def tell(self, *_: object) -> None:
        """It does."""

    def drain(self) -> list[dict[str, Any]]:
        ready = {"id": "replica-0", "status": "ready"}
        return [{"event": "JOB_STATUS_CHANGE", "data": ready}]


def test_what_the_copies_held_is_forgotten_once_they_have_all() -> None:
    """Half a GiB for each TiB was kept for as long as the VM was protected."""
    size, qemu = 40 * BLOCK_BYTES, cast("Any", Agreeing())
    mirrors = Mirrors(qemu, [MirrorSource(0, "disk0", size)], Path("/none"), qemu)

    def told() -> list[KnownBlocks]:
        return [one for one in gc.get_objects() if isinstance(one, KnownBlocks)]

    async def main() -> None:
        assert not await mirrors.are_copied()
        digests = encode_digests(Digests(0, 0, bytes(DIGEST_BYTES * blocks_of(size))), Packer())
        mirrors.tell(memoryview(b"".join(digests)))
        assert len(told()) == 1
        assert await mirrors.are_copied()
        assert not told()
        assert await mirrors.are_copied()

    gc.collect()  # of other tests
    asyncio.run(main())


def test_a_qemu_that_writes_without_end_as_it_is_to_stop_fills_no_memory(tmp_path: Path) -> None:
    """It was broken into: no write waits then, as `stop` would not be answered otherwise."""
    qemu = cast("Any", Agreeing())
    mirrors = Mirrors(qemu, [MirrorSource(0, "disk0", GIB)], Path("/none"), qemu)
    intake, data = mirrors.intake, b"x" * (32 * MIB)
    intake.all_is_copied()

    async def flood() -> None:
        with intake.open():
            for _ in range(FLOOD_BYTES // len(data) - 1):
                await intake.write(0, 0, data)
            mirrors.end_epoch()
            assert len(mirrors.ended()) == FLOOD_BYTES // len(data) - 1
            for _ in range(2 * FLOOD_BYTES // len(data)):
                await intake.write(0, 0, data)
        with pytest.raises(OperationFailedError) as caught:
            mirrors.end_epoch()
        assert "without end" in caught.value.why
        assert intake.cut() == []

    asyncio.run(flood())


# -- the promise ---------------------------------------------------------------------------------

HOLDER = """
import sys
from pathlib import Path
from vmckpt.hosts.processes import promises
from vmckpt.hosts.host import Promise
record = Path(sys.argv[1])
asked = Promise(record, 60 << 20, None, is_private=True, holder="")
found = promises.promise(
    asked, lambda: 100 << 20, overcommit=False, records_dir=record.parent.parent
)
print(found.is_given, flush=True)
taken = bytearray(40 << 20) if sys.argv[2] == "takes" else b""
input()
"""


def test_a_process_has_its_own_memory_promised_while_it_lives(tmp_path: Path) -> None:
    directory = tmp_path / "vmckpt-web-0"
    directory.mkdir()
    record = directory / "promised-primary"
    for how, free in (("waits", range(40, 70)), ("takes", range(80, 101))):
        command = [sys.executable, "-c", HOLDER, str(record), how]
        holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        left = _until(lambda: promises.room(tmp_path, 100 * MIB, tmp_path).free_bytes // MIB, free)
        assert left in free, left
        holder.communicate("\n")
    # Its record is still there, and counts for nothing.
    assert record.exists()
    assert promises.room(tmp_path, 100 * MIB, tmp_path).free_bytes == 100 * MIB


def _until(look: Any, wanted: range) -> int:
    for _ in range(200):
        if (seen := int(look())) in wanted:
            return seen
        os.sched_yield()
    return seen


def test_a_service_without_its_memory_says_how_much_is_lacking(tmp_path: Path) -> None:
    def promise(promise: Promise, *, overcommit: bool) -> FreeMemory:
        assert (promise.holder, promise.file) == ("", None)
        if overcommit:
            promise.record.write_text("")
        return FreeMemory(3 * GIB, 2 * GIB, is_given=overcommit)

    full = Fault("promise_memory", by=promise)
    host = FaultyHost("lab-a", tmp_path, "127.0.0.1", faults=(full,))
    vm = vm_on(host, 'memory = "4G"')
    files = vm.qemu.files._replace(qemu_id=os.urandom(4).hex())
    directory = files.memory(IN_MEMORY)

    async def enter(spec: Any) -> None:
        async with promised(host, files, spec, "primary", 7 * GIB):
            assert (directory / "promised-primary").exists()
        assert not (directory / "promised-primary").exists()

    try:
        with pytest.raises(RefusedError) as caught:
            asyncio.run(enter(vm.spec))
        assert "7.00 GiB" in caught.value.why
        assert "3.00 GiB are free, without 2.00 GiB" in caught.value.why
        asyncio.run(enter(vm.spec._replace(overcommit=True)))
    finally:
        directory.rmdir()


# -- kept to -------------------------------------------------------------------------------------


def test_the_standby_takes_no_larger_epoch_than_it_has_memory_for() -> None:
    pages = 64
    content = np.random.default_rng(1).integers(0, 2**63, (pages, 512)).astype("<u8")
    composer = Composer(Outbound(1), Encoder(Shadow(pages)))

    def fed(assembler: Assembler, first: int, copies: int) -> None:
        frames = [composer.begin(first, Begin(first - 1, 0, 0))]
        for copy in range(copies):
            frames += composer.pages(np.arange(pages), content + np.uint64(first * 1000 + copy))
        frames.append(composer.commit())
        for frame in frames:
            data = b"".join(bytes(part) for part in frame)
            inbound = Inbound(0)
            inbound.sequence = int.from_bytes(data[24:28])
            head = inbound.head(data[:HEAD_BYTES])
            require_whole(head, data[HEAD_BYTES:])
            assembler.take(head, memoryview(data)[HEAD_BYTES:])

    whole = Assembler(pages, (), last=0, most_bytes=3 * pages * PAGE_BYTES)
    for number in (1, 2, 3):  # what was applied counts no more
        fed(whole, number, 2)
    with pytest.raises(WireError, match="too large"):
        fed(whole, 4, 4)


def test_writes_of_zeroes_which_bring_no_data_count_for_what_they_are_kept_as() -> None:
    disks, most = (HelloDisk("disk0", 1 << 30),), 1 << 20
    assembler = Assembler(64, disks, last=0, most_bytes=most)
    composer = Composer(Outbound(1), Encoder(Shadow(64)))
    zeroes = [DiskWrite(0, 4096 * at, b"", zero_bytes=4096) for at in range(most // 64)]
    inbound = Inbound(0)

    def take(frame: list[Buffer]) -> None:
        data = b"".join(bytes(part) for part in frame)
        assembler.take(inbound.head(data[:HEAD_BYTES]), memoryview(data)[HEAD_BYTES:])

    take(composer.begin(1, Begin(0, 0, 0)))
    (writes,) = composer.disk(zeroes)
    with pytest.raises(WireError, match="too large"):
        take(writes)


def _raw(*sections: bytes) -> bytes:
    """Sections as they are packed for a fast link: not at all."""
    heads = [struct.pack(">BII", 0, len(one), len(one)) for one in sections]
    return b"".join(part for pair in zip(heads, sections, strict=True) for part in pair)


def _pages(zero_runs: int = 0) -> bytes:
    """A PAGES payload of no page, in so many runs."""
    return struct.pack(">III4xQQ", zero_runs, 0, 0, 0, 0) + _raw(bytes(8 * zero_runs), b"")


@pytest.mark.parametrize(
    ("kind", "payload", "what"),
    [
        # 8 MB for each frame of some hundred bytes, once they are packed.
        (FrameKind.PAGES, _pages(1_000_000), "malformed"),
        (FrameKind.PAGES, _pages(1), "malformed"),
        (FrameKind.PAGES, _pages(), "too large"),
        (FrameKind.DEVICE, _raw(b""), "too large"),
        (FrameKind.BASE, _raw(b""), "too large"),
    ],
    ids=["many runs", "an empty run", "no pages", "no devices", "no base"],
)
def test_frames_that_bring_nothing_count_for_what_is_kept_of_them(
    kind: FrameKind, payload: bytes, what: str
) -> None:
    assembler = Assembler(64, (), last=0, most_bytes=MIB)
    outbound, inbound = Outbound(1), Inbound(0)

    def take(frame: list[Buffer]) -> None:
        data = b"".join(bytes(part) for part in frame)
        assembler.take(inbound.head(data[:HEAD_BYTES]), memoryview(data)[HEAD_BYTES:])

    take(outbound.frame(FrameKind.BEGIN, 1, Begin(0, 0, 0).encode()))
    with pytest.raises(WireError, match=what):
        for _ in range(1000):
            take(outbound.frame(kind, 1, [payload]))


def test_writes_that_do_not_fit_are_not_even_unpacked() -> None:
    disks = (HelloDisk("disk0", 1 << 30),)
    writes = [DiskWrite(0, 4096 * at, b"", zero_bytes=4096) for at in range(4096)]
    payload = b"".join(bytes(part) for part in encode_writes(writes, Packer()))
    assert len(decode_writes(memoryview(payload), disks, 4096)) == 4096
    with pytest.raises(WireError, match="too large"):
        decode_writes(memoryview(payload), disks, 4095)


class Guest:
    """What a capture finds: the guest has written `dirty` pages each time that it is asked."""

    tracker = "page protection"

    def __init__(self, dirty: Iterator[int]) -> None:
        self._dirty, self.now = dirty, 0
        self.epochs = 0

    def dirty_pages(self) -> int:
        self.now = next(self._dirty, self.now)
        return self.now

    async def early(self) -> tuple[list[Span], float]:
        return [(0, self.now * PAGE_BYTES)], 0.001

    def copies(self, spans: Sequence[Span], chunk_bytes: int) -> Iterator[Pages]:
        ((_, end),) = spans
        for at in range(0, end, chunk_bytes):
            length = min(end - at, chunk_bytes)
            data = ZEROES if length == chunk_bytes else bytes(length)
            yield Pages(((at, at + length),), data)

    async def epoch(self, number: int, **_: Any) -> Any:
        raise EndedError


class EndedError(Exception):
    """The last part of an epoch is asked for."""


class Sent:
    """A stream that notes what goes over it."""

    why = ""

    def __init__(self) -> None:
        self.ahead = self.committed = 0
        self.awaited = list[int]()
        self.next_number = 1

    async def disks(self, writes: Sequence[Any]) -> None:
        pass

    async def pages(self, pages: Pages) -> None:
        await asyncio.sleep(0)
        self.ahead += pages.count

    async def commit(self, pages: Pages, writes: Sequence[Any] = ()) -> int:
        await asyncio.sleep(0)
        self.committed += pages.count
        self.next_number += 1
        return self.next_number - 1

    async def acknowledged(self, number: int) -> None:
        self.awaited.append(number)


def epochs_of(dirty: Sequence[int], ram_bytes: int, tmp_path: Path) -> tuple[Epochs, Sent]:
    vm = vm_on(LocalHost("lab-a", tmp_path, "127.0.0.1"), f'memory = "{ram_bytes >> 20}M"')
    sent = Sent()
    mirrors = SimpleNamespace(intake=Intake({}), end_epoch=lambda: None)
    monitor: Any = None
    handles: Any = SimpleNamespace(
        vm=vm, monitor=monitor, capture=Guest(iter(dirty)), output=HeldOutput(monitor, []),
        pidfd=-1, mirrors=mirrors,
    )  # fmt: skip
    keeper: Any = SimpleNamespace(is_silent=lambda: False, may_run=lambda: True)
    stream: Any = sent
    return Epochs(handles, stream, keeper, ReplicationOptions("/leases", epoch_s=3600.0)), sent


def captured(epochs: Epochs) -> None:
    async def capture() -> None:
        with pytest.raises(EndedError):
            await epochs._captured(resume_guest=True)

    asyncio.run(capture())


def test_an_epoch_ends_early_while_there_is_room_for_what_is_left(tmp_path: Path) -> None:
    """Each pass gains, and would be followed by others: but what they send adds up."""
    limit = epoch_limit_bytes(GIB) // PAGE_BYTES
    dirty = [limit // 2 - 10, limit // 3, limit // 5, limit // 8]
    epochs, sent = epochs_of(dirty, GIB, tmp_path)
    epochs.is_safe = True
    captured(epochs)
    assert sent.ahead == limit // 2 - 10
    assert sent.ahead + limit // 3 <= limit


def test_a_guest_that_writes_more_than_an_epoch_goes_on_alone(tmp_path: Path) -> None:
    limit = epoch_limit_bytes(GIB) // PAGE_BYTES
    epochs, _ = epochs_of([limit + 1], GIB, tmp_path)
    epochs.is_safe = True
    with pytest.raises(StandbyLostError, match=r"memory for 512 MiB: the guest writes faster"):
        asyncio.run(epochs._captured(resume_guest=True))


def test_before_the_first_whole_epoch_passes_wait_for_no_end(tmp_path: Path) -> None:
    """All of memory was written during the first copy: the standby has none of it to keep."""
    every = GIB // PAGE_BYTES
    epochs, sent = epochs_of([every, every // 3, 100], GIB, tmp_path)
    captured(epochs)
    assert sent.ahead == 0
    assert sent.committed == every + every // 3
    assert sent.awaited == [n - COPIES_AHEAD for n in range(1, len(sent.awaited) + 1)]


def test_a_long_epoch_ends_when_half_of_what_it_may_have_is_written(tmp_path: Path) -> None:
    limit = epoch_limit_bytes(GIB) // PAGE_BYTES
    epochs, _ = epochs_of([1, limit // 4, limit // 2 + 1], GIB, tmp_path)
    epochs._resumed_s = math.inf

    async def rest() -> None:
        async with asyncio.timeout(20):
            await epochs.rest(asyncio.Event())

    asyncio.run(rest())


def test_what_was_written_during_the_first_copy_is_sent_before_output_is_held(
    tmp_path: Path,
) -> None:
    every = GIB // PAGE_BYTES
    epochs, sent = epochs_of([every, every // 3, 100], GIB, tmp_path)
    wanted: list[int] = []
    copying: Any = epochs
    copying._capture.everything = nothing
    copying._mirrors.are_copied = yes
    asyncio.run(epochs.copy(lambda: wanted.append(sent.committed)))
    assert sent.committed == every + every // 3
    assert sent.awaited[-1] == sent.next_number - 1  # all of it is there
    assert len(wanted) == len(sent.awaited) - 1


async def nothing(_take: object, _chunk_bytes: int, _pausing: object) -> None:
    pass


async def yes() -> bool:
    return True


@pytest.mark.parametrize("is_safe", [False, True])
def test_an_epoch_that_takes_too_long_before_its_end_is_given_up_too(
    is_safe: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pass takes the link for long, and the guest's output is held meanwhile."""
    monkeypatch.setattr(epochs_module, "LONGEST_S", -1.0)
    epochs, _ = epochs_of([epoch_limit_bytes(GIB) // PAGE_BYTES // 4], GIB, tmp_path)
    epochs.is_safe = is_safe
    with pytest.raises(StandbyLostError, match="on its way for"):
        asyncio.run(epochs._captured(resume_guest=True))


def test_neither_zero_pages_nor_what_is_under_way_say_how_fast_the_link_is(tmp_path: Path) -> None:
    epochs, _ = epochs_of([0], GIB, tmp_path)
    took: list[int] = []
    copying: Any = epochs

    async def everything(take: Any, chunk_bytes: int, _pausing: Any) -> None:
        data = bytes(3 * PAGE_BYTES) + b"\1" + bytes(PAGE_BYTES - 1) + bytes(PAGE_BYTES - 1) + b"\1"
        for _ in range(COPIES_AHEAD + 2):
            await take(Pages(((0, len(data)),), data))

    copying._capture.everything, copying._mirrors.are_copied = everything, yes
    copying._brake = SimpleNamespace(
        took=lambda pages, _seconds: took.append(pages),
        takes_pages_per_s=lambda *_: math.inf,
        is_due=lambda *_: False,
    )
    asyncio.run(epochs.copy(lambda: None))
    assert took == [0, 0, 2, 4]


def test_so_is_one_whose_disk_writes_the_standby_does_not_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They go first; a standby that says that it gets on is not silent."""
    monkeypatch.setattr(epochs_module, "LONGEST_S", 0.2)
    epochs, _ = epochs_of([0], GIB, tmp_path)

    async def disks(_writes: object) -> None:
        await asyncio.Event().wait()

    capturing: Any = epochs
    capturing._stream.disks = disks

    async def capture() -> None:
        async with asyncio.timeout(20):
            await epochs._captured(resume_guest=True)

    with pytest.raises(StandbyLostError, match="on its way for"):
        asyncio.run(capture())


def test_so_is_one_whose_last_part_the_link_does_not_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epochs_module, "LONGEST_S", 0.2)
    epochs, _ = epochs_of([0], GIB, tmp_path)
    last = Epoch(1, Pages((), b""), b"", b"state", Pause(0.0, 0.0, 0.0, 0.0))

    async def epoch(_number: int, **_: Any) -> Epoch:
        return last

    async def commit(*_: Any) -> None:
        await asyncio.Event().wait()

    capturing: Any = epochs
    capturing._capture.epoch, capturing._stream.commit = epoch, commit
    capturing._mirrors.ended = list

    async def capture() -> None:
        async with asyncio.timeout(20):
            await epochs._captured(resume_guest=True)

    with pytest.raises(StandbyLostError, match="on its way for"):
        asyncio.run(capture())
