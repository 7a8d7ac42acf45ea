"""Disks of real guests, written through: what is cut off at an epoch's end is the disk, exactly."""

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.qemu.test_replicate import is_only_on, promoted, services, sides
from tests.qemu.world import World, image, loaded, qemu, world
from tests.waiting import eventually
from vmckpt.epoch.capture import Capture, capturing
from vmckpt.epoch.epoch import Pages
from vmckpt.epoch.output import HeldOutput
from vmckpt.lab.guests.labguest import LabGuest
from vmckpt.memory.private.guest_ram import GuestRam
from vmckpt.qemu import commands
from vmckpt.qemu.block import query_disk_images
from vmckpt.qemu.monitor import Monitor, session
from vmckpt.replicate.disks.image import WritableImage, opened
from vmckpt.replicate.disks.known import blocks_of
from vmckpt.replicate.disks.mirrors import PREFIX, Mirrors, MirrorSource, mirrored
from vmckpt.replicate.wire.messages import Digests, encode_digests
from vmckpt.replicate.wire.sections import Packer
from vmckpt.vm.inventory import Vm, read_vm

SIZE = "40M"
# Of records on a disk of which the rest was never written.
RING = 40 << 20


@asynccontextmanager
async def captured(made: World) -> AsyncIterator[tuple[Vm, Monitor, Capture]]:
    vm = await read_vm(made.asked("lab-a"), "guest")
    assert vm is not None
    ram_file = vm.qemu.files.ram(vm.spec.ram_dir)
    async with session(await vm.host.connect(vm.qemu.files.operator), "guest") as monitor:
        output = HeldOutput(monitor, [])
        async with capturing(vm.qemu.process.pid, GuestRam(ram_file), monitor, output) as capture:
            yield vm, monitor, capture


async def begun(mirrors: Mirrors, copy: WritableImage) -> None:
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
    told: list[str] = []
    async with AsyncExitStack() as stack:
        control = await stack.enter_async_context(loaded(made, guest))
        _, monitor, capture = await stack.enter_async_context(captured(made))
        image_ = stack.enter_context(opened(copy, "raw"))
        sources = [MirrorSource(0, "disk0", disk.stat().st_size)]
        socket = made.state_dir / "disks.sock"
        async with mirrored(monitor, sources, socket, told.append, lambda _: None) as mirrors:
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
def guest_with_disk(
    version: str, kind: str = "raw", size: str = "64M", ring: str = "40M", hosts: int = 2
) -> Iterator[tuple[World, LabGuest]]:
    """A guest on lab-a whose disk holds a ring of records, and which goes on writing to it."""
    guest = LabGuest("guest", 1, image(), memory="160M", disk=size, disk_format=kind)
    with world(*[qemu(version)] * hosts) as made:
        made.run_guest(guest, "lab-a", own_disk=True)
        asyncio.run(fill_and_write(made, guest, ring))
        try:
            yield made, guest
        finally:
            made.vmckpt("replicate", "stop", "guest")


@contextmanager
def protected(version: str, kind: str = "raw", hosts: int = 2) -> Iterator[tuple[World, LabGuest]]:
    """The same, with lab-b as its standby."""
    with guest_with_disk(version, kind, hosts=hosts) as (made, guest):
        made.ok("replicate", "start", "guest", "lab-b")
        yield made, guest


async def fill_and_write(made: World, guest: LabGuest, ring: str) -> None:
    control = await guest.control(made.lab)
    await control.load_disk(f"rate=1G size={ring}")
    while (stat := await control.stat()).disk_seq <= stat.disk_slots:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    await control.load_disk("rate=500K")
    await control.load_memory("rate=5M set=16M pattern=uniform content=text")
    await control.close()


