"""A QEMU that was started by hand becomes a VM: it moves, loses nothing, and comes back."""

import asyncio
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.qemu.world import Done, World, image, loaded, qemu, world
from tests.qemu.world import kill as kill_command
from tests.waiting import eventually
from vmckpt.hosts.lock import held
from vmckpt.hosts.processes.process import ProcessId, identify, is_alive, kill
from vmckpt.lab.guests.labguest import LabGuest
from vmckpt.lab.network import GUEST_BRIDGE
from vmckpt.qemu.monitor import session
from vmckpt.vm.lifecycle import owner
from vmckpt.vm.paths import adoption_lock_path

HAND = LabGuest("hand", 1, image=Path("/"), disk=None)
CANNOT: list[str] = []
PLAIN = (
    "-nographic -m 256 -cpu qemu64 -nic tap,ifname=hand0,script=no,downscript=no,model=virtio "
    "-drive file=root.qcow2,if=virtio"
)
# The same with an image that is the host's own, and so is copied.
OWN_IMAGE = PLAIN.replace("file=root.qcow2", "file=lab/lab-a/images/root.qcow2")
OLD = f"-M pc-i440fx-3.1 {PLAIN}"
NUMA = PLAIN.replace(
    "-m 256",
    "-m 256 -smp 2 -object memory-backend-ram,id=m0,size=128M "
    "-object memory-backend-ram,id=m1,size=128M -numa node,memdev=m0,cpus=0 "
    "-numa node,memdev=m1,cpus=1",
)
BLOCKDEV = (
    "-M q35,accel=tcg -m size=256M -display none -nodefaults -smp 2 "
    "-netdev tap,id=n0,ifname=hand0,script=no,downscript=no "
    "-device pcie-root-port,id=rp0,slot=1 -device virtio-net-pci,netdev=n0 "
    "-blockdev driver=file,node-name=f0,filename=root.qcow2 "
    '-blockdev {"driver":"qcow2","node-name":"root","file":"f0"} '
    '-device {"driver":"virtio-blk-pci","drive":"root","id":"root"} '
    "-chardev socket,id=s0,path=serial.sock,server=on,wait=off -serial chardev:s0"
)


def kernel() -> list[str]:
    words = (
        "console=ttyS0 quiet panic=-1 cryptomgr.notests memhp_default_state=online "
        f"vk.id=1 vk.ip={HAND.address}/24 vk.heartbeat=10.77.0.254:7700"
    )
    return ["-kernel", f"{image()}/vmlinuz", "-initrd", f"{image()}/initrd", "-append", words]


