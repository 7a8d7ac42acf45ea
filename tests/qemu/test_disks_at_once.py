"""The disks of one moment, on a QEMU without a guest: what is written is known exactly."""

import asyncio
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.qemu.world import qemu
from tests.waiting import eventually
from vmckpt.epoch.disks import DisksAtOnce
from vmckpt.qemu.block import query_bitmaps
from vmckpt.qemu.disks.nbd import NbdExport
from vmckpt.qemu.monitor import Monitor, session
from vmckpt.vm.paths import QemuDir

BLOCK = 65536
NODE = "disk"
# Written when all is prepared, just before the moment.
BEFORE = 9


@asynccontextmanager
async def a_qemu(version: str, directory: Path) -> AsyncIterator[Monitor]:
    """A QEMU with one empty disk, and no guest."""
    image, path = directory / "disk.raw", directory / "qmp.sock"
    with image.open("wb") as file:
        file.truncate(16 * BLOCK)
    words = ["-nodefaults", "-display", "none", "-machine", "q35", "-accel", "tcg", "-S"]
    words += [
        "-blockdev",
        f"raw,node-name={NODE},discard=unmap,file.driver=file,file.filename={image}",
    ]
    words += ["-device", f"virtio-blk-pci,drive={NODE},id=vda"]
    words += ["-qmp", f"unix:{path},server=on,wait=on"]
    child = await asyncio.create_subprocess_exec(qemu(version), *words)
    try:
        await asyncio.to_thread(eventually, path.exists, 60, "QEMU listens")
        async with session(connected(path), "it") as monitor:
            yield monitor
    finally:
        child.kill()
        await child.wait()


def connected(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(str(path))
    sock.setblocking(False)
    return sock


async def write(monitor: Monitor, block: int, content: int) -> None:
    """As the guest does: through the device, and so through what it was given for its disk."""
    device = "/machine/peripheral/vda/virtio-backend"
    line = f'qemu-io -d {device} "write -P {content} {block * BLOCK} {BLOCK}"'
    said = await monitor.ask("human-monitor-command", str, {"command-line": line})
    assert "wrote" in said or said == "", said


async def moment(
    monitor: Monitor, directory: Path, name: str, since: str | None, *, saved: bool = True
) -> DisksAtOnce:
    disks = DisksAtOnce(monitor, QemuDir(directory, "vm", "0"))
    await disks.prepare([NODE], name, since)
    if saved:
        await disks.add_filters()
        await write(monitor, BEFORE, 1)
    for step in disks.in_pause():
        await step
    return disks


async def content(disks: DisksAtOnce) -> dict[int, int]:
    """The first byte of each block that is read."""
    found: dict[int, int] = {}
    async with disks.served() as path:

        def read() -> None:
            export = NbdExport(connected(path), NODE, disks.contexts(NODE))
            try:
                for piece in disks.read(export, NODE, BLOCK, BLOCK):
                    for at in range(0, piece.length, BLOCK):
                        byte = 0 if piece.data is None else piece.data[at]
                        found[(piece.start + at) // BLOCK] = byte
            finally:
                export.close()

        await asyncio.to_thread(read)
    return found


@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("version", ["7.2", "10.0"])
def test_only_what_was_written_since_is_read(version: str, saved: bool) -> None:
    before = {BEFORE: 1} if saved else {}

    async def play(directory: Path) -> None:
        async with a_qemu(version, directory) as monitor:
            first = await moment(monitor, directory, "1", None, saved=saved)
            await write(monitor, 3, 7)
            assert await content(first) == dict.fromkeys(range(16), 0) | before
            await first.end(keep_bitmap=True)
            second = await moment(monitor, directory, "2", "1", saved=saved)
            assert second.knows_changes(NODE)
            await write(monitor, 4, 8)
            found = await content(second)
            # What is written before the bitmap's end is read too, as it was in the moment.
            assert found == {3: 7, 4: 0} | before
            await second.end(keep_bitmap=True)

    with tempfile.TemporaryDirectory(prefix="vk-", dir="/tmp") as path:
        asyncio.run(play(Path(path)))


@pytest.mark.parametrize("version", ["7.2", "10.0"])
@pytest.mark.parametrize("it_served", [True, False])
def test_what_a_killed_predecessor_left_is_no_wrong_record_of_what_was_written(
    version: str, it_served: bool
) -> None:
    """It may have ended the older bitmap: blocks written after that were left out once."""

    async def play(directory: Path) -> None:
        async with a_qemu(version, directory) as monitor:
            first = await moment(monitor, directory, "1", None)
            await first.end(keep_bitmap=True)
            killed = await moment(monitor, directory, "killed", "1")
            if it_served:
                await content(killed)
            await write(monitor, 5, 9)
            third = await moment(monitor, directory, "3", "1")
            assert third.knows_changes(NODE) is not it_served
            assert (await content(third))[5] == 9
            await third.end(keep_bitmap=True)

    with tempfile.TemporaryDirectory(prefix="vk-", dir="/tmp") as path:
        asyncio.run(play(Path(path)))


def test_a_checkpoint_that_was_killed_is_taken_again_under_its_id() -> None:
    """A schedule does so: QEMU had a bitmap of that name, and refused another."""

    async def play(directory: Path) -> None:
        async with a_qemu("10.0", directory) as monitor:
            await moment(monitor, directory, "1", None)  # and is killed
            again = await moment(monitor, directory, "1", None)
            await again.end(keep_bitmap=True)
            assert list((await query_bitmaps(monitor))[NODE]) == ["vmckpt-1"]

    with tempfile.TemporaryDirectory(prefix="vk-", dir="/tmp") as path:
        asyncio.run(play(Path(path)))