async def told_of_disk(
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
        None, lambda: eventually(partial(is_over, made), 45, "the guest continues")
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


def is_kept(primary: str, standby: str, but: str = "") -> Callable[[World], bool]:
    """Whether it is protected so, in another run than `but`."""

    def found(made: World) -> bool:
        told = made.vmckpt("replicate", "status", "guest")
        sides = told.result.get("sides", [])
        mine = [one for one in sides if one["role"] == "primary" and one["state"] == "protected"]
        return [(one["primary"], one["standby"]) for one in mine if one["run"] != but] == [
            (primary, standby)
        ]

    return found


def is_on(host: str) -> Callable[[World], bool]:
    return lambda made: is_only_on(made, host)


def copied_bytes(made: World) -> int:
    """What a beginning copied of the disk; the rest the standby had."""
    told = sides(made)["primary"]
    return int(told["disk_bytes"] - told["disk_bytes_not_sent"])


LONG = pytest.mark.long
EVERY = [
    ("10.0", "qcow2"),
    pytest.param("10.0", "raw", marks=LONG),
    pytest.param("7.2", "raw", marks=LONG),
    pytest.param("7.2", "qcow2", marks=LONG),
]


@pytest.mark.parametrize(("version", "kind"), EVERY)
def test_a_disk_goes_over_and_back_and_over_again(version: str, kind: str) -> None:
    """Once all of it is copied; then only what was written on either side since."""
    with protected(version, kind) as (made, guest):
        whole = copied_bytes(made)
        assert whole > RING
        images = [made.state(host) / f"images/guest.{kind}" for host in ("lab-a", "lab-b")]

        kill_it = partial(kill_all_of_the_primary, made, "lab-a")
        asyncio.run(told_of_disk(made, guest, kill_it))
        eventually(lambda: is_only_on(made, "lab-b"), 10, "one guest, on lab-b")

        # The old primary's disk is compared, and what differs is sent.
        back: list[dict[str, Any]] = []
        go_back = lambda: back.append(made.ok("replicate", "failback", "guest"))  # noqa: E731
        asyncio.run(told_of_disk(made, guest, go_back, is_on("lab-a")))
        print(f"copied: {whole}, back: {back[0]['disk_bytes_applied']}")
        assert back[0]["disk_bytes_applied"] < RING / 2
        assert sorted(path.exists() for path in images) == [True, True]

        made.ok("replicate", "start", "guest", "lab-b")
        print(f"and over again: {copied_bytes(made)}")
        assert copied_bytes(made) < RING / 2
        asyncio.run(told_of_disk(made, guest, kill_it))
        eventually(lambda: is_only_on(made, "lab-b"), 10, "one guest, on lab-b")
        made.ok("replicate", "stop", "guest")
        # What vmckpt itself left there makes way.
        made.ok("migrate", "guest", "lab-a")
        assert [path.exists() for path in images] == [True, False]
        made.ok("vm", "stop", "guest", "--force")
        require_sound(images[0], kind)


def require_sound(path: Path, kind: str) -> None:
    if kind == "qcow2":
        words = [str(qemu("10.0").with_name("qemu-img")), "check", "-f", "qcow2", str(path)]
        checked = subprocess.run(words, capture_output=True, text=True, check=False)
        assert (checked.returncode, "No errors" in checked.stdout) == (0, True), checked


@pytest.mark.long
@pytest.mark.parametrize("kind", ["raw", "qcow2"])
def test_a_host_that_never_had_the_disk_gets_all_of_it(kind: str) -> None:
    """After a failover a third one; and it loses its copy when the protection is ended."""
    with protected("10.0", kind, hosts=3) as (made, guest):
        kill_it = partial(kill_all_of_the_primary, made, "lab-a")
        asyncio.run(told_of_disk(made, guest, kill_it))
        made.ok("replicate", "stop", "guest")
        copy = made.state("lab-c") / f"images/guest.{kind}"
        made.ok("replicate", "start", "guest", "lab-c")
        assert copy.exists()
        made.ok("replicate", "stop", "guest")
        assert not copy.exists()
        go_on = partial(made.ok, "replicate", "failback", "guest", "lab-c")
        asyncio.run(told_of_disk(made, guest, go_on, is_on("lab-c")))
        assert copy.exists()


def kill(made: World, *roles: str) -> None:
    for role in roles:
        for victim in services(made, role):
            os.kill(victim, signal.SIGKILL)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["raw", "qcow2"])
def test_a_kept_vm_is_protected_again_without_its_disk_being_copied(kind: str) -> None:
    with guest_with_disk("10.0", kind) as (made, guest):
        keeping = made.begin("replicate", "keep", "guest", "lab-a", "lab-b")
        try:
            eventually(partial(is_kept("lab-a", "lab-b"), made), 60, "lab-b protects it")
            kill_it = partial(kill_all_of_the_primary, made, "lab-a")
            asyncio.run(told_of_disk(made, guest, kill_it, is_kept("lab-b", "lab-a")))
            assert copied_bytes(made) < RING / 2
            lose_it = partial(kill, made, "standby")
            again = is_kept("lab-b", "lab-a", sides(made)["primary"]["run"])
            asyncio.run(told_of_disk(made, guest, lose_it, again))
            assert copied_bytes(made) < RING / 2
        finally:
            made.kill(keeping)


@pytest.mark.long
@pytest.mark.parametrize("version", ["10.0", "7.2"])
def test_killed_again_and_again_and_no_record_is_lost(version: str) -> None:
    """To and fro: each time the old primary's disk becomes the standby's again."""
    with protected(version) as (made, guest):
        homes = ["lab-a", "lab-b"]
        for _ in range(4):
            kill_it = partial(kill_all_of_the_primary, made, homes[0])
            asyncio.run(told_of_disk(made, guest, kill_it))
            eventually(lambda: is_only_on(made, homes[1]), 10, f"one guest, on {homes[1]}")
            made.ok("replicate", "stop", "guest")
            made.ok("replicate", "start", "guest", homes[0])
            homes.reverse()
