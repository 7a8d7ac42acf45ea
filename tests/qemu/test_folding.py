"""Overlays, on a QEMU without a guest that dies while they are committed: the newest stays."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.qemu.world import qemu
from tests.waiting import eventually
from vmckpt.errors import OperationFailedError, VmckptError
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes.process import identify
from vmckpt.lease.file_store import FileStore
from vmckpt.lease.record import LeaseRecord, LeaseSpan
from vmckpt.lease.store import NONE_YET
from vmckpt.options.replication import SHARED, ReplicationOptions
from vmckpt.qemu import block, commands
from vmckpt.qemu.monitor import Monitor, session
from vmckpt.replicate.disks.copies import CopiedDisk
from vmckpt.replicate.disks.mirrors import MirrorSource
from vmckpt.replicate.disks.overlays import add_overlays, commit_overlays
from vmckpt.replicate.request import ReplicationRequest
from vmckpt.vm.inventory import Vm
from vmckpt.vm.paths import vm_dir
from vmckpt.vm.record import Platform, Qemu
from vmckpt.vm.spec.spec import parse_spec

BLOCK = 65536
SIZE_BYTES = 16 * BLOCK
PLATFORM = Platform("q35", "tcg", "qemu64")
DISK = '[[disks]]\npath = "{}"\nformat = "raw"\n'
# The shared file takes no writes of the last block.
FAILS = (
    "driver=raw,node-name={node},file.driver=blkdebug,file.image.driver=file,"
    f"file.image.filename={{image}},file.inject-error.0.event=none,"
    f"file.inject-error.0.iotype=write,file.inject-error.0.sector={15 * BLOCK // 512}"
)
TAKES = "driver=raw,node-name={node},file.driver=file,file.filename={image}"


class Aside:
    """A VM of two shared disks, whose device writes aside."""

    def __init__(self, vm: Vm, request: ReplicationRequest) -> None:
        self.vm, self.request = vm, request
        self.images = [disk.on(vm.host.state_dir) for disk in vm.spec.disks]

    @asynccontextmanager
    async def asked(self) -> AsyncIterator[Monitor]:
        files = self.vm.qemu.files
        async with session(await self.vm.host.connect(files.operator), "it") as monitor:
            yield monitor

    async def begin(self) -> None:
        async with self.asked() as monitor:
            sources = [MirrorSource(number, f"disk{number}", SIZE_BYTES) for number in (0, 1)]
            await add_overlays(monitor, self.request, self.vm, sources)
            await commands.cont(monitor)

    async def write(self, disk: int, at: int, content: int) -> None:
        """As the guest does, with a flush: through the device, to what it has for its disk."""
        device = f"/machine/peripheral/vd{disk}/virtio-backend"
        async with self.asked() as monitor:
            for what in (f"write -P {content} {at * BLOCK} {BLOCK}", "flush"):
                line = f'qemu-io -d {device} "{what}"'
                said = await monitor.ask("human-monitor-command", str, {"command-line": line})
                assert "wrote" in said or said == "", said

    async def kill(self) -> None:
        assert await self.vm.host.kill(self.vm.qemu.process)

    async def commit_overlays(self) -> None:
        await commit_overlays(self.vm.directory.overlays)

    async def fails_to_fold(self) -> list[str]:
        """How the guest was stopped and let run meanwhile."""
        watch = await self.vm.host.connect(self.vm.qemu.files.onlooker)
        async with session(watch, "it") as monitor:
            with monitor.events("STOP", "RESUME") as seen:
                with pytest.raises(VmckptError):
                    await self.commit_overlays()
                assert (await commands.query_status(monitor)).running
                return [str(event["event"]) for event in seen.drain()]

    def layers(self) -> list[str]:
        overlays = self.vm.directory.overlays
        return sorted(path.name for path in overlays.glob("disk*")) if overlays.exists() else []

    def content(self, disk: int, at: int) -> int:
        return self.images[disk].read_bytes()[at * BLOCK]


@asynccontextmanager
async def two_disks(version: str, path: Path, second: str = TAKES) -> AsyncIterator[Aside]:
    """What its guest writes stands aside; the term is its host's alone."""
    host = LocalHost("a", path / "a", "127.0.0.1", str(qemu(version)))
    directory = vm_dir(host.state_dir, "web")
    files = directory.qemu("0")
    files.path.mkdir(parents=True)
    images = [path / f"{number}.raw" for number in (0, 1)]
    for image in images:
        image.write_bytes(bytes(SIZE_BYTES))
    text = 'name = "web"\nmemory = "32M"\n' + "".join(DISK.format(image) for image in images)
    words = ["-nodefaults", "-display", "none", "-machine", "q35", "-accel", "tcg", "-S"]
    for number, options in enumerate([TAKES, second]):
        node = f"disk{number}"
        words += ["-blockdev", options.format(node=node, image=images[number])]
        words += ["-device", f"virtio-blk-pci,drive={node},id=vd{number}"]
    for monitor in (files.operator, files.onlooker, files.rescue):
        words += ["-qmp", f"unix:{monitor},server=on,wait=off"]
    child = await asyncio.create_subprocess_exec(host.qemu, *words)
    try:
        await asyncio.to_thread(eventually, files.rescue.exists, 60, "QEMU listens")
        process = identify(child.pid)
        assert process is not None
        vm = Vm(parse_spec(text, "it", path), host, directory, Qemu(files, process, PLATFORM))
        directory.spec.write_text(text)
        directory.current.write_text(vm.qemu.to_json())
        request = ReplicationRequest(
            run="1", vm="web", spec=text, platform=PLATFORM, primary=host,
            standby=LocalHost("b", path / "b", "127.0.0.1"),
            options=ReplicationOptions(str(path / "leases"), disks=SHARED), one_machine=True,
            qemu_id="0", disks=(CopiedDisk(0, SIZE_BYTES), CopiedDisk(1, SIZE_BYTES)),
        )  # fmt: skip
        (path / "leases").mkdir()
        alone = LeaseRecord(1, "a/1", 1, LeaseSpan(0.1))
        await FileStore(path / "leases").replace("web", alone, over=NONE_YET)
        directory.overlays.mkdir()
        (directory.overlays / "disk1.folded").write_text(
            "of a fold that was killed at its very end"
        )
        made = Aside(vm, request)
        await made.begin()
        yield made
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


