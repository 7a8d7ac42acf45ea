"""Replicated VMs that have their memory alone: QEMUs that were started by hand, and forks."""

import asyncio
import os
import signal

import pytest

from tests.qemu.test_adopt import HAND, OWN_IMAGE, PLAIN, adopt, by_hand
from tests.qemu.test_replicate import asked_all_the_time, in_background
from tests.qemu.world import World, image, qemu, world
from tests.waiting import eventually
from vmckpt.hosts.processes.process import ProcessId, is_alive
from vmckpt.lab.guests.labguest import LabGuest

NAME = HAND.name
# Its network is the one that QEMU names itself.
HUB = OWN_IMAGE.replace(
    "-nic tap,ifname=hand0,script=no,downscript=no,model=virtio",
    "-net nic,model=virtio -net tap,ifname=hand0,script=no,downscript=no",
)

# Its disk is a raw image that both hosts have; QEMU removes the node of a `-drive` with its last
# user.
SHARED = PLAIN.replace("file=root.qcow2,if=virtio", "file=shared.raw,format=raw,if=virtio")


def is_only_on(made: World, host: str, process: ProcessId) -> bool:
    homes = [(vm["host"], vm["state"]) for vm in made.ok("vm", "list")["vms"]]
    return homes == [(host, "running")] and not is_alive(process) and len(made.qemus(NAME)) == 1


def promoted(made: World, name: str) -> bool:
    sides = {side["role"]: side for side in made.ok("replicate", "status", name)["sides"]}
    return bool(sides.get("standby", {}).get("state") == "promoted")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "style",
    [pytest.param(OWN_IMAGE, id="nic"), pytest.param(HUB, id="hub", marks=pytest.mark.long)],
)
def test_its_standby_takes_over_and_no_answer_is_taken_back(style: str) -> None:
    with world(qemu("10.0"), qemu("10.0")) as made, by_hand(made, style, monitors=3) as process:
        adopt(made)
        asyncio.run(disk_loaded(made))
        started = made.ok("replicate", "start", NAME, "lab-b")
        assert started["state"] == "protected"
        asyncio.run(killed(made, process))
        eventually(lambda: is_only_on(made, "lab-b", process), 10, "one guest, on lab-b")
        asyncio.run(sound(made))
        # And back, from a QEMU of vmckpt's.
        made.ok("replicate", "stop", NAME)
        made.ok("replicate", "start", NAME, "lab-a")
        made.ok("replicate", "failover", NAME)
        eventually(lambda: is_only_on(made, "lab-a", process), 10, "one guest, on lab-a")
        asyncio.run(sound(made))
        made.ok("replicate", "stop", NAME)


@pytest.mark.timeout(300)
def test_it_goes_on_as_it_was_started_when_its_protection_ends() -> None:
    with world(qemu("10.0"), qemu("10.0")) as made, by_hand(made, OWN_IMAGE, 3) as process:
        adopt(made)
        asyncio.run(disk_loaded(made))
        made.ok("replicate", "start", NAME, "lab-b")
        asyncio.run(stopped(made))
        assert is_alive(process)
        assert made.ok("vm", "show", NAME)["started_by"] == "another program"
        made.ok("migrate", NAME, "lab-b")


@pytest.mark.timeout(300)
@pytest.mark.long
def test_what_it_writes_beside_a_shared_disk_comes_onto_that_when_its_protection_ends() -> None:
    """The disk's own node had gone: nothing could be committed to it, and the VM stayed busy."""
    with world(qemu("10.0"), qemu("10.0")) as made:
        with (made.state_dir / "shared.raw").open("wb") as file:
            file.truncate(64 << 20)
        with by_hand(made, SHARED, monitors=3) as process:
            adopt(made)
            asyncio.run(disk_loaded(made))
            made.ok("replicate", "start", NAME, "lab-b", "--disks", "shared")
            made.ok("replicate", "stop", NAME)
            assert not (made.state("lab-a") / "vms" / NAME / "aside").exists()
            asyncio.run(sound(made))
            made.ok("replicate", "start", NAME, "lab-b", "--disks", "shared")
            asyncio.run(killed(made, process))
            eventually(lambda: is_only_on(made, "lab-b", process), 10, "one guest, on lab-b")
            made.ok("replicate", "stop", NAME)
            # A QEMU of vmckpt's has that `-drive`, too.
            made.ok("replicate", "start", NAME, "lab-a", "--disks", "shared")
            made.ok("replicate", "stop", NAME)
            asyncio.run(sound(made))


@pytest.mark.timeout(200)
def test_what_stands_against_it_is_named_before_anything_starts() -> None:
    with world(qemu("10.0"), qemu("10.0")) as made, by_hand(made, OWN_IMAGE, monitors=2) as process:
        adopt(made)
        refused = made.vmckpt("replicate", "start", NAME, "lab-b")
        assert (refused.code, "[guard]" in refused.error["why"]) == (4, True)
        assert "vmckpt migrate hand" in refused.error["remedy"]
        made.ok("migrate", NAME, "lab-b")
        assert not is_alive(process)
        assert made.ok("replicate", "start", NAME, "lab-a")["state"] == "protected"
        made.ok("replicate", "stop", NAME)


@pytest.mark.timeout(300)
def test_a_fork_is_replicated() -> None:
    guest = LabGuest("guest", HAND.number, image(), memory="160M", disk="64M")
    with world(qemu("10.0"), qemu("10.0")) as made:
        made.run_guest(guest, "lab-a", own_disk=True)
        asyncio.run(disk_loaded(made))
        taken = made.ok("checkpoint", "create", "guest")
        made.ok("vm", "stop", "guest", "--force")
        words = ("--count", "1", "--name", "f", "--network-plugged")
        (fork,) = made.ok("fork", taken["id"], *words)["forks"]
        assert fork["error"] == ""
        assert made.ok("vm", "show", "f-1")["cannot"] == []
        (process,) = made.qemus("f-1")
        made.ok("replicate", "start", "f-1", "lab-b")
        asyncio.run(killed(made, process, "f-1"))
        eventually(lambda: made.ok("vm", "show", "f-1")["host"] == "lab-b", 10, "it moved")
        assert (len(made.qemus("f-1")), is_alive(process)) == (1, False)
        asyncio.run(sound(made))
        made.ok("replicate", "stop", "f-1")


async def disk_loaded(made: World) -> None:
    control = await HAND.control(made.lab)
    await control.load_disk("rate=2M size=16M")
    await control.close()


async def killed(made: World, process: ProcessId, name: str = NAME) -> None:
    async with asked_all_the_time(made, HAND):
        os.kill(process.pid, signal.SIGKILL)
        await in_background(lambda: eventually(lambda: promoted(made, name), 30, "the takeover"))


async def stopped(made: World) -> None:
    async with asked_all_the_time(made, HAND):
        await in_background(lambda: made.ok("replicate", "stop", NAME))


async def sound(made: World) -> None:
    control = await HAND.control(made.lab)
    disk = await control.verify_disk()
    assert disk.sound, disk
    assert disk.records > 0
    await control.close()
