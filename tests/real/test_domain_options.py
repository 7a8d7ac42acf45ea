"""What `virsh migrate` offers besides reaches QEMU through libvirt; domains that are off move.

What QEMU was told stands in libvirtd's log, see `secure`.
"""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.qemu.world import loaded
from tests.real.domains import GUEST, OWN_DISK, log, states
from tests.real.machines import Machines

pytestmark = [pytest.mark.qemu, pytest.mark.long, pytest.mark.timeout(300)]
RENAMED = "renamed"


def told(made: Machines, host: str, command: str) -> list[dict[str, Any]]:
    """The arguments of every such command that the host's libvirtd has sent to a QEMU."""
    sent = re.compile(r"QEMU_MONITOR_SEND_MSG: .*? msg=(\{.*?\})\s*$", re.MULTILINE)
    found = sent.findall(text(made, host))
    commands = [json.loads(one) for one in found if f'"{command}"' in one]
    return [one.get("arguments", {}) for one in commands if one["execute"] == command]


def text(made: Machines, host: str) -> str:
    return log(made, host).read_text(errors="replace")


def parameters(made: Machines, host: str) -> dict[str, Any]:
    """All that the last migration's QEMU was told."""
    merged: dict[str, Any] = {}
    for one in told(made, host, "migrate-set-parameters"):
        merged |= one
    return merged


def move(made: Machines, *words: str) -> dict[str, Any]:
    async def work() -> dict[str, Any]:
        async with loaded(made, GUEST):
            return await asyncio.to_thread(made.ok, "migrate", GUEST.name, *words)

    return asyncio.run(work())


def test_how_memory_goes_is_told_to_qemu(domain: Machines) -> None:
    move(
        domain, "lab-b", "--auto-converge-initial", "30", "--auto-converge-increment", "5",
        "--compress", "xbzrle", "--xbzrle-cache", "16MiB", "--abort-on-error",
    )  # fmt: skip
    said = parameters(domain, "lab-a")
    assert said["cpu-throttle-initial"] == 30
    assert said["cpu-throttle-increment"] == 5
    assert said["xbzrle-cache-size"] == 16 << 20
    move(domain, "lab-a", "--method", "postcopy", "--postcopy-bandwidth", "50MiB")
    assert parameters(domain, "lab-b")["max-postcopy-bandwidth"] == 50 << 20
    move(domain, "lab-b", "--compress", "zlib", "--tls-destination", "lab-b")
    said = parameters(domain, "lab-a")
    assert (said["multifd-compression"], said["tls-hostname"]) == ("zlib", "lab-b")
    for words, option in (
        (("--zerocopy", "--parallel", "2"), "--zerocopy"),
        (("--tls-destination", "lab-c"), "--tls-destination"),
        (("--compress", "zstd", "--compress-level", "3"), "--compress-level"),
    ):
        refused = domain.vmckpt("migrate", GUEST.name, "lab-a", *words)
        assert refused.code == 4, refused
        assert option in refused.error["why"] + refused.error["remedy"]
    assert states(domain) == {"lab-b": "running"}


def test_a_disk_is_copied_with_its_writes_waiting(own_disk: Machines) -> None:
    move(own_disk, "lab-b", "--synchronous-writes")
    [mirror] = told(own_disk, "lab-a", "blockdev-mirror")
    assert mirror["copy-mode"] == "write-blocking"
    assert own_disk.inside("lab-a", "test", "-e", str(OWN_DISK)).code == 1
    copies = [one for one in told(own_disk, "lab-a", "blockdev-add") if one["driver"] == "nbd"]
    assert [one["detect-zeroes"] for one in copies] == ["unmap"]


def linked(made: Machines) -> tuple[Path, Path]:
    """A link to the domain's disk, and a file of XML that names it."""
    described = made.virsh("lab-a", "dumpxml", "--migratable", GUEST.name)
    link = made.shared / "dom-link.qcow2"
    if not link.is_symlink():
        link.symlink_to("dom.qcow2")
    elsewhere = described.replace("/dom.qcow2", "/dom-link.qcow2")
    assert elsewhere != described
    file = made.state_dir / "there.xml"
    file.write_text(elsewhere)
    return link, file


def test_a_domain_arrives_as_its_xml_for_the_target_says(domain: Machines) -> None:
    link, file = linked(domain)
    elsewhere = file.read_text()
    words = ("--dname", RENAMED, "--xml", str(file), "--persistent-xml", str(file))
    domain.ok("migrate", GUEST.name, "lab-b", *words)
    facts = domain.ok("vm", "show", RENAMED)
    assert (facts["host"], facts["state"], facts["disks"]) == ("lab-b", "running", [str(link)])
    assert str(link) in domain.virsh("lab-b", "dumpxml", "--inactive", RENAMED)
    assert GUEST.name not in domain.virsh("lab-a", "list", "--all", "--name").split()
    domain.ok("migrate", RENAMED, "lab-a", "--dname", GUEST.name)
    assert states(domain) == {"lab-a": "running"}
    file.write_text(elsewhere.replace("<uuid>", "<uuid>1", 1).replace("1</uuid>", "</uuid>", 1))
    refused = domain.vmckpt("migrate", GUEST.name, "lab-b", "--xml", str(file))
    assert refused.code in (2, 4), refused


def test_a_domain_that_is_off_moves_with_its_disks_where_they_are(domain: Machines) -> None:
    refused = domain.vmckpt("migrate", GUEST.name, "lab-b", "--offline")
    assert (refused.code, "runs" in refused.error["why"]) == (4, True)
    domain.ok("vm", "stop", GUEST.name, "--force")
    refused = domain.vmckpt("migrate", GUEST.name, "lab-b")
    assert (refused.code, "--offline" in refused.error["remedy"]) == (4, True)
    link, file = linked(domain)
    words = ("migrate", GUEST.name, "lab-b", "--offline", "--xml", str(file))
    assert domain.ok(*words, "--dry-run")["possible"]
    moved = domain.ok(*words)
    assert (moved["method"], moved["warnings"]) == ("offline", [])
    assert states(domain) == {"lab-b": "shut off"}
    # What it was to be there it is for good.
    assert str(link) in domain.virsh("lab-b", "dumpxml", "--inactive", GUEST.name)
    moved = domain.ok("migrate", GUEST.name, "lab-a", "--offline", "--dname", RENAMED)
    assert moved["vm"] == RENAMED
    assert domain.ok("vm", "show", RENAMED)["state"] == "stopped"
    domain.virsh("lab-a", "domrename", RENAMED, GUEST.name)
    domain.ok("vm", "start", GUEST.name)
    domain.virsh("lab-a", "managedsave", GUEST.name)
    refused = domain.vmckpt("migrate", GUEST.name, "lab-b", "--offline")
    assert (refused.code, "[saved-memory]" in refused.error["why"]) == (4, True)
    domain.ok("vm", "start", GUEST.name)
    assert states(domain) == {"lab-a": "running"}


def test_a_domain_that_is_off_keeps_disks_that_the_target_does_not_see(own_disk: Machines) -> None:
    own_disk.ok("vm", "stop", GUEST.name, "--force")
    refused = own_disk.vmckpt("migrate", GUEST.name, "lab-b", "--offline")
    assert refused.code == 4
    assert "libvirt copies no disk of a domain that is off: vda" in refused.error["why"]
    assert states(own_disk) == {"lab-a": "shut off"}
