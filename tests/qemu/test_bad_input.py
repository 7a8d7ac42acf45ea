"""Bad requests and sick hosts: a clear error, nothing changed, nothing left."""

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.qemu.world import World, image, qemu, world
from tests.waiting import eventually
from vmckpt.hosts.processes.process import identify
from vmckpt.lab.guests.labguest import LabGuest


@pytest.fixture
def made() -> Iterator[World]:
    with world(qemu("10.0"), qemu("7.2")) as one:
        yield one


def start(made: World, machine: str = "q35", cpu: str | None = None) -> dict[str, object]:
    guest = LabGuest("one", 1, image(), machine=machine, disk=None)
    spec = made.state_dir / "one.toml"
    spec.write_text((f'cpu = "{cpu}"\n' if cpu else "") + guest.spec())
    return made.ok("vm", "run", str(spec), "--host", "lab-a")


def unchanged(made: World) -> None:
    shown = made.ok("vm", "show", "one")
    assert (shown["host"], shown["state"]) == ("lab-a", "running")
    assert len(made.qemus()) == 1
    assert made.files("lab-b") == []


def test_unknown_names(made: World) -> None:
    for words in (
        ["migrate", "none", "lab-b"],
        ["vm", "stop", "none"],
        ["snapshot", "list", "none"],
    ):
        assert made.vmckpt(*words).code == 3
    start(made)
    done = made.vmckpt("migrate", "one", "lab-z")
    assert done.code == 3
    assert "lab-a, lab-b" in done.error["why"]
    unchanged(made)


def test_the_same_host(made: World) -> None:
    start(made)
    done = made.vmckpt("migrate", "one", "lab-a")
    assert (done.code, "same-host" in done.error["why"]) == (4, True)
    unchanged(made)


def test_a_malformed_spec_names_line_and_key(made: World) -> None:
    spec = made.state_dir / "bad.toml"
    spec.write_text(
        'name = "bad"\nmemory = "256M"\n\n[[disks]]\npath = "d.qcow2"\nformat = "vmdk"\n'
    )
    done = made.vmckpt("vm", "run", str(spec), "--host", "lab-a")
    assert done.code == 2
    assert "line 6" in done.error["what"]
    assert "format" in done.error["what"]
    spec.write_text("name = \n")
    done = made.vmckpt("vm", "run", str(spec), "--host", "lab-a")
    assert (done.code, "line 1" in done.error["why"]) == (2, True)
    assert made.files("lab-a") == []


def test_a_target_without_the_machine_type(made: World) -> None:
    start(made)
    done = made.vmckpt("migrate", "one", "lab-b")
    assert (done.code, "[machine-type]" in done.error["why"]) == (4, True)
    unchanged(made)


def test_a_target_without_the_cpu_model(made: World) -> None:
    start(made, "pc-q35-7.2", cpu="SierraForest")
    done = made.vmckpt("migrate", "one", "lab-b")
    assert (done.code, "[cpu-model]" in done.error["why"]) == (4, True)
    unchanged(made)


def test_a_target_whose_cpu_has_other_features(made: World) -> None:
    start(made, "pc-q35-7.2", cpu="max")
    done = made.vmckpt("migrate", "one", "lab-b")
    assert (done.code, "CPU features" in done.error["why"]) == (4, True)
    unchanged(made)


def test_a_host_that_is_down(made: World) -> None:
    start(made)
    holder = made.lab.host("lab-b").holder.pid
    os.kill(holder, signal.SIGKILL)
    eventually(lambda: identify(holder) is None, 5, "the host is down")
    for words in (["migrate", "one", "lab-b"], ["host", "check", "lab-b"]):
        done = made.vmckpt(*words)
        assert (done.code, done.error["kind"]) == (6, "unreachable"), done.error
    unchanged(made)


def test_a_socket_that_is_no_qmp(made: World) -> None:
    start(made)
    shown = made.ok("vm", "show", "one")
    monitor = Path(str(shown["qmp_socket"])).with_name("qmp.sock")
    real = monitor.with_name("real.sock")
    monitor.rename(real)
    with socket.socket(socket.AF_UNIX) as liar:
        liar.bind(str(monitor))
        liar.listen()
        command = made.begin("migrate", "one", "lab-b", "--method", "precopy")
        command.communicate(timeout=30)
        assert command.returncode in (4, 6)
    monitor.unlink()
    real.rename(monitor)
    unchanged(made)


@pytest.mark.parametrize("room_kib", [0, 4, 16])
def test_a_target_whose_disk_is_full(made: World, room_kib: int) -> None:
    start(made, "pc-q35-7.2")
    target = made.lab.host("lab-b").state_dir
    made.ok("host", "check", "lab-b")  # what it caches must fit
    mount = ["mount", "-t", "tmpfs", "-o", f"size={room_kib + 4}k,nr_inodes=0", "full", str(target)]
    subprocess.run(mount, check=True)
    try:
        filler = target / "filler"
        filler.write_bytes(b"x" * 4096)
        done = made.vmckpt("migrate", "one", "lab-b")
        assert done.code in (6, 7, 11), done.stderr
        assert done.error["what"]
        filler.unlink()
        # What was learnt of its QEMU may stay; nothing of the VM does.
        left = [path for path in target.rglob("*") if path.is_file()]
        assert [path for path in left if path.parent.name != "cache"] == []
    finally:
        subprocess.run(["umount", str(target)], check=True)
    unchanged(made)


def test_a_wrong_option_is_refused_by_name(made: World) -> None:
    start(made, "pc-q35-7.2")
    done = made.vmckpt("migrate", "one", "lab-b", "--method", "postcopy", "--parallel", "2")
    assert done.code == 4
    assert "--parallel" in done.error["why"]
    for words in (["--max-downtime", "5"], ["--bandwidth", "fast"], ["--timeout", "soon"]):
        assert made.vmckpt("migrate", "one", "lab-b", *words).code == 2
    assert made.vmckpt("migrate", "one", "lab-b", "--method", "magic").code == 2
    unchanged(made)


def test_a_second_vm_of_the_same_name(made: World) -> None:
    start(made)
    done = made.vmckpt("vm", "run", str(made.state_dir / "one.toml"), "--host", "lab-b")
    assert (done.code, "lab-a" in done.error["why"]) == (4, True)
    unchanged(made)


def test_no_room_for_the_memory(made: World) -> None:
    guest = LabGuest("huge", 2, image(), memory="900G", disk=None)
    spec = made.state_dir / "huge.toml"
    spec.write_text(guest.spec())
    done = made.vmckpt("vm", "run", str(spec), "--host", "lab-a")
    assert (done.code, "room" in done.error["what"]) == (4, True)
    assert made.files("lab-a") == []
