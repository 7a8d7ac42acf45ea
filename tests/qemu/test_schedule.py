"""Schedules of a real guest: checkpoints at their times, copies, retention; killed on the way."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.qemu.test_checkpoint import all_there, load, sound
from tests.qemu.world import World, image, qemu, world
from tests.waiting import eventually
from vmckpt.checkpoint.operate import create
from vmckpt.checkpoint.requests import TakeOptions
from vmckpt.errors import RefusedError
from vmckpt.lab.guests.labguest import LabGuest
from vmckpt.vm.inventory import read_vm


def guest() -> LabGuest:
    return LabGuest("guest", 1, image(), memory="160M", disk="32M")


@pytest.fixture(scope="module")
def made() -> Iterator[World]:
    with world(qemu("10.0"), qemu("10.0")) as one:
        one.run_guest(guest(), "lab-a")
        asyncio.run(_loaded(one))
        yield one


async def _loaded(made: World) -> None:
    control = await guest().control(made.lab)
    await load(control)
    await control.close()


def points(made: World, *words: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = made.ok("checkpoint", "list", *words)["checkpoints"]
    return found


def at_least(store: Path, count: int) -> bool:
    """Whether a service is at work, and so many checkpoints are there."""
    there = [path for path in store.glob("*") if path.is_file()]
    at_work = store.parents[1].glob("jobs/checkpoint/*/events.jsonl")
    return len(there) >= count and any(at_work)


async def ask_again(made: World, key: str) -> None:
    """Ask the VM's host for a checkpoint that was asked for before."""
    vm = await read_vm(made.asked("lab-a"), "guest")
    assert vm
    wish = TakeOptions("late", {}, "schedule", 0.010, id=key)
    await create(vm, None, wish, lambda _: None)


def done(made: World, count: int) -> bool:
    """Whether so many runs were done; no command is asked, which would take its time from them."""
    record = json.loads((made.state_dir / "schedules/guest.json").read_text())
    return bool(record["done_total"] >= count)


def shown(made: World, name: str) -> dict[str, Any]:
    return made.ok("schedule", "show", name)


@pytest.mark.timeout(300)
def test_checkpoints_come_are_copied_and_go_whoever_is_killed(made: World) -> None:
    made.ok("store", "init", "lab-b:")
    keeps = ["--keep-last", "2", "--copy-to", "lab-b:"]
    made.ok("schedule", "add", "guest", "--every", "2s", *keeps)
    auto = made.ok("schedule", "add", "guest", "--every", "auto", "--name", "auto", "--rpo", "1h")
    assert auto["interval"] is None
    # Killed while one is taken, and just after: nothing is there twice.
    for taken in (0, 1):
        with made.begin("serve", "--scheduler") as killed:
            store = made.state("lab-a") / "checkpoints/checkpoints"
            eventually(partial(at_least, store, taken), 60, "one is on its way")
            made.kill(killed)
    with made.begin("serve", "--scheduler") as service:
        try:
            eventually(partial(done, made, 3), 90, "three were done")
            assert made.vmckpt("schedule", "run-due").code == 5
        finally:
            service.terminate()
        out, err = service.communicate(timeout=60)
    assert (service.returncode, err) == (0, "")
    assert '"event": "taken"' in out
    mine = [one for one in points(made, "guest") if one["facts"]["tags"]["schedule"] == "guest"]
    # The one that was cut off last may be there and not pruned yet.
    assert len(mine) <= 3
    assert len({one["facts"]["tags"]["due"] for one in mine}) == len(mine)
    assert {"lab-a:", "lab-b:"} <= set(mine[-2]["stores"])
    # What still works for a dead scheduler, and comes late, finds it there.
    with pytest.raises(RefusedError, match="exists already"):
        asyncio.run(ask_again(made, mine[-1]["id"]))
    # The other's stays, and has taught what a checkpoint costs.
    learned = shown(made, "auto")
    assert learned["interval"]["cost_s"] < 1
    assert 0 < learned["interval"]["every_s"] < 3600
    made.ok("schedule", "rm", "guest")
    made.ok("schedule", "rm", "auto")
    asyncio.run(sound(made))
    asyncio.run(all_there(made, "guest"))
    assert made.ok("checkpoint", "restore", mine[-2]["id"], "--in-place")["vm"] == "guest"
    asyncio.run(sound(made))


@pytest.mark.timeout(300)
def test_a_guest_that_does_not_run_is_passed_over_and_its_failures_are_learned(
    made: World,
) -> None:
    made.ok("schedule", "add", "guest", "--every", "auto", "--mtbf", "10d")
    assert made.ok("schedule", "run-due")["runs"][0]["outcome"] == "done"
    for pid in made.pids("guest"):
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: not made.pids("guest"), 30, "it has ended")
    made.ok("schedule", "run-due")
    assert shown(made, "guest")["interval"]["observed_failures"] == 1
    made.ok("schedule", "rm", "guest")
    made.ok("schedule", "add", "guest", "--every", "1h")
    assert made.ok("schedule", "run-due")["runs"][0]["outcome"] == "skipped"
