"""A replicated guest whose disk both hosts have: no record that was told of is lost, none too many.

The file is never ahead of what the standby has, and there is one who writes to it.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.qemu.test_replicate import is_only_on, services, sides
from tests.qemu.test_replicated_disks import (
    fill_and_write,
    is_on,
    kill,
    kill_all_of_the_primary,
    told_of_disk,
)
from tests.qemu.world import World, image, qemu, world
from tests.waiting import eventually
from vmckpt.lab.guests.labguest import LabGuest

SHARED = ("--disks", "shared")


@contextmanager
def guest_with_shared_disk(version: str) -> Iterator[tuple[World, LabGuest]]:
    """On lab-a, writing records; both hosts have its disk at one path."""
    guest = LabGuest("guest", 1, image(), memory="96M", disk="32M", disk_format="raw")
    with world(qemu(version), qemu(version)) as made:
        made.run_guest(guest, "lab-a")
        asyncio.run(fill_and_write(made, guest, "8M"))
        try:
            yield made, guest
        finally:
            made.vmckpt("replicate", "stop", "guest")


def protect(made: World, standby: str) -> None:
    started = made.ok("replicate", "start", "guest", standby, *SHARED)
    assert started["state"] == "protected"


@pytest.mark.parametrize("version", ["10.0", pytest.param("7.2", marks=pytest.mark.long)])
def test_a_killed_primary_with_a_shared_disk_is_replaced_and_no_record_is_lost(
    version: str,
) -> None:
    with guest_with_shared_disk(version) as (made, guest):
        refused = made.vmckpt("replicate", "start", "guest", "lab-b", "--disks", "copy")
        assert (refused.code, "--disks shared" in refused.error["remedy"]) == (4, True)

        # Ended, and what stands aside is written to the disk, while the guest writes on.
        protect(made, "lab-b")
        assert layer(made).exists()
        asyncio.run(told_of_disk(made, guest, partial(made.ok, "replicate", "stop", "guest"), over))
        assert not layer(made).parent.exists()

        protect(made, "lab-b")
        kill_it = partial(kill_all_of_the_primary, made, "lab-a")
        asyncio.run(told_of_disk(made, guest, kill_it))
        eventually(lambda: is_only_on(made, "lab-b"), 10, "one guest, on lab-b")
        assert not (made.state("lab-a") / "vms/guest").exists()


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("version", ["10.0", "7.2"])
def test_a_guest_with_a_shared_disk_is_handed_over_and_goes_on_alone(version: str) -> None:
    with guest_with_shared_disk(version) as (made, guest):
        # By one that lives and has the file open.
        protect(made, "lab-b")
        hand_over = partial(made.ok, "replicate", "failover", "guest")
        asyncio.run(told_of_disk(made, guest, hand_over, is_on("lab-b")))
        made.ok("replicate", "stop", "guest")
        hand_back = partial(made.ok, "replicate", "failback", "guest", "lab-a", *SHARED)
        asyncio.run(told_of_disk(made, guest, hand_back, is_on("lab-a")))

        # The standby dies: what the guest writes stands aside until the end is asked for.
        protect(made, "lab-b")
        asyncio.run(told_of_disk(made, guest, partial(kill, made, "standby"), is_alone))
        assert layer(made).exists()
        busy = made.vmckpt("vm", "stop", "guest", "--force")
        assert (busy.code, "replicate stop" in busy.error["remedy"]) == (5, True)
        asyncio.run(told_of_disk(made, guest, partial(made.ok, "replicate", "stop", "guest"), over))
        assert not layer(made).parent.exists()
        made.ok("migrate", "guest", "lab-b")
        asyncio.run(told_of_disk(made, guest, lambda: None, is_on("lab-b")))


def layer(made: World) -> Path:
    return made.state("lab-a") / "vms/guest/aside/disk0.qcow2"


def is_alone(made: World) -> bool:
    return not services(made, "primary") and sides(made)["primary"].get("ending") == "alone"


def over(made: World) -> bool:
    return made.vmckpt("replicate", "status", "guest").code == 3
