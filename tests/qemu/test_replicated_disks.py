"""Disks of real guests, written through: what is cut off at an epoch's end is the disk, exactly."""

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import pytest

from tests.qemu.test_replicate import is_only_on, promoted, services, sides
from tests.qemu.world import World, eventually, image, loaded, qemu, world
from vmckpt.epoch.capture import Capture, capturing
from vmckpt.epoch.epoch import Pages
from vmckpt.epoch.output import HeldOutput
from vmckpt.lab.labguest import LabGuest
from vmckpt.qemu import commands
from vmckpt.qemu.block import block_job_cancel, query_disk_images
from vmckpt.qemu.monitor import Monitor, session
from vmckpt.replicate.disks.image import Image, opened
from vmckpt.replicate.disks.known import blocks_of
from vmckpt.replicate.disks.mirrors import PREFIX, Mirrors, Source, mirrored
from vmckpt.replicate.wire.messages import Digests, encode_digests
from vmckpt.replicate.wire.sections import Packer
from vmckpt.vm.inventory import Vm, read_vm

SIZE = "40M"


@asynccontextmanager
async def captured(made: World) -> AsyncIterator[tuple[Vm, Monitor, Capture]]:
    vm = await read_vm(made.asked("lab-a"), "guest")
    assert vm is not None
    ram_file = vm.qemu.files.ram(vm.spec.ram_dir)
    async with session(await vm.host.connect(vm.qemu.files.operator), "guest") as monitor:
        output = HeldOutput(monitor, [])
        async with capturing(vm.qemu.process.pid, ram_file, monitor, output) as capture:
            yield vm, monitor, capture


async def begun(mirrors: Mirrors, copy: Image) -> None:
    told = Digests(0, 0, copy.digests(0, blocks_of(copy.size_bytes)))
    mirrors.tell(memoryview(b"".join(encode_digests(told, Packer()))))
    while not await mirrors.are_copied():
        copy.apply(mirrors.intake.cut())
        await asyncio.sleep(0.01)
    copy.apply(mirrors.intake.cut())


@pytest.mark.parametrize("version", ["10.0", "7.2"])
def test_at_every_epoch_the_copy_is_the_disk(version: str) -> None:
    guest = LabGuest("guest", 1, image(), memory="192M", disk=SIZE, disk_format="raw")
    with world(qemu(version)) as made:
        made.run_guest(guest, "lab-a", own_disk=True)
        asyncio.run(_same_at_every_epoch(made, guest))


async def _same_at_every_epoch(made: World, guest: LabGuest) -> None:
    disk = made.state("lab-a") / "images/guest.raw"
    copy = made.state_dir / "copy.raw"
    copy.write_bytes(bytes(disk.stat().st_size))
    async with AsyncExitStack() as stack:
        control = await stack.enter_async_context(loaded(made, guest))
        _, monitor, capture = await stack.enter_async_context(captured(made))
        image_ = stack.enter_context(opened(copy))
        sources = [Source(0, "disk0", disk.stat().st_size)]
        socket = made.state_dir / "disks.sock"
        async with mirrored(monitor, sources, socket) as mirrors:
            await begun(mirrors, image_)
            before = (await control.stat()).disk_seq

            async def take(pages: Pages) -> None:
                del pages

            await capture.everything(take, 1 << 24)
            writes = []

            def compare() -> None:
                mirrors.end_epoch()
                writes.append(len(mirrors.ended()))
                image_.apply(mirrors.ended())
                assert disk.read_bytes() == copy.read_bytes()

            for number in range(25):
                with mirrors.intake.open():
                    epoch = await capture.epoch(number, at_stop=compare)
                assert epoch.device_state
                await asyncio.sleep(0.05)
            assert sum(writes) > 25
            assert (await control.stat()).disk_seq > before
            assert (await control.verify_disk()).sound
        assert await commands.query_jobs(monitor) == []
        nodes = await query_disk_images(monitor)
        assert not [name for name in nodes if name.startswith(PREFIX)]
        assert (await control.verify_disk()).sound


@contextmanager
def protected(version: str, size: str = "48M") -> Iterator[tuple[World, LabGuest]]:
    """A guest on lab-a that writes to its disk, with lab-b as its standby."""
    guest = LabGuest("guest", 1, image(), memory="160M", disk=size, disk_format="raw")
    with world(qemu(version), qemu(version)) as made:
        made.run_guest(guest, "lab-a", own_disk=True)
        asyncio.run(_loaded(made, guest))
        made.ok("replicate", "start", "guest", "lab-b")
        try:
            yield made, guest
        finally:
            made.vmckpt("replicate", "stop", "guest")


