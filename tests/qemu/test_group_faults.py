"""Who takes a group's cut may die or get stuck: no guest stays stopped or silent, of the group is
there all or nothing.
"""

import asyncio
import json
import os
import random
import signal
import subprocess
from contextlib import suppress
from typing import Any

import pytest

from tests.jobs import at_work
from tests.qemu.talking import Witness, guests, talking
from tests.qemu.world import World, kill, qemu, read, world
from vmckpt.epoch.output import brief_holds
from vmckpt.hosts.processes.process import ProcessId, find_by_argument, is_alive
from vmckpt.lab.guests.guest import GuestControl
from vmckpt.qemu import commands
from vmckpt.qemu.monitor import session
from vmckpt.vm.inventory import read_vm
from vmckpt.vm.lifecycle import owner
from vmckpt.vm.paths import lock_path

HOMES = {"web": "lab-a", "db": "lab-b"}
# When it happens: at any time, about the cut itself, about the commit.
MOMENTS = ("any", "cut", "commit")
AIM_S = 0.03
# After the end of whoever held it: QEMU lets go by itself, switches take a Python's start.
FREE_S, PATIENCE_S = 15.0, 60.0


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("fault", ["head killed", "service killed", "service stuck", "all killed"])
def test_nobody_stays_held_and_nothing_is_half_there(fault: str) -> None:
    with world(qemu("10.0"), qemu("10.0")) as made:
        asyncio.run(_faults(made, fault, int(os.environ.get("VMCKPT_TEST_FAULTS", "10"))))


async def _faults(made: World, fault: str, count: int) -> None:
    rng = random.Random(fault)
    every = guests(*HOMES, memory="96M")
    async with talking(made, HOMES, every, rate=50) as controls:
        witness, whole = Witness(made, HOMES, every), 0
        began_s = asyncio.get_running_loop().time()
        await _create(made, "usual")
        usual_s = asyncio.get_running_loop().time() - began_s
        for number in range(count):
            command = made.begin(
                "checkpoint", "create", "--group", "web,db", "--name", f"cut-{number}"
            )
            await _reach(made, MOMENTS[number % len(MOMENTS)], command, rng, usual_s)
            await _spoil(made, fault, command, rng)
            for vm, control in controls.items():
                await _free(made, vm, control)
            whole += await _all_or_nothing(made, witness, f"cut-{number}")
            if command.stdout and not command.stdout.closed:
                await asyncio.to_thread(command.communicate, timeout=PATIENCE_S)
        print(f"{fault}: {whole} of {count} groups were whole")
        await _create(made, "after")
        for control in controls.values():
            assert (await control.talk()).wrong == 0


async def _create(made: World, name: str) -> dict[str, Any]:
    words = ("--group", "web,db", "--name", name, "--max-hold", "3s")
    return await asyncio.to_thread(made.ok, "checkpoint", "create", *words)


async def _reach(
    made: World, moment: str, command: "subprocess.Popen[str]", rng: random.Random, usual_s: float
) -> None:
    """Return about then, or when the command has ended."""
    if moment == "any":
        await asyncio.sleep(rng.uniform(0.2, 1.1) * usual_s)
        return
    before = set(made.state_dir.glob("lab/*/jobs/*/*/"))

    def has_come() -> bool:
        if moment == "commit":
            return any((made.state_dir / "groups").glob("*.json"))
        told = set(made.state_dir.glob("lab/*/jobs/*/*/")) - before
        return any("pausing the guest" in read(one / "events.jsonl") for one in told)

    while command.poll() is None and not has_come():  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    await asyncio.sleep(rng.uniform(0.0, AIM_S))


def _services(made: World) -> list[ProcessId]:
    """Those at work, found fast: by what they have written down of themselves."""
    told = [read(path) for path in made.state_dir.glob("lab/*/jobs/*/*/process.json")]
    return [one for one in (ProcessId(**json.loads(text)) for text in told if text)
            if is_alive(one)]  # fmt: skip


async def _spoil(
    made: World, fault: str, command: "subprocess.Popen[str]", rng: random.Random
) -> None:
    services = _services(made)
    chosen = services if fault == "all killed" else rng.sample(services, min(1, len(services)))
    if fault == "head killed":
        kill(command)
        return
    if fault == "service stuck":
        for process in chosen:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGSTOP)
        await asyncio.sleep(2.0)
        return
    for process in chosen:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    if fault == "all killed":
        kill(command)
    else:
        await asyncio.to_thread(command.communicate, timeout=PATIENCE_S)


async def _free(made: World, vm: str, control: GuestControl) -> None:
    """The guest runs, and what it says leaves, whatever has become of who took its checkpoint."""
    await control.ping(timeout_s=FREE_S)
    host = made.asked(HOMES[vm])
    found = await read_vm(host, vm)
    assert found
    given_up_s = asyncio.get_running_loop().time() + FREE_S
    while True:
        try:
            async with session(await host.connect(found.qemu.files.onlooker), vm) as monitor:
                state = await commands.query_status(monitor)
                held = set(brief_holds(["net0"])) & set(await commands.query_objects(monitor))
        except OSError:
            held, state = {"?"}, None
        if state and state.running and not held:
            return
        assert asyncio.get_running_loop().time() < given_up_s, (vm, state, held)
        await asyncio.sleep(0.05)


async def _all_or_nothing(made: World, witness: Witness, name: str) -> bool:
    """Whether the group is whole; then it is consistent. If not, there is nothing of it."""
    for process in at_work(made.state_dir):
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGCONT)
    given_up_s = asyncio.get_running_loop().time() + PATIENCE_S
    while at_work(made.state_dir) or find_by_argument(f"--name\0{name}"):
        assert asyncio.get_running_loop().time() < given_up_s
        await asyncio.sleep(0.1)
    listed = await asyncio.to_thread(made.ok, "checkpoint", "list")
    there = {
        one["vm"]: one["id"]
        for one in listed["checkpoints"]
        if (one["facts"].get("group") or {}).get("name") == name
    }
    assert len(there) in (0, len(HOMES)), there
    assert not [one for one in listed["checkpoints"] if name in one["facts"]["name"]] or there
    assert not list((made.state_dir / "groups").glob("*.json"))
    if there:
        assert not witness.violations(there)[0]
    return bool(there)


def test_a_group_that_cannot_be_is_refused_as_a_whole() -> None:
    """One is unknown, busy, or off: there is a checkpoint of none."""
    with world(qemu("10.0"), qemu("10.0")) as made:
        for guest in guests(*HOMES, memory="96M"):
            made.run_guest(guest, HOMES[guest.name])
        assert asyncio.run(_codes(made)) == {"unknown": 3, "busy": 5, "off": 4}
        assert made.ok("checkpoint", "list")["checkpoints"] == []


async def _codes(made: World) -> dict[str, int]:
    async def code(*names: str) -> int:
        words = ("checkpoint", "create", "--group", ",".join(names))
        done = await asyncio.to_thread(made.vmckpt, *words)
        found: int = done.error["exit_code"]
        return found

    codes = {"unknown": await code("web", "nobody")}
    host = made.asked("lab-b")
    async with host.lock(lock_path(host.state_dir, "db"), owner("test")):
        codes["busy"] = await code("web", "db")
    await asyncio.to_thread(made.ok, "vm", "stop", "db", "--force")
    return codes | {"off": await code("web", "db")}
