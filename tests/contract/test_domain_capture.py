"""What of a domain's QEMU a checkpoint has to know, against a scripted monitor."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.scripted_qmp import answering, play
from vmckpt.preflight.domains import capture
from vmckpt.preflight.finding import REFUSE, Finding, ask
from vmckpt.qemu.monitor import Monitor

pytestmark = pytest.mark.contract
FLASH = "/machine/system.flash"


def drive(qdev: str, node: str, *, read_only: bool = False) -> dict[str, object]:
    inserted = {"node-name": node, "drv": "raw", "file": f"/i/{node}", "ro": read_only}
    return {"device": "", "qdev": qdev, "inserted": inserted}


KNOWN = [
    drive("/machine/peripheral/virtio-disk0/virtio-backend", "libvirt-1-format"),
    drive(f"{FLASH}0", "code", read_only=True),
    drive(f"{FLASH}1", "variables"),
    drive("/machine/peripheral/sata0-0-0", "cd", read_only=True),
    {"device": "empty", "qdev": "/machine/peripheral/sata0-0-1"},
    {"device": "unused", "inserted": {"node-name": "#block854", "file": "/i/unused"}},
]


def found(*drives: object) -> list[Finding]:
    """As QEMU 10.0 names them."""
    vm: Any = SimpleNamespace(nodes=("libvirt-1-format",))
    findings = list[Finding]()

    async def client(monitor: Monitor) -> None:
        findings.extend(await ask(capture.disks(vm, monitor)))

    play(answering(query_block=list(drives)), client)
    return findings


def test_the_disks_of_its_xml_are_all_that_it_has() -> None:
    assert found(*KNOWN) == []


@pytest.mark.parametrize(
    "qdev",
    [
        "/machine/peripheral-anon/device[0]",
        "/machine/peripheral-anon/device[2]/virtio-backend",
        "nvme0",
    ],
)
def test_a_disk_that_libvirt_does_not_know_is_named(qdev: str) -> None:
    """By <qemu:commandline>, or plugged in by hand: its content was in no checkpoint, and a restore
    put memory of then beside a disk of now.
    """
    [finding] = found(*KNOWN, drive(qdev, "nvme.img"))
    assert (finding.code, finding.verdict) == ("domain-disks", REFUSE)
    assert "not in its XML: /i/nvme.img" in finding.reason
