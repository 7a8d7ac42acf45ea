"""The guest is resumed, and has the processors to itself for a moment."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from tests.contract.test_dropped_copies import Scripted
from tests.scripted_qmp import Server, play
from vmckpt.errors import OperationFailedError
from vmckpt.migrate.steps import arrival
from vmckpt.qemu.monitor import Monitor

pytestmark = pytest.mark.contract


def states(*told: str, asked: list[str]) -> Any:
    """A QEMU that says one state after the other, the last one for good."""
    left = list(told)

    async def serve(server: Server) -> None:
        try:
            while True:
                command: dict[str, Any] = await server.command()
                asked.append(command["execute"])
                if command["execute"] != "query-status":
                    await server.answer(command, {})
                    continue
                state = left.pop(0) if len(left) > 1 else left[0]
                running = state == "running"
                await server.answer(command, {"status": state, "running": running})
                if not running:
                    stamp = {"seconds": 0, "microseconds": 0}
                    await server.send({"event": "RESUME", "data": {}, "timestamp": stamp})
        except EOFError:
            return

    return serve


def test_it_is_resumed_when_it_says_so(tmp_path: Path) -> None:
    asked: list[str] = []

    async def client(monitor: Monitor) -> None:
        await arrival.resume(Scripted(monitor, tmp_path))

    play(states("paused", "running", asked=asked), client)
    assert asked == ["cont", "query-status", "query-status"]


def test_one_that_does_not_run_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrival, "RESUME_TIMEOUT_S", 0.05)

    async def serve(server: Server) -> None:
        try:
            while True:
                command: dict[str, Any] = await server.command()
                await server.answer(command, {"status": "paused", "running": False})
        except EOFError:
            return

    async def client(monitor: Monitor) -> None:
        with pytest.raises(OperationFailedError, match="does not run the VM"):
            await arrival.resume(Scripted(monitor, tmp_path))

    play(serve, client)


def test_nothing_is_done_while_it_wakes_up() -> None:
    began_s = time.monotonic()
    asyncio.run(arrival.let_wake())
    assert time.monotonic() - began_s >= arrival.WAKING_S > 0.01
