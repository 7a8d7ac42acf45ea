"""Replication of a guest that really runs under KVM: a few instructions, and what KVM keeps.

Shown are the epochs' pages (dirtied by KVM's guest, found by protection), devices and vCPU state
that KVM has, saved and loaded again; not an operating system.
"""

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.qemu import kvm_qemu
from tests.qemu.test_replicate import NAME, services, sides
from tests.qemu.world import World, qemu, world
from tests.waiting import eventually
from vmckpt.hosts.processes.process import find_by_argument

KVM = Path("/dev/kvm")


def under_kvm(directory: Path) -> Path:
    """A QEMU in `directory`, see kvm_qemu.py."""
    wrapper, rom, real = directory / "qemu-system-x86_64", directory / "rom", qemu("10.0")
    rom.write_bytes(kvm_qemu.ROM)
    (directory / "qemu-img").symlink_to(real.parent / "qemu-img")
    words = f"VK_QEMU={real} VK_ROM={rom} exec {sys.executable} -I -S {kvm_qemu.__file__}"
    wrapper.write_text(f'#!/bin/sh\n{words} "$@"\n')
    wrapper.chmod(0o755)
    return wrapper


def told(made: World, host: str) -> list[str]:
    """What the guest has said there so far, whole lines."""
    (log,) = made.state(host).glob(f"vms/{NAME}/qemu-*/console.log")
    return log.read_text().split("\n")[:-1]


def number(made: World, host: str) -> int:
    lines = told(made, host)
    return int(lines[-1], 16) if lines and len(lines[-1]) == 8 else -1


def gets_on(made: World, host: str, rounds: int = 10) -> None:
    first = number(made, host)
    eventually(lambda: number(made, host) >= first + rounds, 60, f"it counts on {host}")


@pytest.mark.skipif(not os.access(KVM, os.R_OK | os.W_OK), reason="there is no /dev/kvm to use")
def test_a_guest_under_kvm_goes_on_where_its_primary_was_killed(tmp_path: Path) -> None:
    wrapper = under_kvm(tmp_path)
    with world(wrapper, wrapper) as made:
        spec = made.shared / f"{NAME}.toml"
        spec.write_text(f'name = "{NAME}"\nmemory = "32M"\n')
        made.ok("vm", "run", str(spec), "--host", "lab-a")
        gets_on(made, "lab-a", 2)
        here, there = "lab-a", "lab-b"
        for ends in ("killed", "handed over", "killed"):
            made.ok("replicate", "start", NAME, there)
            gets_on(made, here)
            (machine,) = find_by_argument(f"-pidfile\0{made.state(here)}")
            opened = [fd.readlink() for fd in Path(f"/proc/{machine.pid}/fd").iterdir()]
            assert KVM in opened
            if ends == "killed":
                assert sides(made)["primary"]["epochs"] > 2
                for pid in (*services(made, "primary"), machine.pid):
                    os.kill(pid, signal.SIGKILL)
                last = number(made, here)
                eventually(lambda: sides(made)["standby"]["state"] == "promoted", 60, "took over")
            else:
                made.ok("replicate", "failover", NAME)
                last = 1 << 32
            gets_on(made, there)
            lines = [line for line in told(made, there) if line]
            # It goes on from its last epoch: some of what it has told since is told again.
            assert 0 < int(lines[1], 16) <= last + 2
            assert all("!" not in line for line in lines), lines
            numbers = [int(line, 16) for line in lines[1:]]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
            made.ok("replicate", "stop", NAME)
            here, there = there, here
