"""Migrations between hosts that look like machines, driven from this one over SSH."""

import asyncio

from tests.qemu.world import image, loaded
from tests.real.machines import Machines
from vmckpt.lab.guests.labguest import LabGuest


def test_a_guest_moves_encrypted_its_disk_shared_or_copied(real_lab: Machines) -> None:
    guest = LabGuest("web", 1, image())
    copied = guest.spec().replace('path = "web.qcow2"', 'image = "web.qcow2"')
    real_lab.certify()

    async def main() -> None:
        for spec, method in ((guest.spec(), "precopy"), (copied, "postcopy")):
            path = real_lab.shared / "web.toml"
            path.write_text(spec)
            real_lab.ok("vm", "run", str(path), "--host", "lab-a")
            async with loaded(real_lab, guest):
                migrate = ["migrate", "web", "lab-b", "--method", method, "--tls", "require"]
                moved = await asyncio.to_thread(real_lab.ok, *migrate)
                assert (moved["outcome"], moved["encryption"]) == ("completed", "x509")
                assert moved["guest_downtime_ms"] is not None
                assert len(real_lab.qemus("web")) == 1
                assert await asyncio.to_thread(real_lab.files, "lab-a") == []
            real_lab.ok("vm", "stop", "web")
            real_lab.ok("vm", "rm", "web")

    asyncio.run(main())
