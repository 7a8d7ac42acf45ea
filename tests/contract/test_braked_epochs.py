"""A guest that is slowed while its epoch is on its way: it runs again as soon as that is safe."""

import asyncio
import itertools
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.contract.test_replication_memory import GIB, MIB, Guest, epochs_of, yes
from tests.scripted_qmp import Server, play
from vmckpt.epoch.epoch import Epoch, Pages, Pause
from vmckpt.memory.ram_file import PAGE_BYTES
from vmckpt.preflight.replication.memory import epoch_limit_bytes
from vmckpt.qemu import commands
from vmckpt.qemu.monitor import Monitor
from vmckpt.replicate.disks.intake import MOST_BYTES, Intake
from vmckpt.sequence.steps import finish


def test_an_epoch_that_is_safe_while_the_guest_is_let_run_ends(tmp_path: Path) -> None:
    """The brake's end came while it waited for the answer to `cont`: it went on forever."""
    limit = epoch_limit_bytes(GIB) // PAGE_BYTES
    epochs, _ = epochs_of([limit, 2 * limit], GIB, tmp_path)
    lets_run, is_safe = asyncio.Event(), asyncio.Event()
    did = list[str]()

    async def qemu(server: Server) -> None:
        while True:
            command = await server.command()
            did.append(str(command["execute"]))
            if did[-1] == "query-status":
                await server.answer(command, {"status": "running", "running": True})
            elif did[-1] == "cont":
                lets_run.set()
                await is_safe.wait()
                await asyncio.sleep(0.05)
                await server.answer(command, {})
                return
            else:
                await server.answer(command, {})

    async def epoch(monitor: Monitor) -> None:
        epochs._monitor = monitor
        async with asyncio.timeout(10):
            async with epochs._braked():
                await lets_run.wait()
                is_safe.set()
        others: set[asyncio.Task[Any]] = asyncio.all_tasks()
        assert not [task for task in others if "_slow" in repr(task)]

    play(qemu, epoch)
    assert did == ["query-status", "stop", "cont"]


class Captured(Guest):
    """A guest whose epochs come to something."""

    async def epoch(self, number: int, **_: Any) -> Epoch:
        return Epoch(number, Pages((), b""), b"", b"", Pause(0.0, 0.0, 0.0, 0.0))


def test_the_guest_is_slowed_while_the_last_part_of_an_epoch_is_sent(tmp_path: Path) -> None:
    """It may be most of the epoch: of a guest for which passes gain nothing."""
    limit = epoch_limit_bytes(GIB) // PAGE_BYTES
    epochs, sent = epochs_of([], GIB, tmp_path)
    epochs.is_safe = True
    # Asked before the pass, and for room; then it writes.
    counts = itertools.chain([10, 10], itertools.count(limit, 5000))
    guest: Any = Captured(counts)
    epochs._capture = guest
    stopped = asyncio.Event()

    async def commit(*_: Any) -> int:
        async with asyncio.timeout(10):
            await stopped.wait()
        return 1

    over_the_link: Any = sent
    over_the_link.commit = commit
    mirrors: Any = epochs._mirrors
    mirrors.ended = list

    async def qemu(server: Server) -> None:
        with suppress(EOFError):
            while True:
                command = await server.command()
                if command["execute"] == "stop":
                    stopped.set()
                state = {"status": "running", "running": True}
                await server.answer(command, state if "query" in command["execute"] else {})

    async def epoch(monitor: Monitor) -> None:
        epochs._monitor = monitor
        await epochs._captured(resume_guest=True)

    play(qemu, epoch)


class WritingQemu:
    """A QEMU whose guest writes to its disk: it answers `drains` when all writes are done, and
    nothing else before that.
    """

    def __init__(self, intake: Intake, drains: str = "stop") -> None:
        self._intake, self._drains = intake, drains
        self._writes = list[asyncio.Task[None]]()
        self.did = list[str]()

    def write(self, count: int) -> None:
        for _ in range(count):
            self._writes.append(asyncio.ensure_future(self._intake.write(0, 0, b"x" * MIB)))

    async def serve(self, server: Server) -> None:
        with suppress(EOFError):
            while True:
                command = await server.command()
                self.did.append(str(command["execute"]))
                if self.did[-1] == self._drains:
                    self.write(4)  # what the guest has begun by now
                    await asyncio.gather(*self._writes)
                state = {"status": "running", "running": True}
                await server.answer(command, state if "query" in self.did[-1] else {})


