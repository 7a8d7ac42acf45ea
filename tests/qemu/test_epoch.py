"""Epochs of real guests: what is captured is the guest as of one moment, and it always runs on."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest

from tests.qemu.world import World, image, loaded, qemu, world
from tests.waiting import eventually
from vmckpt.epoch.budget import Budget
from vmckpt.epoch.capture import Capture, StandsStillError, capturing
from vmckpt.epoch.epoch import Epoch, Pages
from vmckpt.epoch.head import others
from vmckpt.epoch.load import SETTINGS, load_devices
from vmckpt.epoch.output import HeldOutput
from vmckpt.lab.guests.labguest import LabGuest
from vmckpt.memory.private.guest_ram import GuestRam
from vmckpt.memory.private.other_blocks import OtherBlocks
from vmckpt.memory.ram_file import PAGE_BYTES, RamFile, mapped
from vmckpt.qemu import commands
from vmckpt.qemu.device_state import query_ram_blocks
from vmckpt.qemu.monitor import CommandRefusedError, Monitor, session
from vmckpt.vm.inventory import Vm, read_vm

SECOND_NIC = '\n[[nics]]\nnetwork = "user"\n'


async def _one_that_stands_still_is_left_so(capture: Capture, monitor: Monitor) -> None:
    """Also when that is asked in one go with the stop; a command that is refused lets it run on."""
    said: list[str] = []
    refused = lambda: [commands.object_del(monitor, "nothing")]  # noqa: E731
    with pytest.raises(CommandRefusedError):
        await capture.epoch(0, before=refused, at_stop=lambda: said.append("stopped"))
    assert (await commands.query_status(monitor)).running
    await capture.epoch(0, before=list, at_stop=lambda: said.append("ran"))
    await commands.stop(monitor)
    with pytest.raises(StandsStillError):
        await capture.epoch(0, before=list, at_stop=lambda: said.append("stopped"))
    assert (await commands.query_status(monitor)).status == "paused"
    await commands.cont(monitor)
    assert said == ["ran"]


@contextmanager
def replica_of(vm: Vm) -> Iterator[RamFile]:
    with NamedTemporaryFile(dir="/dev/shm", prefix="vk-replica-") as file:
        file.truncate(vm.spec.memory_bytes)
        with mapped(Path(file.name)) as ram:
            yield ram


@asynccontextmanager
async def captured(made: World, host: str, name: str) -> AsyncIterator[tuple[Vm, Capture]]:
    vm = await read_vm(made.asked(host), name)
    assert vm is not None
    ram_file = vm.qemu.files.ram(vm.spec.ram_dir)
    async with session(await vm.host.connect(vm.qemu.files.operator), name) as monitor:
        output = HeldOutput(monitor, [f"net{number}" for number in range(len(vm.spec.nics))])
        await output.hold()
        async with capturing(vm.qemu.process.pid, GuestRam(ram_file), monitor, output) as capture:
            yield vm, capture
        await output.release_all()


async def take_epoch(capture: Capture, ram: RamFile, number: int, budget: Budget) -> Epoch:
    while budget.wants_pass(capture.dirty_pages()):
        spans, _ = await capture.early()
        (pages,) = capture.copies(spans, 1 << 30)
        ram.write(pages.spans, pages.data)
    epoch = await capture.epoch(number)
    ram.write(epoch.pages.spans, epoch.pages.data)
    budget.paused(epoch.pages.count, epoch.pause.total_s, epoch.pause.copy_s)
    await capture.release()
    return epoch


@pytest.mark.parametrize("version", ["10.0", pytest.param("7.2", marks=pytest.mark.long)])
def test_the_replica_is_the_guest(version: str) -> None:
    """Two vCPUs, two NICs, a disk read and written by DMA while pages are being protected."""
    guest = LabGuest("guest", 1, image(), memory="192M", vcpus=2)
    with world(qemu(version)) as made:
        made.run_guest(guest, "lab-a", more=SECOND_NIC)
        asyncio.run(_same_in_the_end(made, guest, has_to_learn=version == "7.2"))


async def _same_in_the_end(made: World, guest: LabGuest, *, has_to_learn: bool) -> None:
    async with loaded(made, guest) as control:
        reading = asyncio.ensure_future(control.verify_disk())
        async with captured(made, "lab-a", "guest") as (vm, capture):
            with replica_of(vm) as ram:

                async def take(pages: Pages) -> None:
                    ram.write(pages.spans, pages.data)

                await capture.everything(take, 1 << 20)
                budget, epochs = Budget(0.010), []
                for number in range(30):
                    epochs.append(await take_epoch(capture, ram, number, budget))
                    await asyncio.sleep(0.02)
                last = await capture.epoch(30, resume_guest=False)
                ram.write(last.pages.spans, last.pages.data)
                source = vm.qemu.files.ram(vm.spec.ram_dir).read_bytes()
                differing = [
                    number
                    for number in range(0, len(source), PAGE_BYTES)
                    if source[number : number + PAGE_BYTES]
                    != ram.copy([(number, number + PAGE_BYTES)])
                ]
                assert differing == []
                await capture.resume()
        assert (await reading).sound
        assert all(epoch.pages.count for epoch in epochs)
        states = [epoch.device_base + epoch.device_state for epoch in epochs]
        assert all(state.startswith(b"QEVM") for state in states)
        assert [bool(epoch.device_base) for epoch in epochs] == [not has_to_learn] + [True] * 29
        pauses = sorted(epoch.pause.total_s * 1e3 for epoch in epochs)
        print(f"pause ms: median {pauses[15]:.1f}, worst {pauses[-1]:.1f}", epochs[-1].pause)


@asynccontextmanager
async def machine(
    version: str, directory: Path, *more: str
) -> AsyncIterator[tuple[int, Path, Monitor]]:
    """A machine that boots into nothing: its pid, its RAM file, its monitor."""
    path, ram = directory / f"{len(more)}.sock", directory / "ram"
    memory = f"memory-backend-file,id=ram0,size=32M,share=on,mem-path={ram}"
    words = ["-nodefaults", "-display", "none", "-accel", "tcg", "-m", "32M", "-object", memory]
    words += ["-machine", "q35,memory-backend=ram0", "-qmp", f"unix:{path},server=on,wait=on"]
    child = await asyncio.create_subprocess_exec(qemu(version), *words, *more)
    try:
        sock = socket.socket(socket.AF_UNIX)

        def is_heard() -> bool:  # the path is there before anybody listens
            return sock.connect_ex(str(path)) == 0

        await asyncio.to_thread(eventually, is_heard, 60, "QEMU listens")
        sock.setblocking(False)
        async with session(sock, "it") as monitor:
            yield child.pid, ram, monitor
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


def test_devices_are_learned_before_an_epoch_and_not_saved_so_after_a_reset(
    tmp_path: Path,
) -> None:
    """With a QEMU that does not say where its RAM is."""
    asyncio.run(_learned(tmp_path))


async def _learned(directory: Path) -> None:
    async with (
        machine("7.2", directory) as (pid, ram, monitor),
        capturing(pid, GuestRam(ram), monitor, HeldOutput(monitor, [])) as capture,
    ):
        assert not capture.saves_devices()
        assert await capture.learn_devices() > 0
        assert capture.saves_devices()
        epoch = await capture.epoch(0)
        assert epoch.device_base.startswith(b"QEVM")
        await _one_that_stands_still_is_left_so(capture, monitor)
        await _reset(monitor)
        assert not capture.saves_devices()
        assert await capture.learn_devices() == 0.0
        epoch = await capture.epoch(1)
        assert (epoch.device_base, epoch.device_state[:4]) == (b"", b"QEVM")


CARD = ("-device", "VGA,id=card")


def test_a_screen_is_part_of_an_epoch_without_migrating_devices(tmp_path: Path) -> None:
    """Also right after a reset: what is written in a card's memory and in ROMs is seen."""
    asyncio.run(_with_a_screen(tmp_path))


