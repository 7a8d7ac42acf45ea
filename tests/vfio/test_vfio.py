"""A VM with a card of its host's, by VFIO: out of one card, into another, by what users run.

The host is a guest with an emulated IOMMU, and has two cards (QEMU's edu) bound to its vfio-pci;
inside.py runs in it. There is no KVM in it: the VM in it is emulated by an emulated machine.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from images import nested
from tests.qemu.world import image, qemu

HERE = Path(__file__).parents[2]
OURS = ("vmckpt", "tests", "pyproject.toml")
LIMIT_S = 3000
CARD = "1234 11e8"
INIT = f"""\
#!/bin/sh
export PATH=/usr/sbin:/usr/bin HOME=/root LC_ALL=C.UTF-8
mount -t tmpfs run /run
mkdir /dev/shm
mount -t tmpfs shm /dev/shm
ip link set lo up
echo {CARD} > /sys/bus/pci/drivers/vfio-pci/new_id
cd {HERE}
VMCKPT_TEST_IMAGE=%s VMCKPT_TEST_QEMU_10_0=%s {sys.prefix}/bin/python -m tests.vfio.inside
echo VFIO-DONE $?
sync
echo o > /proc/sysrq-trigger
while :; do :; done
"""
MACHINE = (
    *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
    # One processor: with two, this QEMU's TCG fails an assertion as the IOMMU's mappings change.
    *("-machine", "q35", "-accel", "tcg", "-cpu", "qemu64", "-smp", "1", "-m", "2G"),
    *("-device", "intel-iommu,intremap=on,caching-mode=on"),
    *("-device", "pcie-root-port,id=port1,chassis=1", "-device", "edu,bus=port1"),
    *("-device", "pcie-root-port,id=port2,chassis=2", "-device", "edu,bus=port2"),
    *("-append", "console=ttyS0 quiet panic=-1 intel_iommu=on"),
)
FACTS = (
    "the guest's job runs in the card",
    "a hook failed, and all was taken back",
    "a card that somebody else has is not given away",
    "moved to lab-b",
    "moved to lab-a",
    "all is free again",
)


@pytest.mark.timeout(LIMIT_S + 300)
def test_a_vfio_device_goes_and_comes(tmp_path: Path) -> None:
    trees = [HERE / name for name in OURS] + [qemu("10.0").parents[1]]
    nested.make(tmp_path, image(), trees, INIT % (image(), qemu("10.0")))
    try:
        facts = list(said(tmp_path))
    finally:
        (tmp_path / "disk").unlink()
    assert tuple(fact["what"] for fact in facts) == FACTS
    first, _, _, there, back, _ = facts
    # Another card of the machine's each time, in another group, which the VM's QEMU had open.
    assert first["card"] == back["card"] != there["card"]
    assert first["qemu_has_open"] == back["qemu_has_open"] != there["qemu_has_open"]
    for move in (there, back):
        steps = move["steps"]
        assert steps.index("unplug") < steps.index("transfer") < steps.index("bring-back")


def said(directory: Path) -> Iterator[dict[str, Any]]:
    """The facts that the machine tells, as it tells them; fails unless it comes to its end."""
    console = directory / "console"
    drive = f"file={directory}/disk,format=raw,if=virtio"
    boot = ["-kernel", str(directory / "vmlinuz"), "-initrd", str(directory / "initrd")]
    argv = [str(qemu("10.0")), *MACHINE, *boot, "-drive", drive, "-serial", f"file:{console}"]
    machine = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
    deadline, told = time.monotonic() + LIMIT_S, 0
    try:
        while machine.poll() is None and time.monotonic() < deadline:
            time.sleep(0.5)
            for line in whole_lines(console)[told:]:
                told += 1
                if line.startswith("VFIO {"):
                    print(f"  {line}", flush=True)
                    yield json.loads(line.removeprefix("VFIO "))
    finally:
        machine.kill()
        machine.wait()
    lines = whole_lines(console)
    assert "VFIO-DONE 0" in lines, "\n".join(lines[-60:])


def whole_lines(console: Path) -> list[str]:
    text = console.read_text(errors="replace") if console.exists() else ""
    return text.replace("\r", "").split("\n")[:-1]
