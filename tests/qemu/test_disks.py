"""Local disks move with the guest that writes to them: nothing is lost, nothing is left."""

import asyncio
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.qemu.world import World, eventually, image, kill, loaded, qemu, world
from vmckpt.hosts.host import Host
from vmckpt.lab.labguest import LabGuest
from vmckpt.qemu import commands
from vmckpt.qemu.block import query_disk_images
from vmckpt.qemu.monitor import Monitor
from vmckpt.vm.inventory import read_vm

MIB = 1 << 20


def qemu_img(*words: str) -> None:
    subprocess.run([str(qemu("10.0").with_name("qemu-img")), *words], check=True)


def run_guest(made: World, guest: LabGuest, more: str = "") -> None:
    """The guest on lab-a, its disk an image of the host's own."""
    spec = made.state_dir / f"{guest.name}.toml"
    spec.write_text(
        guest.spec().replace(f'path = "{guest.name}.', f'image = "{guest.name}.') + more
    )
    made.ok("vm", "run", str(spec), "--host", "lab-a")


def images(made: World, host: str) -> list[str]:
    directory = made.lab.host(host).state_dir / "images"
    return sorted(path.name for path in directory.iterdir()) if directory.exists() else []


def allocated_bytes(path: Path) -> int:
    return path.stat().st_blocks * 512


async def traces(made: World, host: str, name: str) -> list[str]:
    """Jobs and nodes of copies that the QEMU on `host` still has."""
    home = made.lab.host(host)
    vm = read_vm(Host(host, home.state_dir, home.migration_address), name)
    assert vm is not None
    monitor = await Monitor.connect(await vm.host.connect(vm.qemu.files.operator), name)
    jobs = [job.id for job in await commands.query_jobs(monitor)]
    nodes = await query_disk_images(monitor)
    await monitor.close()
    return jobs + [node for node in nodes if not node.startswith(("disk", "#", "pflash"))]


def stands_whole(made: World, host: str, name: str = "mover") -> None:
    """The VM and its disk are on `host`, with no trace of any copy anywhere."""
    shown = made.ok("vm", "show", name)
    assert (shown["host"], shown["state"], shown["migration_cut_off"]) == (host, "running", False)
    assert len(made.qemus(name)) == 1
    other = "lab-b" if host == "lab-a" else "lab-a"
    assert [n for n in images(made, host) if "vmckpt" in n] == []
    assert [n for n in images(made, other) if n.startswith(name)] == []
    assert made.files(other) == []
    assert asyncio.run(traces(made, host, name)) == []


@pytest.fixture(scope="module")
def made() -> Iterator[World]:
    with world(qemu("10.0"), qemu("10.0")) as one:
        run_guest(one, LabGuest("mover", 1, image(), disk="128M"))
        yield one


METHODS = {
    "precopy": ["--method", "precopy"],
    "postcopy": ["--method", "postcopy"],
    "stop": ["--method", "stop"],
    "parallel": ["--parallel", "2"],
    "with a bandwidth": ["--bandwidth", "200MB"],
    "explicitly": ["--disks", "copy"],
}


@pytest.mark.parametrize("way", METHODS)
def test_a_local_disk_moves_there_and_back(made: World, way: str) -> None:
    async def there_and_back() -> None:
        async with loaded(made, LabGuest("mover", 1, image(), disk="128M")) as control:
            await asyncio.sleep(0.5)
            for target in ("lab-b", "lab-a"):
                await asyncio.to_thread(made.ok, "migrate", "mover", target, *METHODS[way])
                await control.ping()

    asyncio.run(there_and_back())
    stands_whole(made, "lab-a")
