"""A host that looks like a machine is emptied over SSH and filled again, its own disks included."""

import asyncio

import pytest

from tests.qemu.world import image, loaded
from tests.real.machines import Machines
from vmckpt.lab.guests.labguest import LabGuest

LOOK = ("--for", "500ms")


@pytest.mark.long
def test_what_a_host_has_leaves_it_with_its_disk_and_comes_back(real_lab: Machines) -> None:
    guest = LabGuest("web", 1, image(), memory="192M", disk="64M")
    real_lab.certify()
    real_lab.run_guest(guest, "lab-a", own_disk=True)

    async def main() -> None:
        async with loaded(real_lab, guest):
            there = await asyncio.to_thread(real_lab.ok, "drain", "lab-a", *LOOK)
            assert there["moved"] == [{"vm": "web", "host": "lab-b"}]
            assert await asyncio.to_thread(real_lab.files, "lab-a") == []
            back = await asyncio.to_thread(real_lab.ok, "undrain", "lab-a", *LOOK)
            assert back["moved"] == [{"vm": "web", "host": "lab-a"}]
            assert await asyncio.to_thread(real_lab.files, "lab-b") == []

    asyncio.run(main())
    assert len(real_lab.qemus("web")) == 1
    real_lab.ok("vm", "stop", "web")
    real_lab.ok("vm", "rm", "web")
