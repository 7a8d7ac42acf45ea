"""Checkpoints of real guests: what comes back is the guest as it was, and says so itself."""

import asyncio
import json
import os
import random
import signal
import stat
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import at_work
from tests.kinds import VERSIONS
from tests.qemu.world import COMMAND, World, image, qemu, world
from vmckpt.lab.guests.guest import GuestControl
from vmckpt.lab.guests.labguest import LabGuest

PATIENCE_S = 60.0


def guest() -> LabGuest:
    return LabGuest("guest", 1, image(), memory="192M", disk="64M")


async def load(control: GuestControl) -> None:
    await control.load_memory("rate=20M set=32M pattern=uniform content=random")
    await control.load_disk("rate=2M size=16M")


async def sound(made: World, of: LabGuest | None = None) -> None:
    """The guest answers, and neither its memory nor its disk has lost or gained anything."""
    control = await (of or guest()).control(made.lab)
    try:
        memory, disk = await control.verify_memory(), await control.verify_disk()
        assert memory.sound, memory
        assert disk.sound, disk
        assert disk.records > 0
    finally:
        await control.close()


async def all_there(made: World, name: str) -> None:
    """Wait until a restored VM's memory is whole, and no one works on it."""
    given_up_s = time.monotonic() + PATIENCE_S
    while (await asyncio.to_thread(made.ok, "vm", "show", name))["operation"] is not None:
        assert time.monotonic() < given_up_s
        await asyncio.sleep(0.1)


async def take(made: World, *words: str) -> dict[str, Any]:
    return await asyncio.to_thread(made.ok, "checkpoint", "create", "guest", *words)


async def go_back(made: World, *words: str) -> dict[str, Any]:
    return await asyncio.to_thread(made.ok, "checkpoint", "restore", *words)


def console(made: World, name: str) -> str:
    logs = sorted(made.state("lab-a").glob(f"vms/{name}/qemu-*/console.log"))
    return "".join(log.read_text(errors="replace") for log in logs)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("version", VERSIONS)
def test_it_is_the_guest_again_whichever_checkpoint_it_goes_back_to(version: str) -> None:
    with world(qemu(version)) as made:
        made.run_guest(guest(), "lab-a")
        asyncio.run(_there_and_back(made, 3))
        assert not list(made.state("lab-a").glob("vms/guest/restore.json"))
        assert not list(made.shared.glob("*.vmckpt-*"))
        asyncio.run(_copies_and_forks(made, says_where_ram_is=version != "7.2"))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("version", ["10.0", "7.2"])
def test_fifty_checkpoints_in_random_order(version: str) -> None:
    with world(qemu(version)) as made:
        made.run_guest(guest(), "lab-a")
        asyncio.run(_there_and_back(made, 50))


async def _there_and_back(made: World, count: int) -> None:
    rng = random.Random(count)
    control = await guest().control(made.lab)
    await load(control)
    taken = []
    for number in range(count):
        await asyncio.sleep(rng.uniform(0.2, 1.0))
        taken.append(await take(made, "--name", f"point-{number}", "--tag", "by=test"))
        assert (await control.stat()).mem_errors == 0
    await control.close()
    listed = await asyncio.to_thread(made.ok, "checkpoint", "list", "guest")
    assert [one["id"] for one in listed["checkpoints"]] == [one["id"] for one in taken]
    assert listed["checkpoints"][1]["parent"] == taken[0]["id"]
    assert taken[-1]["stored"] < taken[0]["stored"]
    assert all(0 < one["pause_ms"] < one["stopped_ms"] for one in taken)
    order = list(range(count))
    rng.shuffle(order)
    for number in order:
        eager = ["--eager"] if number % 3 == 0 else []
        done = await go_back(made, taken[number]["id"][:12], "--in-place", *eager)
        print(f"point-{number}: pause {taken[number]['pause_ms']} ms", done)
        await sound(made)
        await all_there(made, "guest")


