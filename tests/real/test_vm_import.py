"""A libvirt domain that is off becomes a VM of vmckpt's own, and a domain again."""

import asyncio
import shutil
from dataclasses import replace

import pytest

from tests.qemu.test_checkpoint import load, sound
from tests.qemu.world import image
from tests.real.domains import GUEST, OWN_DISK, remove_domain, run_domain, states
from tests.real.machines import Machines
from tests.real.test_domain_firmware import FIRMWARE, NVRAM
from tests.waiting import eventually

pytestmark = [pytest.mark.qemu, pytest.mark.timeout(300)]
TWIN = "twin"
# What virt-install gives a guest besides its disk.
DESKTOP = f"""
<disk type='file' device='disk'><driver name='qemu' type='qcow2' cache='none'/>
<source file='{OWN_DISK}'/><target dev='vda' bus='virtio'/></disk>
<disk type='file' device='cdrom'><target dev='sda' bus='sata'/><readonly/></disk>
<channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'/></channel>
<input type='tablet' bus='usb'/><graphics type='vnc' autoport='yes'/>
<video><model type='virtio' heads='1' primary='yes'/></video>
<rng model='virtio'><backend model='random'>/dev/urandom</backend></rng>"""


async def answers(made: Machines) -> None:
    control = await GUEST.control(made.lab)
    await control.close()


def test_a_domain_becomes_a_vm_and_a_domain_again(own_disk: Machines) -> None:
    made = own_disk
    made.virsh("lab-a", "destroy", GUEST.name)
    made.virsh("lab-a", "undefine", GUEST.name)
    run_domain(made, "lab-a", disk_xml=DESKTOP)
    refused = made.vmckpt("vm", "import", GUEST.name)
    assert refused.code == 4, refused
    assert refused.error["why"] == "it runs"
    made.virsh("lab-a", "destroy", GUEST.name)
    made.virsh("lab-a", "autostart", GUEST.name)

    imported = made.ok("vm", "import", GUEST.name)
    assert (imported["host"], imported["state"]) == ("lab-a", "stopped")
    assert states(made) == {}
    facts = made.ok("vm", "show", GUEST.name)
    assert (facts["driver"], facts["state"]) == ("qemu", "stopped")
    assert facts["cannot"] == []
    assert made.ok("vm", "start", GUEST.name)["state"] == "running"
    asyncio.run(answers(made))
    # What vmckpt does with its own VMs only.
    taken = made.ok("checkpoint", "create", GUEST.name, "--name", "one")
    assert taken["pause_ms"] > 0
    moved = made.ok("migrate", GUEST.name, "lab-b")
    assert moved["outcome"] == "completed"
    made.ok("migrate", GUEST.name, "lab-a")

    refused = made.vmckpt("vm", "edit", GUEST.name, "--spec", "/dev/null")
    assert refused.code != 0, refused
    made.ok("vm", "stop", GUEST.name, "--force")
    xml = made.shared / "dom-back.xml"
    xml.write_text(made.ok("vm", "export", GUEST.name, "--format", "libvirt")["text"])
    made.ok("vm", "rm", GUEST.name, "--yes")
    made.ok("vm", "import", str(xml), "--host", "lab-a", "--name", "again")
    made.ok("vm", "start", "again")
    asyncio.run(answers(made))
    made.ok("vm", "stop", "again", "--force")
    made.ok("vm", "rm", "again", "--yes")
    made.virsh("lab-a", "define", str(xml))
    made.virsh("lab-a", "start", GUEST.name)
    assert states(made) == {"lab-a": "running"}
    assert str(OWN_DISK) in made.virsh("lab-a", "domblklist", GUEST.name)