def test_a_guest_that_is_slowed_has_its_disk_writes_seen_through(tmp_path: Path) -> None:
    """They waited for the next epoch, and QEMU answered nothing until then: it was taken for dead,
    and ended.
    """
    limit = epoch_limit_bytes(GIB) // PAGE_BYTES
    epochs, _ = epochs_of([limit, 2 * limit], GIB, tmp_path)
    intake: Intake = epochs._mirrors.intake
    intake.all_is_copied()
    qemu = WritingQemu(intake)

    async def epoch(monitor: Monitor) -> None:
        epochs._monitor = monitor
        qemu.write((MOST_BYTES >> 20) - 2)
        async with asyncio.timeout(5):
            async with epochs._braked():
                while "stop" not in qemu.did:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert (await commands.query_status(monitor)).running
        assert qemu.did[-2:] == ["cont", "query-status"]

    play(qemu.serve, epoch)


def test_a_guest_whose_disk_writes_wait_is_not_stopped_besides(tmp_path: Path) -> None:
    """Each stop would let more of them through, beyond what an epoch may have."""
    limit = epoch_limit_bytes(GIB) // PAGE_BYTES
    epochs, _ = epochs_of(itertools.count(limit, limit), GIB, tmp_path)  # type: ignore[arg-type]
    intake: Intake = epochs._mirrors.intake
    intake.all_is_copied()
    qemu = WritingQemu(intake)

    async def epoch(monitor: Monitor) -> None:
        epochs._monitor = monitor
        qemu.write((MOST_BYTES >> 20) + 2)
        async with asyncio.timeout(5):
            async with epochs._braked():
                await asyncio.sleep(0.5)
        assert qemu.did == []
        intake.cut()
        await epochs._hold(0.05)
        assert qemu.did == ["query-status", "stop", "cont"]

    play(qemu.serve, epoch)


def test_the_first_pause_of_a_copy_waits_for_no_disk_write(tmp_path: Path) -> None:
    """`replicate start` failed for a guest that wrote much while its disks were copied."""
    epochs, _ = epochs_of([0], GIB, tmp_path)
    intake: Intake = epochs._mirrors.intake
    intake.all_is_copied()
    qemu, copying = WritingQemu(intake), epochs

    async def copied(monitor: Monitor) -> None:
        async def everything(_take: Any, _chunk_bytes: int, pausing: Any) -> None:
            qemu.write((MOST_BYTES >> 20) + 2)
            with pausing():
                await finish(commands.stop(monitor))

        guest: Any = copying._capture
        mirrors: Any = copying._mirrors
        guest.everything, mirrors.are_copied = everything, yes
        async with asyncio.timeout(5):
            await copying.copy(lambda: None)
        assert qemu.did == ["stop"]

    play(qemu.serve, copied)


def test_output_leaves_though_a_guest_is_reset_in_the_middle_of_its_writes(tmp_path: Path) -> None:
    """QEMU waits for them then, and answered the next command too late: it was ended."""
    epochs, _ = epochs_of([0], GIB, tmp_path)
    epochs.is_safe = True
    intake: Intake = epochs._mirrors.intake
    intake.all_is_copied()
    qemu, testing = WritingQemu(intake, "query-status"), epochs

    async def epoch(monitor: Monitor) -> None:
        async def captured(**_: Any) -> tuple[Epoch, float]:
            qemu.write((MOST_BYTES >> 20) + 2)
            return Epoch(1, Pages((), b""), b"", b"", Pause(0.0, 0.0, 0.0, 0.0)), 0.0

        async def release() -> None:
            await commands.query_status(monitor)

        under_test: Any = testing
        under_test._captured = captured
        under_test._capture.release = release
        under_test._keeper.may_release = lambda _number: True
        async with asyncio.timeout(5):
            assert await testing.one("b/1")
        assert qemu.did == ["query-status"]

    play(qemu.serve, epoch)
