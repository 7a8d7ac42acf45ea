"""Devices that keep a VM from being replicated, as a scripted QEMU lists them."""

import pytest

from tests.scripted_qmp import answering, play
from vmckpt.qemu.monitor import Monitor
from vmckpt.vm.capture_checks import devices


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("vfio-pci", "VFIO"),
        ("vhost-user-fs-pci", "vhost"),
        ("vhost-vsock-pci", "vhost"),
        ("ivshmem-plain", "ivshmem"),
    ],
)
def test_a_device_that_bypasses_qemu_is_refused_by_name(kind: str, reason: str) -> None:
    listed = [
        {"name": "nic0", "type": "child<virtio-net-pci>"},
        {"name": "mine", "type": f"child<{kind}>"},
        {"name": "type", "type": "string"},
    ]

    async def look(monitor: Monitor) -> None:
        found = [check async for check in devices(monitor)]
        assert {check.code for check in found if check.verdict == "refuse"} == {"bypass"}
        refused = [check for check in found if check.verdict == "refuse"]
        assert all("'mine'" in check.reason and reason in check.reason for check in refused)
        assert all("'mine'" in check.remedy for check in refused)

    play(answering(query_migrate={}, qom_list=listed), look)


def test_a_device_that_qemu_cannot_save_is_refused_by_its_id() -> None:
    blocked = {"blocked-reasons": ["non-migratable device: 0000:00:03.0/1/usb-mtp"]}
    pci = [{"devices": [{"bus": 0, "slot": 3, "function": 0, "qdev_id": "usb"}]}]

    async def look(monitor: Monitor) -> None:
        (found,) = [check async for check in devices(monitor)]
        assert (found.code, found.verdict) == ("migratable", "refuse")
        assert "'usb'" in found.reason

    play(answering(query_migrate=blocked, query_pci=pci, qom_list=[]), look)