def in_memory(made: World, name: str) -> set[Path]:
    """The files in memory that a VM's QEMU has mapped."""
    (pid,) = made.pids(name)
    words = [line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return {Path(one[5]) for one in words if len(one) == 6 and one[5].startswith("/dev/shm/")}


def writable_in_memory(made: World, name: str) -> set[Path]:
    """The files in memory that a VM's QEMU can write."""
    (pid,) = made.pids(name)
    opened = [fd for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.lstat().st_mode & stat.S_IWUSR]
    return {fd.readlink() for fd in opened if str(fd.readlink()).startswith("/dev/shm/")}


async def _copies_and_forks(made: World, *, says_where_ram_is: bool) -> None:
    await go_back(made, "point-1", "--as", "copy")
    forked = await asyncio.to_thread(made.ok, "fork", "point-0", "--count", "3", "--name", "f")
    assert [one["error"] for one in forked["forks"]] == ["", "", ""]
    names = ["guest", "copy", "f-1", "f-2", "f-3"]
    before = {name: console(made, name).count("VK tick=") for name in names}
    given_up_s = time.monotonic() + PATIENCE_S
    while not all(console(made, name).count("VK tick=") > before[name] + 1 for name in names):
        assert time.monotonic() < given_up_s, {name: console(made, name)[-200:] for name in names}
        await asyncio.sleep(0.2)
    for name in names:
        last = [line for line in console(made, name).splitlines() if "VK tick=" in line][-1]
        assert "mem_errors=0 disk_errors=0" in last
    taken = await asyncio.to_thread(made.vmckpt, "checkpoint", "create", "f-1")
    assert taken.code == (0 if says_where_ram_is else 4), taken
    memory = {path for name in names[1:] for path in in_memory(made, name)}
    # A copy's, and one for all forks, by a name of each: the one it was made under is gone.
    assert sorted(path.stat().st_nlink for path in memory) == [1, 3, 3, 3], memory
    assert len(writable_in_memory(made, "copy")) == 1
    if says_where_ram_is:  # from QEMU 8.2 on: no fork can punch holes into what all of them map
        assert not [one for name in names[2:] for one in writable_in_memory(made, name)]
    await _again_where_some_run(made)
    memory |= in_memory(made, "f-1")
    for name in names[1:]:
        await all_there(made, name)
        await asyncio.to_thread(made.ok, "vm", "stop", name, "--force")
        await asyncio.to_thread(made.ok, "vm", "rm", name)
    assert not [path for path in memory if path.exists()]


async def _again_where_some_run(made: World) -> None:
    """Those that are there are left alone, also when all is taken back."""
    await asyncio.to_thread(made.ok, "vm", "stop", "f-1", "--force")
    gone = await asyncio.to_thread(made.ok, "vm", "rm", "f-1")
    for disk in gone["disks"]:
        made.here("lab-a", Path(disk)).unlink()
    run_on = made.pids("f-2"), made.pids("f-3")
    words = ["fork", "point-0", "--count", "3", "--name", "f"]
    again = await asyncio.to_thread(made.vmckpt, *words)
    errors = [one["error"] for one in again.result["forks"]]
    assert (again.code, errors[0]) == (7, "")
    assert all("already" in error for error in errors[1:]), errors
    assert (made.pids("f-2"), made.pids("f-3")) == run_on


@pytest.mark.timeout(300)
def test_whoever_takes_or_restores_may_be_killed() -> None:
    """Kill -9 at some moments: what was there stays, the guest runs, the next command works."""
    with world(qemu("10.0")) as made:
        made.run_guest(guest(), "lab-a")
        asyncio.run(_killed(made))


async def _killed(made: World) -> None:
    control = await guest().control(made.lab)
    await load(control)
    await control.close()
    await take(made, "--name", "whole")
    for after_s in (0.6, 1.2):
        command = made.begin("checkpoint", "create", "guest")
        await kill_service(made, command, after_s)
        await sound(made)
    taken = await take(made, "--name", "after")
    assert taken["pause_ms"] > 0
    for after_s in (0.5, 1.0):
        command = made.begin("checkpoint", "restore", "whole", "--in-place")
        await kill_service(made, command, after_s)
        shown = await asyncio.to_thread(made.vmckpt, "vm", "show", "guest")
        assert shown.code in (0, 5), shown
        await sound(made)
    await go_back(made, "after", "--in-place")
    await sound(made)
    await all_there(made, "guest")


async def kill_service(made: World, command: "subprocess.Popen[str]", after_s: float) -> None:
    """SIGKILL what does the work on the host, and whoever asked."""
    await asyncio.sleep(after_s)
    for process in at_work(made.state_dir):
        if "--recover" in _words(process.pid):
            continue
        os.kill(process.pid, signal.SIGKILL)
    command.kill()
    command.communicate()


def _words(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return "--recover"


def test_what_is_not_there_or_not_meant_is_said() -> None:
    with world(qemu("10.0")) as made:
        assert made.vmckpt("checkpoint", "show", "none").error["exit_code"] == 3
        assert made.vmckpt("checkpoint", "create", "nobody").error["exit_code"] == 3
        done = made.vmckpt("checkpoint", "restore", "x", "--as", "y", "--in-place")
        assert done.error["exit_code"] == 2
        text = subprocess.run(
            [*COMMAND, "checkpoint", "list"], env=made.environment, capture_output=True, text=True,
            check=True,
        ).stdout  # fmt: skip
        assert "CHECKPOINT" in text
        assert json.loads(json.dumps(made.ok("checkpoint", "list"))) == {
            "checkpoints": [],
            "silent": [],
        }
