"""Mirrors that end while a real guest writes as fast as it can: its QEMU lives, its disk is whole.

QEMU's own end of one frees memory that writes under way still use, and dies of that by and by.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import product
from pathlib import Path

import pytest

from tests.kinds import VERSIONS
from tests.qemu.world import image, qemu, world
from vmckpt.errors import VmckptError
from vmckpt.lab.guests.labguest import LabGuest
from vmckpt.migrate.outcome.ends import COPY_PREFIX, End
from vmckpt.migrate.steps import disks as migrated
from vmckpt.qemu import block, commands
from vmckpt.qemu.disks import nbd_server
from vmckpt.qemu.monitor import Monitor, session
from vmckpt.replicate.disks import mirrors as replicated
from vmckpt.vm.inventory import read_vm

ROUNDS, MIB = 20, 1 << 20
RUN = "20261123-140000-abcd"

Drop = Callable[[], Awaitable[None]]


class Slow:
    """A copy that is written so slowly that some write is always under way."""

    size_bytes = 64 * MIB

    async def write(self, offset_bytes: int, data: bytes) -> None:
        del offset_bytes, data
        await asyncio.sleep(0.001)

    async def zero(self, offset_bytes: int, length_bytes: int) -> None:
        del offset_bytes, length_bytes

    def left(self) -> None:
        pass


async def begin(monitor: Monitor, socket: Path, name: str, *, until_ready: bool) -> None:
    server = {"type": "unix", "path": str(socket)}
    await block.blockdev_add(
        monitor, {"driver": "nbd", "node-name": name, "server": server, "export": name}
    )
    sync = "none" if until_ready else "full"
    await block.blockdev_mirror(monitor, name, "disk0", name, 0, write_through=True, sync=sync)
    while until_ready and (await block.query_mirrors(monitor, name))[0].status != "ready":  # noqa: ASYNC110
        await asyncio.sleep(0.002)


async def rounds(
    monitor: Monitor, socket: Path, name: str, drop: Drop, *, until_ready: bool, goes: bool
) -> None:
    """Mirrors begun, and ended by `drop`; after their server `goes`, or before."""
    for number in range(ROUNDS):
        async with nbd_server.serving(socket, {name: Slow()}):
            await begin(monitor, socket, name, until_ready=until_ready)
            await asyncio.sleep(0.01 + 0.001 * number)
            if not goes:
                await drop()
        await drop()
        assert await commands.query_jobs(monitor) == []
        assert (await commands.query_status(monitor)).running


@pytest.mark.parametrize("version", VERSIONS)
def test_mirrors_end_under_writes(version: str) -> None:
    guest = LabGuest("guest", 1, image(), memory="128M", disk="64M", disk_format="raw")
    told: list[str] = []

    async def play(socket: Path) -> None:
        control = await guest.control(made.lab)
        await control.load_disk("rate=1G size=32M")
        vm = await read_vm(made.asked("lab-a"), "guest")
        assert vm is not None
        end = End(vm.host, vm.qemu.files)
        try:
            async with session(await vm.host.connect(vm.qemu.files.operator), "guest") as monitor:
                end.adopt(monitor)
                drops = {
                    f"{replicated.PREFIX}0": lambda: replicated.drop_mirrors(monitor, told.append),
                    f"{COPY_PREFIX}{RUN}-0": lambda: migrated.drop_mirrors(end, RUN),
                }
                before = (await control.stat()).disk_seq
                for name, until_ready, goes in product(drops, (True, False), (True, False)):
                    await rounds(
                        monitor, socket, name, drops[name], until_ready=until_ready, goes=goes
                    )
                assert (await control.stat()).disk_seq > before + ROUNDS
                await control.load_disk("rate=1M")
                assert (await control.verify_disk()).sound
                await end.close()
        finally:
            with suppress(VmckptError):
                await control.close()
        assert await vm.is_alive()

    with world(qemu(version)) as made:
        made.run_guest(guest, "lab-a", own_disk=True)
        asyncio.run(play(made.state_dir / "disks.sock"))
    # At each end of the replica's the guest was paused, watched, and went on.
    assert told.count("free inf") == 4 * ROUNDS
