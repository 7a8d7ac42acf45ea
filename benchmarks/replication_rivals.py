"""What a stock QEMU offers instead of an epoch: stop, save all of it, continue. Pauses of each."""

import asyncio
import os
import statistics
import time
from collections.abc import Mapping
from typing import Any

from tests.qemu.world import World, image
from vmckpt.lab.guests.labguest import LabGuest
from vmckpt.qemu import commands
from vmckpt.qemu.monitor import CommandRefusedError, Monitor, session
from vmckpt.vm.inventory import Vm, read_vm

ROUNDS, REST_S, TIMEOUT_S = 5, 1.0, 60.0
SAVED_LOAD = "rate=20M set=64M pattern=uniform content=text touch=line"


async def saved_to_files(made: World, host: str, name: str) -> dict[str, Any]:
    """A full save by `migrate` to a file in memory, plain and mapped-ram."""
    vm = await _vm(made, host, name)
    async with session(await vm.host.connect(vm.qemu.files.operator), name) as monitor:
        plain = await _rounds(monitor, {"mapped-ram": False})
        mapped = await _rounds(monitor, {"mapped-ram": True})
        await commands.migrate_set_capabilities(monitor, {"mapped-ram": False})
    return {"to a file": plain, "to a file, mapped-ram": mapped}


async def saved_by_savevm(made: World) -> dict[str, Any]:
    """QEMU's own snapshots of a guest with a disk; the guest is stopped by QEMU meanwhile."""
    guest = LabGuest("saved", 2, image(), disk="512M")
    await asyncio.to_thread(made.run_guest, guest, "lab-a")
    control = await guest.control(made.lab)
    await control.load_memory(SAVED_LOAD)
    vm, pauses_ms = await _vm(made, "lab-a", "saved"), []
    async with session(await vm.host.connect(vm.qemu.files.onlooker), "saved") as monitor:
        for number in range(ROUNDS):
            with monitor.events("STOP", "RESUME") as events:
                await asyncio.to_thread(made.ok, "snapshot", "save", "saved", f"s{number}")
                stopped, resumed = [_time_s(event) for event in events.drain()][:2]
            pauses_ms.append((resumed - stopped) * 1e3)
            await asyncio.sleep(REST_S)
    await control.close()
    return _figures(pauses_ms)


async def _rounds(monitor: Monitor, capabilities: Mapping[str, bool]) -> dict[str, Any]:
    settings = {"x-ignore-shared": False, "events": True, "return-path": False, **capabilities}
    await commands.migrate_set_capabilities(monitor, settings)
    await commands.migrate_set_parameters(
        monitor, {"max-bandwidth": 1 << 40, "downtime-limit": 2_000_000}
    )
    path = f"/dev/shm/vk-rival-{os.getpid()}"
    pauses_ms = []
    try:
        for _ in range(ROUNDS):
            await asyncio.sleep(REST_S)
            with monitor.events("MIGRATION") as events:
                began_s = time.perf_counter()
                await commands.stop(monitor)
                await commands.migrate(monitor, f"file:{path}")
                while event := await events.next(TIMEOUT_S):
                    data: Any = event["data"]
                    if data["status"] == "completed":
                        break
                    if data["status"] == "failed":
                        raise SystemExit((await commands.query_migrate(monitor)).error)
                await _continued(monitor)
            pauses_ms.append((time.perf_counter() - began_s) * 1e3)
    finally:
        if os.path.exists(path):  # noqa: PTH110
            os.unlink(path)  # noqa: PTH108
    return _figures(pauses_ms)


async def _continued(monitor: Monitor) -> None:
    while True:
        try:
            return await commands.cont(monitor)
        except CommandRefusedError:  # for a moment after the end
            await asyncio.sleep(0.0005)


def _figures(pauses_ms: list[float]) -> dict[str, Any]:
    return {"pause_p50_ms": statistics.median(pauses_ms), "pauses_ms": pauses_ms}


def _time_s(event: Mapping[str, Any]) -> float:
    stamp = event["timestamp"]
    return float(stamp["seconds"] + stamp["microseconds"] / 1e6)


async def _vm(made: World, host: str, name: str) -> Vm:
    vm = await read_vm(made.asked(host), name)
    if vm is None:
        raise SystemExit(f"'{name}' is not on {host}")
    return vm
