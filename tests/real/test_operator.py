"""The operator is cut off for 20 s in each phase of a migration: the hosts finish it alone."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial

import pytest

from tests.qemu.world import World, image, loaded, qemu, reach
from tests.real.machines import Machines, machines
from tests.waiting import eventually
from vmckpt.lab.guests.labguest import LabGuest
from vmckpt.lab.real.management import set_operator_link

CUT_S = 20.0

PHASES = {
    "precopy": ("begin", "prepare", "mirror", "transfer", "switchover", "verify", "release"),
    "postcopy": ("begin", "prepare", "mirror", "transfer", "switchover", "drain", "release"),
}
EVERY_TIME = (("postcopy", "drain"),)
CASES = [
    pytest.param(method, phase, marks=[] if (method, phase) in EVERY_TIME else [pytest.mark.long])
    for method, phases in PHASES.items()
    for phase in phases
]


def guest() -> LabGuest:
    return LabGuest("mover", 1, image(), disk="64M")


@pytest.fixture(scope="module")
def made() -> Iterator[Machines]:
    with machines([qemu("10.0")] * 2) as one:
        one.certify()
        one.run_guest(guest(), "lab-a", own_disk=True)
        yield one


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("method", "phase"), CASES)
def test_a_pulled_cable(made: Machines, method: str, phase: str) -> None:
    home = made.ok("vm", "show", "mover")["host"]
    away = "lab-b" if home == "lab-a" else "lab-a"
    words = ["migrate", "mover", away, "--method", method, "--bandwidth", "40MB"]

    async def cut_off() -> None:
        async with loaded(made, guest()) as control:
            command = made.begin(*words)
            try:
                if phase == "begin":
                    await asyncio.sleep(random.uniform(0.2, 1.5))
                else:
                    await reach(made, phase, command, home, "mover")
                async with unplugged(made):
                    if phase != "begin":
                        done = partial(is_done, made, home)
                        await asyncio.to_thread(eventually, done, 90, "the hosts end it")
                out, err = await asyncio.to_thread(command.communicate, timeout=90)
            finally:
                made.kill(command)
            await control.ping()
        await asyncio.to_thread(judge, made, command.returncode, home, out, err)

    asyncio.run(cut_off())


@asynccontextmanager
async def unplugged(made: Machines) -> AsyncIterator[None]:
    """The operator reaches no one for the block, and for 20 s."""
    await set_operator_link(made.lab, up=False)
    try:
        since_s = time.monotonic()
        yield
        await asyncio.sleep(since_s + CUT_S - time.monotonic())
    finally:
        await set_operator_link(made.lab, up=True)


def is_done(made: World, home: str) -> bool:
    """Whether the hosts work no more, and nothing is left of the VM where it was."""
    return made.files(home) == [] and made.jobs() == []


def judge(made: World, code: int, home: str, out: str, err: str) -> None:
    assert "Traceback" not in err, err
    shown = made.ok("vm", "show", "mover")
    assert made.pids("mover") == [shown["pid"]]
    if shown["host"] == home:
        # It was cut off before the hosts had their work.
        assert code == 6, out + err
        return
    assert code == 0, out + err
    assert made.files(home) == []
    moved = json.loads(out)
    assert (moved["outcome"], moved["encryption"]) == ("completed", "x509")
    attached = made.begin("runs", "attach", moved["run"])
    again, words = attached.communicate(timeout=60)
    assert json.loads(again) == moved
    for phase in ("starting QEMU", "copying disks", "sending memory", "releasing the source"):
        assert phase in words
