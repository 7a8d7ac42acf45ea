"""What a checkpoint becomes: the VM itself as it was, or a copy with an identity of its own."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.test_checkpoint_tree import facts
from vmckpt.checkpoint.facts import CheckpointFacts, DiskFacts
from vmckpt.checkpoint.restore.planned import CheckpointStanding, plan_copy, plan_itself
from vmckpt.hosts.local import LocalHost
from vmckpt.preflight.finding import ask
from vmckpt.preflight.isolation import isolation_checks
from vmckpt.vm.spec.spec import Adopted, parse_spec

SPEC = """
base = "/specs"
name = "web"
memory = "64M"
heartbeat_id = 3

[firmware]
code = "/usr/share/code.fd"
vars = "web-vars.fd"

[[disks]]
path = "web.qcow2"

[[disks]]
path = "/data/shared.raw"
format = "raw"
read_only = true

[[nics]]
mac = "52:54:00:00:00:01"

[[devices]]
driver = "vmgenid"
guid = "11111111-1111-1111-1111-111111111111"
"""
HOST = LocalHost("here", Path("/state"), "127.0.0.1")
OURS = CheckpointStanding("0" * 32, is_foreign=False, is_trusted=True, own=None)


def taken() -> CheckpointFacts:
    disks = (
        DiskFacts("/specs/web.qcow2", "qcow2", 1 << 30, False, "disk-0"),
        DiskFacts("/data/shared.raw", "raw", 1 << 20, True, None),
    )
    return replace(facts("one"), spec=SPEC, disks=disks)


def test_a_copy_shares_nothing_that_it_can_write() -> None:
    copy = plan_copy(taken(), HOST, "web-2", OURS, keep_macs=False)
    assert copy.spec.name == "web-2"
    assert [disk.path for disk in copy.disks] == [Path("/state/images/web-2-0.qcow2")]
    assert copy.spec.disks[1].path == Path("/data/shared.raw")
    assert copy.spec.nics[0].mac is None
    assert copy.spec.heartbeat_id is None
    assert copy.spec.firmware
    assert copy.spec.firmware.vars == Path("/state/images/web-2-vars.fd")
    assert copy.variables == Path("/specs/web-vars.fd")
    assert copy.spec.devices[0]["guid"] != "11111111-1111-1111-1111-111111111111"


def test_what_a_fork_writes_is_qcow2_whatever_it_lies_over() -> None:
    """QEMU took an overlay over a raw disk for a raw disk: the guest met its header."""
    raw = SPEC.replace('path = "web.qcow2"', 'path = "web.raw"\nformat = "raw"')
    made = plan_copy(replace(taken(), spec=raw), HOST, "f-1", OURS, keep_macs=False, overlays=True)
    assert [disk.path for disk in made.disks] == [Path("/state/images/f-1-0.qcow2")]
    again = parse_spec(made.spec.text, "its file", Path("/elsewhere"))
    assert [(disk.format, disk.read_only) for disk in again.disks] == [
        ("qcow2", False),
        ("raw", True),
    ]


def test_a_copy_has_no_network_now_or_later_unless_it_is_asked_for() -> None:
    for plugged in (False, True):
        copy = plan_copy(taken(), HOST, "web-2", OURS, keep_macs=False, plugged=plugged).spec
        again = parse_spec(copy.text, "its file", Path("/elsewhere"))
        assert [nic.isolated for nic in again.nics] == [not plugged]
        itself = plan_itself(taken(), HOST, OURS, plugged=plugged).spec
        assert [nic.isolated for nic in itself.nics] == [not plugged]


@pytest.mark.parametrize(
    "driver", ["vhost-vsock-pci", "ivshmem-plain", "vfio-pci", "pvrdma", "virtio-rng-pci"]
)
def test_a_device_that_reaches_the_host_is_in_no_isolated_copy(driver: str) -> None:
    spec = plan_copy(taken(), HOST, "web-2", OURS, keep_macs=False).spec
    found = asyncio.run(ask(isolation_checks(spec._replace(devices=({"driver": driver},)), HOST)))
    assert [check.verdict for check in found] == ["ok" if driver.startswith("virtio") else "refuse"]


@pytest.mark.parametrize("device", ["vhost-vsock-pci,guest-cid=3", '{"driver":"vhost-vsock-pci"}'])
def test_an_adopted_vms_devices_are_looked_at_too(device: str) -> None:
    spec = plan_itself(taken(), HOST, OURS, plugged=False).spec
    adopted = Adopted(("-m", "64M", "--device", device), (), ())
    found = asyncio.run(ask(isolation_checks(spec._replace(adopted=adopted), HOST)))
    assert [check.verdict for check in found] == ["refuse"]


def test_a_copys_spec_says_what_it_is() -> None:
    copy = plan_copy(taken(), HOST, "web-2", OURS, keep_macs=True).spec
    again = parse_spec(copy.text, "its file", Path("/elsewhere"))
    assert again._replace(text="") == copy._replace(text="")
    assert again.nics[0].mac == "52:54:00:00:00:01"


def test_the_vm_itself_keeps_all_but_its_generation() -> None:
    itself = plan_itself(taken(), HOST, OURS)
    assert itself.spec.name == "web"
    assert [disk.path for disk in itself.disks] == [Path("/specs/web.qcow2")]
    assert itself.spec.nics[0].mac == "52:54:00:00:00:01"
    assert itself.spec.devices[0]["guid"] != "11111111-1111-1111-1111-111111111111"
    assert itself.variables is None


def test_without_a_generation_id_its_spec_is_its_own_to_the_letter() -> None:
    plain = replace(taken(), spec=SPEC[: SPEC.index("[[devices]]")])
    assert plan_itself(plain, HOST, OURS).spec.text == plain.spec
