"""A guest that is slowed while its epoch is on its way: it runs again as soon as that is safe."""

import asyncio
import itertools
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.contract.test_replication_memory import GIB, Guest, epochs_of
from tests.scripted_qmp import Server, play
from vmckpt.epoch.epoch import Epoch, Pages, Pause
from vmckpt.memory.ram_file import PAGE_BYTES
from vmckpt.preflight.replication.memory import epoch_limit_bytes
from vmckpt.qemu.monitor import Monitor


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