@pytest.mark.parametrize("version", ["7.2", "10.0"])
def test_a_disk_that_is_folded_already_is_not_taken_back_to_its_layer(
    version: str, short_path: Path
) -> None:
    async def play() -> None:
        async with two_disks(version, short_path) as made:
            for disk in (0, 1):
                await made.write(disk, 3, 7)
                assert made.content(disk, 3) == 0
            async with made.asked() as monitor:
                await block.blockdev_del(monitor, "disk1")
            # The first is committed, the second has nowhere to go. A write that came while the disk
            # took its layer's place was QEMU 7.2's end.
            assert await made.fails_to_fold() == ["STOP", "RESUME"]
            assert made.layers() == ["disk0.folded", "disk1.qcow2"]
            await made.write(0, 3, 8)
            assert made.content(0, 3) == 8
            await made.kill()
            await made.commit_overlays()
            assert (made.content(0, 3), made.content(1, 3)) == (8, 7)
            assert made.layers() == []

    asyncio.run(play())


def test_a_layer_whose_disk_takes_no_writes_at_the_last_moment_has_all_again(
    short_path: Path,
) -> None:
    async def play() -> None:
        async with two_disks("10.0", short_path, FAILS) as made:
            await made.write(1, 3, 7)
            # As a commit that is killed just before the disk takes the layer's place.
            async with made.asked() as monitor:
                await block.blockdev_mirror(
                    monitor, "fold-1", "aside-1", "disk1", 0, write_through=True, sync="top"
                )
                while (await commands.query_jobs(monitor))[0].status != "ready":  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            layer = made.vm.directory.overlays / "disk1.qcow2"
            layer.rename(layer.with_suffix(".folded"))
            await made.write(1, 15, 7)
            with pytest.raises(OperationFailedError, match="could not be committed to disk1"):
                await made.commit_overlays()
            assert "disk1.qcow2" in made.layers()
            await made.write(1, 3, 8)
            await made.kill()
            await made.commit_overlays()
            assert (made.content(1, 3), made.content(1, 15)) == (8, 7)

    asyncio.run(play())