async def _with_a_screen(directory: Path) -> None:
    async with machine("10.0", directory, *CARD) as (pid, ram, monitor):
        async with capturing(pid, GuestRam(ram), monitor, HeldOutput(monitor, [])) as capture:
            assert capture.saves_devices()
            assert await capture.learn_devices() == 0.0
            await capture.everything(_nothing, 1 << 20)
            before = await _drawn(capture)
            await _one_that_stands_still_is_left_so(capture, monitor)
            await _reset(monitor)
            cleared = await capture.epoch(1)
            assert cleared.device_base != before.device_base
            await _drawn(capture)
            last = await capture.epoch(2, resume_guest=False)
            theirs = await _other_memory(pid, monitor)
            assert any(theirs["0000:00:01.0/vga.vram"])
        await monitor.tell("quit")
    async with machine("10.0", directory, *CARD, "-incoming", "defer") as (pid, _, monitor):
        await commands.migrate_set_capabilities(monitor, SETTINGS)
        assert await _other_memory(pid, monitor) != theirs
        await load_devices(monitor, last.device_base + last.device_state)
        assert await _other_memory(pid, monitor) == theirs


async def _drawn(capture: Capture) -> Epoch:
    """An epoch when the firmware has written its text: the screen no longer changes."""
    async with asyncio.timeout(60):
        before = await capture.epoch(0)
        while True:
            await asyncio.sleep(1.0)
            now = await capture.epoch(0)
            if now.device_base is before.device_base:
                return now
            before = now


async def _nothing(pages: Pages) -> None:
    pass


async def _reset(monitor: Monitor) -> None:
    with monitor.events("RESET") as resets:
        await monitor.tell("system_reset")
        assert await resets.next(60.0)


async def _other_memory(pid: int, monitor: Monitor) -> dict[str, bytes]:
    blocks = others(await query_ram_blocks(monitor), ("ram0",))
    found = {}
    for block in blocks:
        assert block.address is not None
        end = block.address + block.used_bytes
        memory = OtherBlocks(pid, [(block.address, end)], 0)
        found[block.name] = memory.copy([(0, block.used_bytes)])
    return found