async def _loaded(made: World, guest: LabGuest) -> None:
    control = await guest.control(made.lab)
    await control.load_disk("rate=4M size=8M")
    await control.load_memory("rate=5M set=16M pattern=uniform content=text")
    await control.close()


async def _told_of_disk(
    made: World,
    guest: LabGuest,
    do: Callable[[], Any],
    is_over: Callable[[World], bool] = promoted,
) -> None:
    """While records are written `do` it, until it is over: no record that was told of is lost."""
    control = await guest.control(made.lab)
    told = over = 0

    async def ask() -> None:
        nonlocal told
        while not over or told <= over:
            told = (await control.stat()).disk_seq

    asking = asyncio.ensure_future(ask())
    await asyncio.sleep(2.0)
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, do)
    at_kill = told
    await loop.run_in_executor(
        None, lambda: eventually(partial(is_over, made), 45, "the guest goes on")
    )
    over = max(at_kill, 1)
    await asking
    checked = await control.verify_disk()
    assert checked.sound, checked
    assert checked.seq >= told > at_kill > 0
    assert (await control.verify_memory()).sound
    await control.close()


def kill_all_of_the_primary(made: World, host: str) -> None:
    current = made.state(host) / "vms/guest/vm.json"
    pid = json.loads(current.read_text())["pid"]
    for victim in [*services(made, "primary"), pid]:
        os.kill(victim, signal.SIGKILL)


@pytest.mark.parametrize("version", ["10.0", pytest.param("7.2", marks=pytest.mark.long)])
def test_a_disk_goes_on_with_its_guest_and_back_without_being_copied(version: str) -> None:
    with protected(version) as (made, guest):
        asyncio.run(_told_of_disk(made, guest, lambda: kill_all_of_the_primary(made, "lab-a")))
        eventually(lambda: is_only_on(made, "lab-b"), 10, "one guest, on lab-b")
        made.ok("replicate", "stop", "guest")
        disks = [made.state(host) / "images/guest.raw" for host in ("lab-a", "lab-b")]
        size = disks[0].stat().st_size

        # Back: the old primary's disk is compared, and what differs is sent.
        made.ok("replicate", "start", "guest", "lab-a")
        told = sides(made)["primary"]
        sent = told["disk_bytes"] - told["disk_bytes_not_sent"]
        print(f"of {size} bytes {sent} were sent, {told['disk_bytes_not_sent']} were there")
        assert told["disk_bytes_not_sent"] > size * 0.75
        hand_over = partial(made.ok, "replicate", "failover", "guest")
        asyncio.run(_told_of_disk(made, guest, hand_over))
        eventually(lambda: is_only_on(made, "lab-a"), 10, "one guest, on lab-a")
        made.ok("replicate", "stop", "guest")

        # A new host gets all of it, and loses it when the protection is ended.
        disks[1].unlink()
        made.ok("replicate", "start", "guest", "lab-b")
        assert disks[1].stat().st_size == size
        made.ok("replicate", "stop", "guest")
        assert not disks[1].exists()
        assert disks[0].exists()
        made.ok("migrate", "guest", "lab-b", "--disks", "copy")


def kill(made: World, *roles: str) -> None:
    for role in roles:
        for victim in services(made, role):
            os.kill(victim, signal.SIGKILL)


def is_alone(made: World) -> bool:
    return not services(made, "primary")


@pytest.mark.long
@pytest.mark.parametrize("version", ["10.0", "7.2"])
def test_killed_again_and_again_and_no_record_is_lost(version: str) -> None:
    """To and fro: each time the old primary's disk becomes the standby's again."""
    with protected(version) as (made, guest):
        homes = ["lab-a", "lab-b"]
        for _ in range(4):
            kill_it = partial(kill_all_of_the_primary, made, homes[0])
            asyncio.run(_told_of_disk(made, guest, kill_it))
            eventually(lambda: is_only_on(made, homes[1]), 10, f"one guest, on {homes[1]}")
            made.ok("replicate", "stop", "guest")
            made.ok("replicate", "start", "guest", homes[0])
            homes.reverse()


