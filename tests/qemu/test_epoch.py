"""Epochs of real guests: what is captured is the guest as of one moment, and it always runs on."""

import asyncio
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest

from tests.qemu.world import World, eventually, image, loaded, qemu, world
from vmckpt.epoch.budget import Budget
from vmckpt.epoch.capture import Capture, StandsStillError, capturing
from vmckpt.epoch.epoch import Epoch, Pages
from vmckpt.epoch.output import HeldOutput
from vmckpt.lab.guests.labguest import LabGuest
from vmckpt.memory.ram_file import PAGE_BYTES, RamFile, mapped
from vmckpt.qemu import commands
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
        async with capturing(vm.qemu.process.pid, ram_file, monitor, output) as capture:
            yield vm, capture
        await output.let_go()


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
        asyncio.run(_same_in_the_end(made, guest))


async def _same_in_the_end(made: World, guest: LabGuest) -> None:
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
        assert [bool(epoch.device_base) for epoch in epochs] == [False] + [True] * 29
        pauses = sorted(epoch.pause.total_s * 1e3 for epoch in epochs)
        print(f"pause ms: median {pauses[15]:.1f}, worst {pauses[-1]:.1f}", epochs[-1].pause)


@pytest.mark.parametrize("version", ["10.0", "7.2"])
def test_devices_are_learned_before_an_epoch_and_not_saved_so_after_a_reset(version: str) -> None:
    with tempfile.TemporaryDirectory(prefix="vk-", dir="/tmp") as directory:
        asyncio.run(_learned(version, Path(directory)))


async def _learned(version: str, directory: Path) -> None:
    path, ram = directory / "qmp.sock", directory / "ram"
    memory = f"memory-backend-file,id=ram0,size=32M,share=on,mem-path={ram}"
    words = ["-nodefaults", "-display", "none", "-accel", "tcg", "-m", "32M", "-object", memory]
    words += ["-machine", "q35,memory-backend=ram0", "-qmp", f"unix:{path},server=on,wait=on"]
    child = await asyncio.create_subprocess_exec(qemu(version), *words)
    try:
        sock = socket.socket(socket.AF_UNIX)

        def is_heard() -> bool:  # the path is there before anybody listens
            return sock.connect_ex(str(path)) == 0

        await asyncio.to_thread(eventually, is_heard, 60, "QEMU listens")
        sock.setblocking(False)
        async with session(sock, "it") as monitor:
            output = HeldOutput(monitor, [])
            async with capturing(child.pid, ram, monitor, output) as capture:
                assert not capture.saves_devices()
                assert await capture.learn_devices() > 0
                assert capture.saves_devices()
                epoch = await capture.epoch(0)
                assert epoch.device_base.startswith(b"QEVM")
                await _one_that_stands_still_is_left_so(capture, monitor)
                with monitor.events("RESET") as resets:
                    await monitor.tell("system_reset")
                    assert await resets.next(60.0)
                assert not capture.saves_devices()
                assert await capture.learn_devices() == 0.0
                epoch = await capture.epoch(1)
                assert (epoch.device_base, epoch.device_state[:4]) == (b"", b"QEVM")
    finally:
        child.kill()
        await child.wait()