@pytest.mark.long
def test_copies_of_an_imported_domain_are_vms_and_become_domains(own_disk: Machines) -> None:
    """With UEFI, whose variables are one of its disks."""
    made = own_disk
    made.virsh("lab-a", "destroy", GUEST.name)
    made.virsh("lab-a", "undefine", GUEST.name)
    run_domain(made, "lab-a", disk_xml=DESKTOP, firmware=FIRMWARE)
    made.virsh("lab-a", "destroy", GUEST.name)
    made.ok("vm", "import", GUEST.name)
    made.ok("vm", "start", GUEST.name)
    try:
        asyncio.run(under_load(made))
        made.ok("checkpoint", "create", GUEST.name, "--name", "whole")
        made.ok("checkpoint", "restore", "whole", "--as", TWIN)
        forks = made.ok("fork", "whole", "--count", "2", "--name", "f")["forks"]
        assert [one["error"] for one in forks] == ["", ""]
        for name in (TWIN, "f-1", "f-2"):
            unharmed(made, name)
        asyncio.run(sound(made, GUEST))
        for name in (TWIN, "f-1"):
            eventually(lambda: made.ok("vm", "show", name)["operation"] is None, 60, "its memory")  # noqa: B023
            made.ok("vm", "stop", name, "--force")
            xml = made.shared / f"dom-{name}.xml"
            xml.write_text(made.ok("vm", "export", name, "--format", "libvirt")["text"])
            made.virsh("lab-a", "define", str(xml))
            made.virsh("lab-a", "start", name)
            asyncio.run(sound(made, GUEST))
            shown = made.virsh("lab-a", "dumpxml", name)
            assert "<link state='down'/>" in shown
            assert f"/var/lib/vmckpt/images/{name}-" in shown
            assert str(OWN_DISK) not in shown
            made.virsh("lab-a", "destroy", name)
    finally:
        for name in (TWIN, "f-1"):
            for words in (("destroy", name), ("undefine", name, "--nvram")):
                made.inside("lab-a", "virsh", "--connect", "qemu:///system", *words)
        for name in (TWIN, "f-1", "f-2", GUEST.name):
            made.vmckpt("vm", "stop", name, "--force")
            made.vmckpt("vm", "rm", name)
        made.inside("lab-a", "sh", "-c", f"rm -rf /var/lib/vmckpt/images/* {NVRAM}/*")


@pytest.mark.long
def test_an_imported_domain_with_uefi_is_replicated(own_disk: Machines) -> None:
    """Its variables reach the standby as its disk does."""
    made = own_disk
    made.virsh("lab-a", "destroy", GUEST.name)
    made.virsh("lab-a", "undefine", GUEST.name)
    run_domain(made, "lab-a", disk_xml=DESKTOP, firmware=FIRMWARE)
    made.virsh("lab-a", "destroy", GUEST.name)
    made.ok("vm", "import", GUEST.name)
    made.ok("vm", "start", GUEST.name)
    leases = made.shared / "dom-leases"
    try:
        asyncio.run(under_load(made))
        for folder in (OWN_DISK.parent, NVRAM):
            made.inside("lab-b", "mkdir", "-p", str(folder))
        made.ok("replicate", "start", GUEST.name, "lab-b", "--lease", str(leases))
        made.ok("replicate", "failover", GUEST.name)
        assert made.ok("vm", "show", GUEST.name)["host"] == "lab-b"
        asyncio.run(sound(made, GUEST))
        made.ok("replicate", "failback", GUEST.name)
        asyncio.run(sound(made, GUEST))
        made.ok("replicate", "stop", GUEST.name)
    finally:
        made.vmckpt("replicate", "stop", GUEST.name)
        made.vmckpt("vm", "stop", GUEST.name, "--force")
        made.vmckpt("vm", "rm", GUEST.name)
        shutil.rmtree(leases, ignore_errors=True)
        for host in ("lab-a", "lab-b"):
            made.inside(host, "sh", "-c", f"rm -rf {OWN_DISK.parent}/* {NVRAM}/*")


def unharmed(made: Machines, name: str) -> None:
    """The guest finds its memory and its disk as they were, and goes on."""
    logs = f"/var/lib/vmckpt/vms/{name}/qemu-*/console.log"

    def ticks() -> list[str]:
        read = made.inside("lab-a", "sh", "-c", f"cat {logs}").stdout.splitlines()
        return [line for line in read if "VK tick=" in line]

    before = len(ticks())
    eventually(lambda: len(ticks()) > before + 2, 60, f"{name} ticks")
    assert "mem_errors=0 disk_errors=0" in ticks()[-1]


async def under_load(made: Machines) -> None:
    control = await GUEST.control(made.lab)
    await load(control)
    await control.close()


def test_a_vm_that_its_spec_describes_becomes_a_domain(real_lab: Machines) -> None:
    made, guest = real_lab, replace(GUEST, image=image())
    try:
        made.run_guest(guest, "lab-a")
        asyncio.run(answers(made))
        made.ok("vm", "stop", guest.name, "--force")
        xml = made.shared / "dom-own.xml"
        xml.write_text(made.ok("vm", "export", guest.name, "--format", "libvirt")["text"])
        made.virsh("lab-a", "define", str(xml))
        made.ok("vm", "rm", guest.name, "--yes")
        made.virsh("lab-a", "start", guest.name)
        asyncio.run(answers(made))
        assert states(made) == {"lab-a": "running"}
    finally:
        remove_domain(made)
