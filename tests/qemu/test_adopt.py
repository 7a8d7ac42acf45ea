"""A QEMU that was started by hand becomes a VM: it moves, loses nothing, and comes back."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.qemu.world import World, eventually, image, loaded, qemu, world
from vmckpt.hosts.process import ProcessId, identify, is_alive, kill
from vmckpt.lab.labguest import LabGuest
from vmckpt.lab.network import GUEST_BRIDGE
from vmckpt.lab.state import LabHost
from vmckpt.qemu.monitor import session

HAND = LabGuest("hand", 1, image=Path("/"), disk=None)
PLAIN = (
    "-nographic -m 256 -cpu qemu64 -nic tap,ifname=hand0,script=no,downscript=no,model=virtio "
    "-drive file=root.qcow2,if=virtio"
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
        f"console=ttyS0 quiet panic=-1 vk.id=1 vk.ip={HAND.address}/24 vk.heartbeat="
        "10.77.0.254:7700"
    )
    return ["-kernel", f"{image()}/vmlinuz", "-initrd", f"{image()}/initrd", "-append", words]


@contextmanager
def by_hand(made: World, host: LabHost, style: str, monitors: int = 2) -> Iterator[ProcessId]:
    """A QEMU as somebody starts it, in a directory of his own; ended with the block."""
    where = made.state_dir
    qemu_img = Path(host.qemu).parent / "qemu-img"
    for name in ("root", "extra"):
        image_file = where / f"{name}.qcow2"
        if not image_file.exists():
            words = [str(qemu_img), "create", "-q", "-f", "qcow2", str(image_file), "64M"]
            subprocess.run(words, check=True)
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
        eventually(lambda: (where / "hand0.sock").exists(), 60, "the QEMU started by hand is up")
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
        import socket

        sock = socket.socket(socket.AF_UNIX)
        sock.setblocking(False)
        sock.connect(str(made.state_dir / monitor))
        async with session(sock, "hand", 60) as one:
            return [await one.tell(command, arguments) for command, arguments in asked]

    return asyncio.run(go())


def adopt(made: World, *words: str) -> dict[str, Any]:
    sockets = sorted(made.state_dir.glob("hand[0-9].sock"))
    monitors = [word for path in sockets for word in ("--qmp", str(path))]
    return made.ok("vm", "adopt", "hand", "--host", "lab-a", *monitors, *words)


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
    [("10.0 10.0", PLAIN, 1), ("10.0 10.0", BLOCKDEV, 2), ("7.2 7.2", BLOCKDEV, 3)],
    ids=["as people type it", "blockdev and a hot-plugged disk", "the same on 7.2"],
)
def test_it_moves_there_and_back_and_loses_nothing(
    versions: str, style: str, monitors: int
) -> None:
    with world(*(qemu(version) for version in versions.split())) as made:
        with by_hand(made, made.lab.host("lab-a"), style, monitors) as process:
            if style == BLOCKDEV:
                plug(made)
            adopted = adopt(made)
            assert adopted["pid"] == process.pid
            listed = made.ok("vm", "list")["vms"][0]
            assert (listed["adopted"], listed["started_by"]) == (True, "somebody else")
            assert listed["state"] == "running"
            there_and_back(made)
            assert not is_alive(process)
            shown = made.ok("vm", "show", "hand")
            assert (shown["adopted"], shown["started_by"]) == (True, "vmckpt")
            assert len(shown["disks"]) == (2 if style == BLOCKDEV else 1)
            made.ok("vm", "stop", "hand", "--force")
            made.ok("vm", "start", "hand")
            made.ok("vm", "stop", "hand", "--force")
            made.ok("vm", "rm", "hand")


def there_and_back(made: World) -> None:
    async def go() -> None:
        async with loaded(made, HAND):
            await asyncio.sleep(0.3)
            for target in ("lab-b", "lab-a"):
                await asyncio.to_thread(made.ok, "migrate", "hand", target)

    asyncio.run(go())
