"""Whatever breaks about a replicated disk: the guest keeps all that it was told is written."""

import asyncio
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.qemu.test_replicate import is_only_on, services, sides
from tests.qemu.test_replicated_disks import (
    RING,
    copied_bytes,
    guest_with_disk,
    is_on,
    kill,
    kill_all_of_the_primary,
    protected,
    told_of_disk,
)
from tests.qemu.world import World, image, qemu, world
from tests.waiting import eventually
from vmckpt.errors import HostDownError
from vmckpt.lab.guests.labguest import LabGuest
from vmckpt.qemu import commands
from vmckpt.qemu.block import block_job_cancel, query_disk_images, yank_nodes
from vmckpt.qemu.monitor import Monitor, session
from vmckpt.replicate.control import ask
from vmckpt.replicate.disks.mirrors import PREFIX
from vmckpt.replicate.request import ServiceFiles
from vmckpt.replicate.status import ReplicaStatus
from vmckpt.vm.inventory import read_vm

pytestmark = pytest.mark.long


def is_alone(made: World) -> bool:
    return not services(made, "primary")


def test_a_primary_whose_service_alone_dies_is_replaced_with_its_disk() -> None:
    with protected("10.0") as (made, guest):
        asyncio.run(told_of_disk(made, guest, lambda: kill(made, "primary")))
        eventually(lambda: is_only_on(made, "lab-b"), 20, "one guest, on lab-b")


@pytest.mark.parametrize("roles", [("standby",), ("standby", "primary")])
def test_without_its_standby_a_guest_goes_on_with_its_own_disk(roles: tuple[str, ...]) -> None:
    """Nothing of the mirror is left in QEMU, nothing of the copy on the standby."""
    with protected("10.0") as (made, guest):
        asyncio.run(told_of_disk(made, guest, lambda: kill(made, *roles), is_alone))
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


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_standby_that_was_lost_keeps_its_copy_for_the_next_one(how: signal.Signals) -> None:
    with protected("10.0") as (made, guest):
        lost = services(made, "standby")

        def lose() -> None:
            for pid in lost:
                os.kill(pid, how)

        asyncio.run(told_of_disk(made, guest, lose, is_alone))
        if how is signal.SIGSTOP:
            for pid in lost:
                os.kill(pid, signal.SIGCONT)
        eventually(lambda: not services(made, "standby"), 20, "the standby has ended")
        copy = made.state("lab-b") / "images/guest.raw"
        assert copy.exists()
        made.ok("replicate", "start", "guest", "lab-b")
        assert copied_bytes(made) < RING / 2
        kill_it = partial(kill_all_of_the_primary, made, "lab-a")
        asyncio.run(told_of_disk(made, guest, kill_it))
        eventually(lambda: is_only_on(made, "lab-b"), 10, "one guest, on lab-b")


async def cancel_the_mirror(monitor: Monitor) -> None:
    await block_job_cancel(monitor, f"{PREFIX}0", force=True)


async def cut_the_mirrors_connection(monitor: Monitor) -> None:
    await yank_nodes(monitor, PREFIX)


@pytest.mark.parametrize("version", ["10.0", "7.2"])
@pytest.mark.parametrize("harm", [cancel_the_mirror, cut_the_mirrors_connection])
def test_a_mirror_that_ends_ends_the_protection_and_nothing_else(
    version: str, harm: Callable[[Monitor], Awaitable[None]]
) -> None:
    with protected(version) as (made, guest):

        async def do() -> None:
            vm = await read_vm(made.asked("lab-a"), "guest")
            assert vm is not None
            control = await guest.control(made.lab)
            if harm is cancel_the_mirror:  # under a write QEMU itself may die of it
                await control.stop_disk()
            async with session(await vm.host.connect(vm.qemu.files.onlooker), "guest") as monitor:
                await harm(monitor)
            await control.load_disk("rate=500K")
            await control.close()

        asyncio.run(told_of_disk(made, guest, lambda: asyncio.run(do()), is_alone))
        told = sides(made)["primary"]
        assert told["ending"] == "alone"
        assert "a disk is no longer mirrored" in told["why"]
        asyncio.run(_has_no_mirrors(made))
        made.ok("replicate", "start", "guest", "lab-b")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["raw", "qcow2"])
