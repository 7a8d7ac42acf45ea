"""The pause in which a way to save devices is learned: all of it is in real time."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.scripted_qmp import Server, play
from vmckpt.epoch.capture import Capture
from vmckpt.epoch.devices import devices_of, ram_blocks
from vmckpt.epoch.output import HeldOutput
from vmckpt.memory.ram_file import Span
from vmckpt.qemu.monitor import Monitor

pytestmark = [
    pytest.mark.contract,
    pytest.mark.skipif(os.geteuid() != 0, reason="takes root"),
]

REAL_TIME = os.SCHED_RR | os.SCHED_RESET_ON_FORK
RAM = "ram0 4 KiB 0x0 0x1000 0x1000\n"
DONE = {
    "event": "MIGRATION",
    "data": {"status": "completed"},
    "timestamp": {"seconds": 1, "microseconds": 0},
}


class Still:
    """A guest that writes nothing."""

    name, needs_stop, others = "none", True, None

    def count(self) -> int:
        return 0

    def take_spans(self, spared: Sequence[Span] = ()) -> list[Span]:
        return []

    def extents(self) -> list[Span]:
        return []

    def copy(self, spans: Sequence[Span]) -> bytes:
        return b""


@pytest.fixture
def process() -> Iterator[int]:
    """Of the QEMU."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as started:
        try:
            yield started.pid
        finally:
            started.kill()


@pytest.mark.parametrize("fails", [False, True])
def test_the_guest_waits_for_nobody_until_it_runs_again(process: int, fails: bool) -> None:
    policies = dict[str, int]()

    async def script(server: Server) -> None:
        try:
            while True:
                command = await server.command()
                name = command["execute"]
                policies[name] = os.sched_getscheduler(process)
                answer: dict[str, Any] = {"running": True, "status": "running"}
                if name == "x-query-ramblock":
                    answer = {"human-readable-text": RAM}
                elif name == "add-fd":
                    answer = {"fdset-id": 7, "fd": 20}
                if name == "migrate" and fails:
                    await server.refuse(command, "no")
                    continue
                await server.answer(command, answer)
                if name == "migrate":
                    await server.send(DONE)
        except EOFError:
            return

    async def client(monitor: Monitor) -> None:
        async with devices_of(monitor, await ram_blocks(monitor), ("ram0",), None) as devices:
            still = Still()
            capture = Capture(
                process, monitor, HeldOutput(monitor, []), tracker=still, devices=devices
            )
            if fails:
                with pytest.raises(Exception, match="migrate"):
                    await capture.learn_devices()
            else:
                assert await capture.learn_devices() > 0
            assert os.sched_getscheduler(process) == os.SCHED_OTHER

    play(script, client)
    paused = ["stop", "xen-save-devices-state", "migrate", "cont"]
    assert [policies[name] for name in paused] == [REAL_TIME] * 4
