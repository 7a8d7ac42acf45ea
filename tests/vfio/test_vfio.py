"""A VM with a card of its host's, by VFIO: out of one card, into another, by what users run.

The host is a guest with an emulated IOMMU, and has two cards (QEMU's edu) bound to its vfio-pci;
inside.py runs in it. There is no KVM in it: the VM in it is emulated by an emulated machine.
"""

from pathlib import Path

import pytest

from tests import nested

CARD = "1234 11e8"
MACHINE = (
    # One processor: with two, this QEMU's TCG fails an assertion as the IOMMU's mappings change.
    *("-cpu", "qemu64", "-smp", "1"),
    *("-device", "intel-iommu,intremap=on,caching-mode=on"),
    *("-device", "pcie-root-port,id=port1,chassis=1", "-device", "edu,bus=port1"),
    *("-device", "pcie-root-port,id=port2,chassis=2", "-device", "edu,bus=port2"),
)
FACTS = (
    "the guest's job runs in the card",
    "a hook failed, and all was taken back",
    "a card that somebody else has is not given away",
    "moved to lab-b",
    "moved to lab-a",
    "all is free again",
)


@pytest.mark.timeout(nested.LIMIT_S + 300)
def test_a_vfio_device_goes_and_comes(tmp_path: Path) -> None:
    first, _, _, there, back, _ = nested.facts(
        tmp_path,
        "tests.vfio.inside",
        *MACHINE,
        setup=f"echo {CARD} > /sys/bus/pci/drivers/vfio-pci/new_id",
        cmdline="intel_iommu=on",
        wanted=FACTS,
    )
    # Another card of the machine's each time, in another group, which the VM's QEMU had open.
    assert first["card"] == back["card"] != there["card"]
    assert first["qemu_has_open"] == back["qemu_has_open"] != there["qemu_has_open"]
    for move in (there, back):
        steps = move["steps"]
        assert steps.index("unplug") < steps.index("transfer") < steps.index("bring-back")
