"""Failovers by kill -9 at random moments, under a client that checks every answer."""

import asyncio
import json
import os
import random
import signal
from contextlib import suppress
from typing import Any

from tests.qemu.world import World
from vmckpt.errors import VmckptError
from vmckpt.hosts.process import find_by_argument
from vmckpt.lab.guest import KvClient
from vmckpt.lab.labguest import LabGuest

LONGEST_WAIT_S, ANSWER_S, POLL_S = 1.5, 60.0, 0.05
LOAD = "rate=20M set=64M pattern=uniform content=text touch=line"


async def kills(made: World, guest: LabGuest, count: int) -> dict[str, Any]:
    """`count` failovers there and back: how many lost an answer, and how long each took."""
    control = await guest.control(made.lab)
    await control.load_memory(LOAD)
    chance, lost, to_answer_ms, took_over_ms = random.Random(1), 0, [], []
    for number in range(count):
        home, standby = ("lab-a", "lab-b") if number % 2 == 0 else ("lab-b", "lab-a")
        await asyncio.to_thread(made.ok, "replicate", "start", guest.name, standby)
        client = await guest.key_value(made.lab)
        checking = Checking(client, f"kill{number}")
        await asyncio.sleep(chance.uniform(0.3, LONGEST_WAIT_S))
        killed_s = _kill(made, home, guest.name)
        try:
            to_answer_ms.append((await checking.next_answer(killed_s) - killed_s) * 1e3)
        except (VmckptError, AssertionError, TimeoutError) as exc:
            print(f"failover {number}: {exc}")
            lost += 1
        await checking.end()
        status = await _promoted(made, guest.name)
        took_over_ms.append(status["took_over_ms"])
        await asyncio.to_thread(made.ok, "replicate", "stop", guest.name)
    memory = await control.verify_memory()
    await control.close()
    return {
        "count": count,
        "lost": lost + (not memory.sound),
        "to_first_answer_ms": sorted(to_answer_ms),
        "took_over_ms": sorted(took_over_ms),
    }


class Checking:
    """A client that counts, each answer one more than the last, over one connection."""

    def __init__(self, client: KvClient, key: str) -> None:
        self._client, self._key = client, key
        self._answered = asyncio.Condition()
        self._last_s = 0.0
        self._task = asyncio.ensure_future(self._check())

    async def next_answer(self, after_s: float) -> float:
        """When the first answer after an instant came, on the loop's clock. Raises its error."""
        async with asyncio.timeout(ANSWER_S):
            while self._last_s <= after_s:
                if self._task.done():
                    self._task.result()
                async with self._answered:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._answered.wait(), POLL_S)
        return self._last_s

    async def end(self) -> None:
        """Close the connection."""
        self._task.cancel()
        with suppress(asyncio.CancelledError, VmckptError, AssertionError):
            await self._task
        await self._client.close()

    async def _check(self) -> None:
        expected = 0
        while True:
            expected += 1
            assert await self._client.incr(self._key) == expected  # noqa: S101
            self._last_s = asyncio.get_running_loop().time()
            async with self._answered:
                self._answered.notify_all()


def _kill(made: World, home: str, name: str) -> float:
    current = json.loads((made.state(home) / "vms" / name / "vm.json").read_text())
    services = find_by_argument(f"replica\0primary\0{made.state(home)}")
    killed_s = asyncio.get_running_loop().time()
    for pid in (*(process.pid for process in services), current["pid"]):
        os.kill(pid, signal.SIGKILL)
    return killed_s


async def _promoted(made: World, name: str) -> dict[str, Any]:
    async with asyncio.timeout(ANSWER_S):
        while True:
            status = await asyncio.to_thread(made.ok, "replicate", "status", name)
            for side in status["sides"]:
                if side["role"] == "standby" and side["state"] == "promoted":
                    return dict(side)
            await asyncio.sleep(POLL_S)