@contextmanager
def by_hand(made: World, style: str, monitors: int = 2) -> Iterator[ProcessId]:
    """A QEMU as someone starts it on lab-a, in a directory of his own; ended with the block."""
    where, host = made.state_dir, made.lab.host("lab-a")
    qemu_img = Path(host.qemu).parent / "qemu-img"
    (host.state_dir / "images").mkdir(exist_ok=True)
    for image_file in ("root.qcow2", "extra.qcow2", f"lab/{host.name}/images/root.qcow2"):
        words = [str(qemu_img), "create", "-q", "-f", "qcow2", str(where / image_file), "64M"]
        subprocess.run(words, check=True)
    if '"backing"' in style:
        words = ["rebase", "-u", "-f", "qcow2", "-F", "qcow2", "-b", "extra.qcow2", "root.qcow2"]
        subprocess.run([str(qemu_img), *words], check=True, cwd=where)
    argv = [*host.enter, str(host.qemu), *style.split(), *kernel()]
    for number in range(monitors):
        argv += ["-qmp", f"unix:{where}/hand{number}.sock,server,nowait"]
    with (where / "hand.log").open("wb") as log:
        started = subprocess.Popen(
            argv, cwd=where, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    process = identify(started.pid)
    assert process
    try:
        eventually((where / "hand0.sock").exists, 60, "the QEMU started by hand is up")
        link = ["ip", "link", "set", "dev", "hand0", "master", GUEST_BRIDGE, "up"]
        eventually(
            lambda: subprocess.run([*host.enter, *link], check=False).returncode == 0, 60, "its tap"
        )
        yield process
    finally:
        print((where / "hand.log").read_text(errors="replace"))
        kill(process)
        started.wait()


def ask(made: World, monitor: str, *asked: tuple[str, dict[str, Any]]) -> list[Any]:
    """Commands on one of the monitors that the QEMU was started with."""

    async def go() -> list[Any]:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(str(made.state_dir / monitor))
        sock.setblocking(False)
        async with session(sock, "hand", 60) as one:
            return [await one.tell(command, arguments) for command, arguments in asked]

    return asyncio.run(go())


@contextmanager
def connected(made: World) -> Iterator[socket.socket]:
    """Someone who holds the first monitor."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(made.state_dir / "hand0.sock"))
        yield sock


@contextmanager
def locked(made: World, process: ProcessId) -> Iterator[None]:
    """Someone who is adopting the process, under some name."""
    path = adoption_lock_path(made.lab.host("lab-a").state_dir, process.pid)
    path.parent.mkdir()
    with held(path, owner("vm adopt")):
        yield


def adopting(made: World, *words: str) -> Done:
    sockets = sorted(made.state_dir.glob("hand[0-9].sock"))
    monitors = [word for path in sockets for word in ("--qmp", str(path))]
    return made.vmckpt("vm", "adopt", "hand", "--host", "lab-a", *monitors, *words)


def adopt(made: World, *words: str) -> dict[str, Any]:
    done = adopting(made, *words)
    assert done.code == 0, done.stderr
    return done.result


def plug(made: World) -> None:
    """A disk that the command line does not have."""
    file = {"driver": "file", "filename": str(made.state_dir / "extra.qcow2")}
    ask(
        made,
        "hand0.sock",
        ("blockdev-add", {"driver": "qcow2", "node-name": "extra", "file": file}),
        ("device_add", {"driver": "virtio-blk-pci", "id": "late", "drive": "extra", "bus": "rp0"}),
    )


@pytest.mark.parametrize(
    ("versions", "style", "monitors"),
    [
        ("10.0 10.0", OWN_IMAGE, 1),
        ("10.0 10.0", BLOCKDEV, 2),
        ("7.2 7.2", BLOCKDEV, 3),
        ("10.0 10.0", OLD, 3),
    ],
    ids=[
        "as people type it, disk copied",
        "blockdev and a hot-plugged disk",
        "the same on 7.2",
        "an old machine type",
    ],
)
def test_it_moves_there_and_back_and_loses_nothing(
    versions: str, style: str, monitors: int
) -> None:
    qemus = (qemu(version) for version in versions.split())
    with world(*qemus) as made, by_hand(made, style, monitors) as process:
        if style == BLOCKDEV:
            plug(made)
        adopted = adopt(made)
        assert adopted["pid"] == process.pid
        listed = made.ok("vm", "list")["vms"][0]
        assert (listed["adopted"], listed["started_by"]) == (True, "another program")
        assert listed["cannot"] == CANNOT
        assert listed["state"] == "running"
        # 7.2 cannot, as a source under TCG.
        there_and_back(made, *(["--method", "postcopy"] if monitors == 2 else []))
        assert not is_alive(process)
        # It ended in good order: what was its own went with it.
        assert list(made.state_dir.glob("hand*.sock")) == []
        shown = made.ok("vm", "show", "hand")
        assert (shown["adopted"], shown["started_by"]) == (True, "vmckpt")
        assert shown["cannot"] == CANNOT
        assert len(shown["disks"]) == (2 if style == BLOCKDEV else 1)
        made.ok("vm", "stop", "hand", "--force")
        made.ok("vm", "start", "hand")
        made.ok("vm", "stop", "hand", "--force")
        made.ok("vm", "rm", "hand")
        assert made.files("lab-a") == made.files("lab-b") == []


@pytest.fixture
def pair() -> Iterator[World]:
    with world(qemu("10.0"), qemu("10.0")) as made:
        yield made


def test_adoption_changes_nothing_and_is_taken_back(pair: World) -> None:
    with by_hand(pair, PLAIN, monitors=1) as process:
        before = runs_as(process)
        refused = adopting(pair, "--pid", "1")
        assert (refused.code, "process 1" in refused.error["what"]) == (4, True)
        missing = pair.vmckpt("vm", "adopt", "hand", "--host", "lab-a", "--qmp", "/no.sock")
        assert missing.code == 3
        with connected(pair) as held:
            held.recv(1)
            busy = adopting(pair)
            assert (busy.code, "busy" in busy.error["what"]) == (5, True)
        with locked(pair, process):
            assert adopting(pair).code == 5
        assert pair.files("lab-a") == []
        adopted = adopt(pair, "--pid", str(process.pid))
        assert ["one monitor only" in note for note in adopted["notes"]] == [True]
        again = pair.vmckpt(
            "vm", "adopt", "other", "--host", "lab-a", "--qmp", str(pair.state_dir / "hand0.sock")
        )
        assert (again.code, "'hand'" in again.error["what"]) == (4, True)
        assert pair.vmckpt("vm", "start", "hand").code == 4
        forgotten = pair.ok("vm", "rm", "hand")
        assert forgotten["goes_on_as_pid"] == process.pid
        assert pair.files("lab-a") == []
        assert runs_as(process) == before
        assert pair.ok("vm", "list")["vms"] == []


def runs_as(process: ProcessId) -> tuple[bool, bytes]:
    """Whether a process lives, and its command line."""
    return is_alive(process), Path(f"/proc/{process.pid}/cmdline").read_bytes()


def test_what_is_plugged_after_the_adoption_is_not_overlooked(pair: World) -> None:
    with by_hand(pair, BLOCKDEV):
        adopt(pair)
        pair.ok("vm", "autostart", "hand", "on")  # that is none of QEMU's
        assert pair.ok("check", "hand", "lab-b")
        plug(pair)
        for words in (
            ["migrate", "hand", "lab-b"],
            ["checkpoint", "create", "hand"],
            ["checkpoint", "create", "hand", "--kind", "file"],
        ):
            refused = pair.vmckpt(*words)
            assert refused.code == 4
            assert "[adopted]" in refused.error["why"]
            assert "late" in refused.error["why"]
        pair.ok("vm", "rm", "hand")
        adopt(pair)
        assert pair.ok("check", "hand", "lab-b")
        saved = pair.ok("snapshot", "save", "hand", "before")
        assert saved["name"] == "before"
        pair.ok("snapshot", "load", "hand", "before")


def test_kill_9_leaves_the_guest_in_one_place(pair: World) -> None:
    """The guest is where it was, in the process that someone started, or wholly moved."""
    moments = random.Random(20261122)

    async def go(process: ProcessId) -> None:
        async with loaded(pair, HAND) as control:
            for _ in range(6):
                host = pair.ok("vm", "show", "hand")["host"]
                other = "lab-b" if host == "lab-a" else "lab-a"
                command = pair.begin("migrate", "hand", other, "--method", "stop")
                await asyncio.sleep(moments.uniform(0.2, 1.5))
                kill_command(command)
                shown = await asyncio.to_thread(pair.ok, "vm", "show", "hand")
                assert (shown["state"], shown["migration_cut_off"]) == ("running", False)
                own = [one.pid for one in pair.qemus("hand")]
                mine = [process.pid] if is_alive(process) else []
                assert own + mine == [shown["pid"]]
                await control.ping()

    with by_hand(pair, PLAIN, monitors=1) as process:
        adopt(pair)
        asyncio.run(go(process))


@pytest.mark.timeout(200)
def test_a_stuck_source_is_freed_over_its_only_monitor(pair: World) -> None:
    """A target that stops in the device phase blocks the source: only a yank frees it."""

    async def go(log: Path) -> None:
        async with loaded(pair, HAND) as control:
            await control.load_memory("rate=100M set=96M pattern=uniform content=random")
            words = ("--bandwidth", "300MB", "--max-downtime", "2s")
            command = pair.begin("migrate", "hand", "lab-b", *words)
            try:
                while "vm_state_notify running 0" not in log.read_text(errors="replace"):
                    assert command.poll() is None
                    await asyncio.sleep(0.0005)
                for one in pair.qemus("hand"):
                    os.kill(one.pid, signal.SIGSTOP)
                out, err = await asyncio.to_thread(command.communicate, timeout=120)
            finally:
                kill_command(command)
            assert command.returncode == 7, out + err
            await control.ping()

    with by_hand(pair, f"{PLAIN} -trace vm_state_notify", monitors=1) as process:
        adopt(pair)
        asyncio.run(go(pair.state_dir / "hand.log"))
        assert pair.ok("vm", "show", "hand")["pid"] == process.pid


def test_a_killed_adoption_leaves_the_process_alone(pair: World) -> None:
    moments = random.Random(20261122)
    with by_hand(pair, PLAIN, monitors=1) as process:
        before = runs_as(process)
        for _ in range(5):
            words = ("--qmp", str(pair.state_dir / "hand0.sock"))
            command = pair.begin("vm", "adopt", "hand", "--host", "lab-a", *words)
            time.sleep(moments.uniform(0.05, 0.6))
            kill_command(command)
            if pair.ok("vm", "list")["vms"]:
                pair.ok("vm", "rm", "hand")
        adopt(pair)
        assert pair.ok("vm", "show", "hand")["state"] == "running"
        assert runs_as(process) == before


def test_a_guest_with_numa_nodes_moves_stopped_under_tcg(pair: World) -> None:
    """QEMU does not see what it writes to its second back end."""

    async def go() -> None:
        async with loaded(pair, HAND) as control:
            await control.load_memory("rate=50M set=96M pattern=uniform content=random")
            refused = await asyncio.to_thread(
                pair.vmckpt, "migrate", "hand", "lab-b", "--method", "precopy"
            )
            assert refused.code == 4
            assert "memory back end" in refused.error["why"]
            moved = await asyncio.to_thread(pair.ok, "migrate", "hand", "lab-b")
            assert moved["method"] == "stop"

    with by_hand(pair, NUMA):
        adopt(pair)
        asyncio.run(go())
        pair.ok("vm", "stop", "hand", "--force")
        pair.ok("vm", "rm", "hand")


def there_and_back(made: World, *words: str) -> None:
    async def go() -> None:
        async with loaded(made, HAND):
            await asyncio.sleep(0.3)
            for target in ("lab-b", "lab-a"):
                await asyncio.to_thread(made.ok, "migrate", "hand", target, *words)

    asyncio.run(go())
