"""Which accelerator a host can use, asked of a QEMU that does not start with KVM."""

import asyncio
import json
from pathlib import Path

import pytest

from tests.commands import vmckpt
from tests.faulty_host import Fault, FaultyHost
from vmckpt.errors import HostDownError, RefusedError
from vmckpt.hosts.local import LocalHost
from vmckpt.vm.probe import abilities, choose_accel, kvm_obstacle

KVM = Path("/dev/kvm")


@pytest.fixture
def host(tmp_path: Path) -> LocalHost:
    """A host whose processor virtualizes and whose /dev/kvm may be opened."""
    qemu = tmp_path / "qemu"
    qemu.write_text("#!/bin/sh\necho 'qemu: failed to initialize kvm: Device busy' >&2\nexit 1\n")
    qemu.chmod(0o755)
    faults = (
        Fault("exists", answers=True, of=lambda path: path == KVM),
        Fault("usable", by=lambda path: path == KVM),
        Fault("cpu_flags", answers=frozenset({"vmx"})),
    )
    return FaultyHost("a", tmp_path, "127.0.0.1", qemu=str(qemu), faults=faults)


def test_a_qemu_that_ends_with_kvm_is_an_obstacle_in_its_own_words(host: LocalHost) -> None:
    obstacle = asyncio.run(kvm_obstacle(host))
    assert obstacle is not None
    assert obstacle.startswith("QEMU does not start with KVM")
    assert "Device busy" in obstacle
    assert list((host.state_dir / "cache").iterdir()) == []


def test_auto_falls_back_to_tcg_and_says_why(host: LocalHost) -> None:
    accel, why = asyncio.run(choose_accel(host, "auto"))
    assert accel == "tcg"
    assert "Device busy" in why
    with pytest.raises(RefusedError, match="KVM is not usable on a"):
        asyncio.run(choose_accel(host, "kvm"))


def test_a_host_that_cannot_be_entered_is_down_not_its_qemu_at_fault(tmp_path: Path) -> None:
    entry = tmp_path / "enter"
    entry.write_text("#!/bin/sh\necho 'cannot open /proc/1/ns/net' >&2\nexit 1\n")
    entry.chmod(0o755)
    host = LocalHost("a", tmp_path, "127.0.0.1", qemu="true", enter=(str(entry),))
    with pytest.raises(HostDownError, match="host a is down: cannot open /proc/1/ns/net"):
        asyncio.run(abilities(host))


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("exit 0", "--version is: nothing"),
        ("echo 'sh (GNU) 9.1'", "--version is: sh (GNU) 9.1"),
        ("echo 'QEMU emulator version 9.0'; exit 1", "--version is: QEMU"),
        ("case $1 in --version) echo 'QEMU emulator version 9.0';; *) exit 1; esac", "no monitor"),
    ],
)
def test_a_lab_takes_no_program_for_a_qemu_that_is_none(
    tmp_path: Path, program: str, says: str
) -> None:
    path = tmp_path / "program"
    path.write_text(f"#!/bin/sh\n{program}\n")
    path.chmod(0o755)
    done = vmckpt(tmp_path / "state", "lab", "up", "--qemu", str(path), "--json")
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["what"]) == (
        2, f"'{path}' is not a QEMU that runs x86-64 guests"
    )  # fmt: skip
    assert says == "no monitor" or says in error["why"]
    assert not (tmp_path / "state" / "lab").exists()
    assert json.loads(vmckpt(tmp_path / "state", "lab", "status", "--json").stdout)["up"] is False