@pytest.mark.long
def test_a_primary_whose_service_alone_dies_is_replaced_with_its_disk() -> None:
    with protected("10.0") as (made, guest):
        asyncio.run(_told_of_disk(made, guest, lambda: kill(made, "primary")))
        eventually(lambda: is_only_on(made, "lab-b"), 20, "one guest, on lab-b")


@pytest.mark.long
@pytest.mark.parametrize("roles", [("standby",), ("standby", "primary")])
def test_without_its_standby_a_guest_goes_on_with_its_own_disk(roles: tuple[str, ...]) -> None:
    """Nothing of the mirror is left in QEMU, nothing of the copy on the standby."""
    with protected("10.0") as (made, guest):
        asyncio.run(_told_of_disk(made, guest, lambda: kill(made, *roles), is_alone))
        made.ok("replicate", "stop", "guest")
        assert is_only_on(made, "lab-a")
        assert not (made.state("lab-b") / "images/guest.raw").exists()
        asyncio.run(_has_no_mirrors(made))
        made.ok("migrate", "guest", "lab-b", "--disks", "copy")


async def _has_no_mirrors(made: World) -> None:
    vm = await read_vm(made.asked("lab-a"), "guest")
    assert vm is not None
    async with session(await vm.host.connect(vm.qemu.files.onlooker), "guest") as monitor:
        assert await commands.query_jobs(monitor) == []
        assert not [name for name in await query_disk_images(monitor) if name.startswith(PREFIX)]


@pytest.mark.long
def test_a_standby_that_was_lost_keeps_its_copy_for_the_next_one() -> None:
    with protected("10.0") as (made, guest):
        frozen = services(made, "standby")

        def freeze() -> None:
            for pid in frozen:
                os.kill(pid, signal.SIGSTOP)

        asyncio.run(_told_of_disk(made, guest, freeze, is_alone))
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)
        eventually(lambda: not services(made, "standby"), 20, "the standby has ended")
        copy = made.state("lab-b") / "images/guest.raw"
        made.ok("replicate", "start", "guest", "lab-b")
        assert sides(made)["primary"]["disk_bytes_not_sent"] > copy.stat().st_size * 0.75
        kill_it = partial(kill_all_of_the_primary, made, "lab-a")
        asyncio.run(_told_of_disk(made, guest, kill_it))
        eventually(lambda: is_only_on(made, "lab-b"), 10, "one guest, on lab-b")


@pytest.mark.long
def test_a_mirror_that_somebody_ends_ends_the_protection_and_nothing_else() -> None:
    with protected("10.0") as (made, guest):

        async def cancel() -> None:
            vm = await read_vm(made.asked("lab-a"), "guest")
            assert vm is not None
            async with session(await vm.host.connect(vm.qemu.files.onlooker), "guest") as monitor:
                await block_job_cancel(monitor, f"{PREFIX}0", force=True)

        asyncio.run(_told_of_disk(made, guest, lambda: asyncio.run(cancel()), is_alone))
        told = sides(made)["primary"]
        assert told["ending"] == "alone"
        assert "a disk is not written through any more" in told["why"]


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_standby_whose_disk_is_full_says_so_and_the_guest_goes_on() -> None:
    guest = LabGuest("guest", 1, image(), memory="160M", disk="48M", disk_format="raw")
    with world(qemu("10.0"), qemu("10.0")) as made:
        images = made.state("lab-b") / "images"
        images.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6M", "none", images], check=True)
        try:
            made.run_guest(guest, "lab-a", own_disk=True)
            asyncio.run(_ready(made, guest))
            made.ok("replicate", "start", "guest", "lab-b")
            asyncio.run(
                _told_of_disk(made, guest, lambda: asyncio.run(_fill(made, guest)), is_alone)
            )
            told = sides(made)
            assert told["primary"]["ending"] == "alone"
            assert "has no room for" in told["primary"]["why"]
            made.ok("replicate", "stop", "guest")
            assert list(images.iterdir()) == []
        finally:
            subprocess.run(["umount", "-l", images], check=True)


async def _ready(made: World, guest: LabGuest) -> None:
    control = await guest.control(made.lab)
    await control.load_disk("rate=200K size=2M")
    await control.load_memory("rate=5M set=16M pattern=uniform content=text")
    await control.close()


async def _fill(made: World, guest: LabGuest) -> None:
    """More than the standby has room for; the answer waits until the guest is alone."""
    control = await guest.control(made.lab)
    await control.load_disk("rate=4M size=32M")
    await control.close()
