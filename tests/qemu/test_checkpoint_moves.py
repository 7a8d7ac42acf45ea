"""A VM's checkpoints stay usable wherever it goes: listed, continued, verified, restored there."""

import asyncio
import os
import shlex
import signal
from functools import partial
from typing import Any

import pytest

from tests.kinds import Kind, hosts
from tests.qemu.test_checkpoint import all_there, sound
from tests.qemu.test_replicate import primary_qemu, promoted, services
from tests.qemu.world import World, image, qemu, world
from tests.waiting import eventually
from vmckpt.lab.guests.labguest import LabGuest


def shared_guest() -> LabGuest:
    return LabGuest("guest", 1, image(), memory="192M", disk="64M")


def ids(made: World) -> list[str]:
    listed = made.ok("checkpoint", "list", "guest")
    assert listed["silent"] == []
    return [one["id"] for one in listed["checkpoints"]]


def restored(made: World, host: str, checkpoint: dict[str, Any]) -> None:
    """The VM goes back to a checkpoint where it is, and is what it was."""
    done = made.ok("checkpoint", "restore", checkpoint["id"], "--in-place")
    assert (done["host"], done["checkpoint"]) == (host, checkpoint["id"])
    asyncio.run(sound(made))
    asyncio.run(all_there(made, "guest"))


async def begin(made: World, guest: LabGuest) -> None:
    control = await guest.control(made.lab)
    # Little of what a checkpoint holds: what one stores beyond the last is less still.
    await control.load_memory("rate=2M set=4M pattern=uniform content=random")
    await control.load_disk("rate=1M size=2M")
    await control.close()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", [Kind.LAB, pytest.param(Kind.REAL, marks=pytest.mark.real)])
def test_after_a_migration(kind: Kind) -> None:
    with hosts(kind, qemu("10.0"), qemu("10.0")) as made:
        made.run_guest(shared_guest(), "lab-a")
        asyncio.run(begin(made, shared_guest()))
        shared = str(made.shared / "points")
        made.ok("store", "init", shared)
        on_a = made.ok("checkpoint", "create", "guest", "--name", "on-a")
        in_shared = made.ok("checkpoint", "create", "guest", "--store", shared)
        assert in_shared["apart"]
        made.ok("migrate", "guest", "lab-b", "--disks", "shared")
        assert ids(made) == [on_a["id"], in_shared["id"]]
        # Nothing of the tracking came along; what is stored is what differs all the same.
        after = made.ok("checkpoint", "create", "guest", "--store", shared)
        assert (after["parent"], after["apart"]) == (in_shared["id"], False)
        assert after["stored"] < in_shared["stored"] / 2
        on_b = made.ok("checkpoint", "create", "guest", "--name", "on-b")
        assert on_b["apart"]
        assert ids(made) == [one["id"] for one in (on_a, in_shared, after, on_b)]
        assert made.ok("checkpoint", "verify", "on-a")["stores"] == ["lab-a:"]
        restored(made, "lab-b", in_shared)
        if kind is Kind.REAL:
            refused = made.vmckpt("checkpoint", "restore", "on-a", "--in-place")
            assert refused.code == 4
            assert refused.error["why"] == "it is in lab-a:"
            words = shlex.split(refused.error["remedy"].partition(": vmckpt ")[2])
            assert made.ok(*words)["copied"] == [on_a["id"]]
            assert made.ok("checkpoint", "verify", "on-a")["stores"] == ["lab-a:", "lab-b:"]
        restored(made, "lab-b", on_a)
        # What it was restored as is what comes next.
        last = made.ok("checkpoint", "create", "guest", "--name", "last")
        if kind is Kind.REAL:
            assert last["parent"] == on_a["id"]
        made.ok("checkpoint", "rm", "on-a")
        assert on_a["id"] not in ids(made)


@pytest.mark.timeout(300)
def test_after_a_failover() -> None:
    guest = LabGuest("guest", 1, image(), memory="160M", disk="32M", disk_format="raw")
    with world(qemu("10.0"), qemu("10.0")) as made:
        made.run_guest(guest, "lab-a", own_disk=True)
        asyncio.run(begin(made, guest))
        shared = str(made.shared / "points")
        made.ok("store", "init", shared)
        before = made.ok("checkpoint", "create", "guest", "--store", shared)
        made.ok("replicate", "start", "guest", "lab-b")
        for pid in [*services(made, "primary"), primary_qemu(made)]:
            os.kill(pid, signal.SIGKILL)
        eventually(partial(promoted, made), 60, "lab-b goes on")
        eventually(lambda: made.vmckpt("vm", "show", "guest").result.get("host") == "lab-b", 60,
                   "the VM is at home on lab-b")  # fmt: skip
        made.ok("replicate", "stop", "guest")
        assert ids(made) == [before["id"]]
        after = made.ok("checkpoint", "create", "guest", "--store", shared)
        assert after["parent"] == before["id"]
        assert after["stored"] < before["stored"] / 2
        restored(made, "lab-b", before)
        restored(made, "lab-b", after)
