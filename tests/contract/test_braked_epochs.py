"""A guest that is slowed while its epoch is on its way: it runs again as soon as that is safe."""

import asyncio
from pathlib import Path
from typing import Any

from tests.contract.test_replication_memory import GIB, epochs_of
from tests.scripted_qmp import Server, play
from vmckpt.memory.ram_file import PAGE_BYTES
from vmckpt.qemu.monitor import Monitor
from vmckpt.replicate.memory import epoch_limit_bytes


def test_an_epoch_that_is_safe_while_the_guest_is_let_run_ends(tmp_path: Path) -> None:
    """The brake's end came while it waited for the answer to `cont`: it went on for ever."""
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
