"""Devices that cannot be migrated are named by their ids."""

import pytest

from vmckpt.preflight.blockers import device_checks

IDS = {"0000:00:01.0": "n1", "0000:00:02.0": "", "0000:00:03.0": "ehci"}


@pytest.mark.parametrize(
    ("blocker", "reason"),
    [
        (
            "non-migratable device: 0000:00:01.0/nvme",
            "the nvme 'n1' (PCI 0000:00:01.0) cannot be migrated",
        ),
        (
            "non-migratable device: 0000:00:02.0/nvme",
            "the nvme without an id at PCI 0000:00:02.0 cannot be migrated",
        ),
        (
            "non-migratable device: 0000:00:03.0/1/usb-mtp",
            "the usb-mtp at port 1 of the device 'ehci' (PCI 0000:00:03.0) cannot be migrated",
        ),
        (
            "non-migratable device: tpm-emulator",
            "the tpm-emulator of the machine cannot be migrated",
        ),
        (
            "Migration is disabled when VirtFS is mounted",
            "QEMU refuses to migrate it: Migration is disabled when VirtFS is mounted",
        ),
    ],
)
def test_a_blocking_device_is_named(blocker: str, reason: str) -> None:
    (check,) = device_checks([blocker], IDS)
    assert (check.code, check.verdict, check.reason) == ("migratable", "refuse", reason)
    assert check.remedy


def test_every_blocking_device_has_its_line() -> None:
    blockers = [f"non-migratable device: 0000:00:0{n}.0/nvme" for n in (1, 2)]
    assert len(list(device_checks(blockers, IDS))) == 2


def test_nothing_blocks() -> None:
    (check,) = device_checks([], IDS)
    assert check.verdict == "ok"
