"""How the devices of a VM are saved, by what its QEMU says of its memory and of resets."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.scripted_qmp import Server, play
from tests.unit.test_device_state import DESCRIPTION, HEAD, devices
from vmckpt.epoch.devices import Devices, devices_of, ram_blocks
from vmckpt.qemu.monitor import Monitor

pytestmark = pytest.mark.contract

BLOCKS = """\
              Block Name    PSize              Offset               Used              Total
                    ram0    4 KiB  0x0000000000000000 0x0000000010000000 0x0000000010000000
                pc.bios     4 KiB  0x0000000010000000 0x0000000000040000 0x0000000000040000
    /rom@etc/acpi/tables    4 KiB  0x0000000010040000 0x0000000000020000 0x0000000000200000
  0000:00:03.0/virtio.rom   4 KiB  0x0000000010240000 0x0000000000040000 0x0000000000040000
"""
CARD = "0000:00:02.0/vga.vram   4 KiB  0x0000000010280000 0x0000000001000000 0x0000000001000000\n"
MIGRATED = HEAD + devices(b"paused") + DESCRIPTION
RESET = {
    "event": "RESET",
    "data": {"guest": True, "reason": "guest-reset"},
    "timestamp": {"seconds": 1, "microseconds": 0},
}


class Qemu:
    """Saves devices into the file that it was given; `asked` are the commands that it heard."""

    def __init__(self, blocks: str) -> None:
        self._blocks, self.asked = blocks, list[str]()

    async def script(self, server: Server) -> None:
        try:
            while True:
                await self._answer(server, await server.command())
        except EOFError:
            return

    async def _answer(self, server: Server, command: dict[str, Any]) -> None:
        self.asked.append(command["execute"])
        match command["execute"]:
            case "x-query-ramblock":
                await server.answer(command, {"human-readable-text": self._blocks})
            case "add-fd":
                await server.answer(command, {"fdset-id": 7, "fd": 20})
            case "xen-save-devices-state":
                assert command["arguments"] == {"filename": "/dev/fdset/7", "live": False}
                os.write(self.file, b"QEVM\0\0\0\3" + devices(b"running"))
                await server.answer(command, {})
            case "system_reset":
                await server.send(RESET)
                await server.answer(command, {})
            case _:
                await server.answer(command, {})

    file = -1

    def gave(self, saved_by: Devices) -> None:
        """It has the file now, as a QEMU on this machine would."""
        self.file = saved_by._writer


@asynccontextmanager
async def learning(monitor: Monitor) -> AsyncIterator[Devices]:
    """As for a QEMU that does not say where its RAM is."""
    async with devices_of(monitor, await ram_blocks(monitor), ("ram0",), None) as saved:
        yield saved


async def learn(saved: Devices, migrated: bytes) -> None:
    if saved.can_be_learned():
        await saved.learn(migrated, asyncio.ensure_future(saved.save()))


def test_the_head_is_learned_once_and_forgotten_at_a_reset() -> None:
    qemu = Qemu(BLOCKS)

    async def client(monitor: Monitor) -> None:
        async with learning(monitor) as saved:
            qemu.gave(saved)
            assert not saved.is_known()
            await learn(saved, MIGRATED)
            assert saved.is_known()
            assert await saved.save() == devices(b"running") + DESCRIPTION
            assert await saved.head() == HEAD
            await monitor.tell("system_reset")
            await asyncio.sleep(0)
            assert not saved.is_known()
            await learn(saved, MIGRATED)
            assert not saved.is_known()  # the firmware may be given other tables by now

    play(qemu.script, client)
    assert qemu.asked.count("xen-save-devices-state") == 2
    assert qemu.asked[-1] == "remove-fd"


def test_devices_that_are_others_in_a_migration_are_always_migrated() -> None:
    qemu = Qemu(BLOCKS)

    async def client(monitor: Monitor) -> None:
        async with learning(monitor) as saved:
            qemu.gave(saved)
            for _ in range(2):
                await learn(saved, MIGRATED.replace(b"timer", b"timex"))
                assert not saved.is_known()

    play(qemu.script, client)
    assert qemu.asked.count("xen-save-devices-state") == 1


@pytest.mark.parametrize("blocks", [BLOCKS + CARD, BLOCKS.replace("ram0", "ram1"), ""])
def test_with_other_memory_than_roms_devices_are_always_migrated(blocks: str) -> None:
    qemu = Qemu(blocks)

    async def client(monitor: Monitor) -> None:
        async with learning(monitor) as saved:
            await learn(saved, MIGRATED)
            assert not saved.is_known()

    play(qemu.script, client)
    assert qemu.asked == ["x-query-ramblock"]