@pytest.mark.parametrize("role", ["standby", "primary"])
def test_a_service_is_killed_in_the_middle_of_the_first_copy(role: str, kind: str) -> None:
    """The guest goes on where it is, of the copy nothing is left, the next beginning succeeds."""
    with guest_with_disk("10.0", kind, size="320M", ring="200M") as (made, guest):
        code = 0

        def kill_in_it() -> None:
            nonlocal code
            begun = made.begin("replicate", "start", "guest", "lab-b")
            eventually(lambda: copies_some(made), 60, "the disk is being copied")
            kill(made, role)
            out, err = begun.communicate(timeout=90)
            code = begun.returncode
            assert "Traceback" not in err, err
            print(out)

        asyncio.run(told_of_disk(made, guest, kill_in_it, is_on("lab-a")))
        assert code in (6, 7)
        asyncio.run(_has_no_mirrors(made))
        assert not (made.state("lab-b") / f"images/guest.{kind}").exists()
        assert made.vmckpt("replicate", "status", "guest").code == 3
        made.ok("replicate", "start", "guest", "lab-b")


def copies_some(made: World) -> bool:
    """Whether the first copy is under way, and far from its end."""

    async def asked() -> ReplicaStatus:
        host = made.asked("lab-a")
        return await ask(host, ServiceFiles.of(host, "guest"), "status")

    try:
        told = asyncio.run(asked())
    except (HostDownError, OSError):
        return False
    assert told.state == "copying"
    return (told.disk_bytes or 0) > 16 << 20


@contextmanager
def with_small_images(host: str, room: str) -> Iterator[tuple[World, LabGuest, Path]]:
    """A guest with a disk of 64 MiB, most of it never written; little room for it on one host."""
    guest = LabGuest("guest", 1, image(), memory="160M", disk="64M", disk_format="raw")
    with world(qemu("10.0"), qemu("10.0")) as made:
        images = made.state(host) / "images"
        images.mkdir()
        words = ["mount", "-t", "tmpfs", "-o", f"size={room}", "none", str(images)]
        subprocess.run(words, check=True)
        try:
            made.run_guest(guest, "lab-a", own_disk=True)
            asyncio.run(_write(made, guest, "rate=200K size=2M"))
            made.ok("replicate", "start", "guest", "lab-b")
            yield made, guest, images
        finally:
            made.vmckpt("replicate", "stop", "guest")
            made.vmckpt("vm", "stop", "guest", "--force")
            subprocess.run(["umount", "-l", images], check=True)


async def _write(made: World, guest: LabGuest, words: str) -> None:
    control = await guest.control(made.lab)
    await control.load_disk(words)
    await control.close()


MORE = "rate=4M size=40M"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_standby_whose_disk_is_full_says_so_and_the_guest_goes_on() -> None:
    with with_small_images("lab-b", "6M") as (made, guest, images):
        fill = partial(_write, made, guest, MORE)
        asyncio.run(told_of_disk(made, guest, lambda: asyncio.run(fill()), is_alone))
        told = sides(made)
        assert told["primary"]["ending"] == "alone"
        assert "has no room for" in told["primary"]["why"]
        made.ok("replicate", "stop", "guest")
        assert list(images.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_primary_whose_disk_is_full_says_so_and_its_guest_goes_on_elsewhere() -> None:
    """QEMU stops a guest that has no room: the standby has, and goes on from the last epoch."""
    with with_small_images("lab-a", "20M") as (made, guest, _):
        asyncio.run(_write(made, guest, MORE))
        full = lambda: "'io-error'" in sides(made)["primary"]["why"]  # noqa: E731
        eventually(full, 60, "the disk is full")
        assert sides(made)["primary"]["state"] == "protected"
        made.ok("replicate", "failover", "guest")
        eventually(lambda: is_only_on(made, "lab-b"), 20, "one guest, on lab-b")
        asyncio.run(_goes_on_writing(made, guest))


async def _goes_on_writing(made: World, guest: LabGuest) -> None:
    control = await guest.control(made.lab)
    before = (await control.stat()).disk_seq
    more = before + 6000  # than the other had room for
    while (await control.stat()).disk_seq < more:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    checked = await control.verify_disk()
    assert checked.sound, checked
    await control.close()
