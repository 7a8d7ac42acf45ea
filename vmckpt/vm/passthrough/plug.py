"""Plug and unplug a QEMU's passthrough devices, with all their functions."""

import json
import os
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from types import MappingProxyType
from typing import Any

from vmckpt.deadlines import retry
from vmckpt.errors import BusyError, OperationFailedError, RefusedError
from vmckpt.hosts.host import Host
from vmckpt.hosts.lock import Owner
from vmckpt.qemu import hotplug
from vmckpt.qemu.monitor import CommandRefusedError, Monitor
from vmckpt.sequence.steps import finish
from vmckpt.vm.passthrough.cards import Card, choose, read_given, taken_on
from vmckpt.vm.passthrough.passthrough import MDEV, Passthrough
from vmckpt.vm.paths import QemuDir, card_lock_path

LOCK_POLL_S, LOCK_WAIT_S = 0.05, 10.0
NOTHING: Mapping[str, Card] = MappingProxyType({})


async def reserve(
    host: Host,
    files: QemuDir,
    devices: Iterable[Passthrough],
    ours: Mapping[str, Card] = NOTHING,
) -> None:
    """Reserve cards on a host for the devices of a QEMU.

    The reservation lasts as long as the QEMU's directory exists. `ours`: the guest's cards on its
    current host, by device id. Raises RefusedError if the host has no free equivalent.
    """
    wanted = [device for device in devices if device.match]
    if not wanted:
        return
    async with _alone(host):
        given, taken = await read_given(host, files), await taken_on(host, files)
        for device in wanted:
            if device.id in given:
                continue
            card, why = await choose(host, device, taken, ours.get(device.id))
            if card is None:
                raise RefusedError(
                    f"{host.name} has nothing to plug in as '{device.id}'",
                    why=why,
                    remedy="bind a free one to vfio-pci there, or choose another host",
                )
            given[device.id] = list(card.addresses)
            taken |= set(card.addresses)
        await host.write_text(files.given, json.dumps(given))


@asynccontextmanager
async def _alone(host: Host) -> AsyncIterator[None]:
    """Lock the host's cards for the block."""
    async with AsyncExitStack() as stack:

        async def lock() -> None:
            owner = Owner("-", "give a device", os.getpid(), time.time())
            await stack.enter_async_context(host.lock(card_lock_path(host.state_dir), owner))

        await retry(lock, BusyError, every_s=LOCK_POLL_S, within_s=LOCK_WAIT_S)
        yield


async def plug(
    host: Host, files: QemuDir, monitor: Monitor, devices: Iterable[Passthrough]
) -> list[str]:
    """Plug in missing devices; returns their ids.

    Each is plugged in completely or not at all. Raises RefusedError, OperationFailedError (QEMU's
    words), OutcomeUnknownError.
    """
    devices = list(devices)
    if not devices:
        return []
    await reserve(host, files, devices)
    given, there = await read_given(host, files), await hotplug.plugged(monitor)
    added = []
    for device in devices:
        if device.id not in there:
            await plug_one(host, monitor, device, given.get(device.id, []))
            added.append(device.id)
    return added


async def plug_one(host: Host, monitor: Monitor, device: Passthrough, addresses: list[str]) -> None:
    """Plug in all functions of one device, or none."""
    # The guest sees the device when function 0 appears, so the others must be there by then.
    options = list(reversed(functions(device, addresses)))
    try:
        for one in options:
            await hotplug.device_add(monitor, one)
    except CommandRefusedError as exc:
        others = [one["id"] for one in options[:-1]]
        await finish(hotplug.take_back(monitor, others))
        raise OperationFailedError(
            f"'{device.id}' cannot be plugged in on {host.name}",
            why=exc.description,
            remedy="fix the reported cause: `vmckpt device list` shows what the host has",
        ) from exc


def functions(device: Passthrough, addresses: list[str]) -> list[dict[str, Any]]:
    """The QEMU device options of each function, number 0 first. Pure."""
    found = []
    for address in addresses or [""]:
        # As on the host, the number identifies a function's purpose; a single one is number 0.
        number = int(address[-1], 16) if len(addresses) > 1 else 0
        one: dict[str, Any] = {
            "driver": device.driver,
            "id": device.function_id(number),
            "bus": device.port,
            "addr": f"0.{number}",
            **device.options,
        }
        if device.match and device.match.startswith(MDEV):
            one["sysfsdev"] = f"/sys/bus/mdev/devices/{address}"
        elif address:
            one["host"] = address
        if device.nic is not None and number == 0:
            one["failover_pair_id"] = f"nic{device.nic}"
        if device.netdev:
            one |= {"netdev": device.netdev, "romfile": ""}
        if len(addresses) > 1 and number == 0:
            one["multifunction"] = True
        found.append(one)
    return found


async def unplug(
    host: Host, files: QemuDir, monitor: Monitor, device: Passthrough, timeout_s: float
) -> None:
    """Unplug a device with all its functions; its card stays reserved.

    Raises as `hotplug.unplug` does.
    """
    addresses = (await read_given(host, files)).get(device.id, [])
    ids = [one["id"] for one in functions(device, addresses)]
    await hotplug.unplug(monitor, ids, timeout_s)
