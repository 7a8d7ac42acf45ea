"""Plugging devices into a running QEMU and unplugging them, with or without the guest's help."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from vmckpt.errors import HostDownError, OperationFailedError, OutcomeUnknownError, TimedOutError
from vmckpt.qemu import commands
from vmckpt.qemu.monitor import CommandRefusedError, Monitor

# An event may be lost with a connection, so the device list is polled too.
POLL_S = 0.5
# A card maps all of the guest's memory before QEMU answers: about a minute for 1 TiB.
ADD_TIMEOUT_S = 120.0
# QEMU's message for a device whose removal was already requested from the guest.
_ALREADY_REQUESTED = "in the process of unplug"


class UnplugRefusedError(OperationFailedError):
    """QEMU or the guest refuses to release the device; it remains plugged."""


async def plugged(monitor: Monitor) -> frozenset[str]:
    """The ids of all devices, including those that the guest is about to release."""
    return frozenset(await commands.qom_children(monitor, "/machine/peripheral"))


async def device_add(monitor: Monitor, options: Mapping[str, Any]) -> None:
    """Plug a device in; the guest detects it later. Raises as `Monitor.tell` does."""
    await monitor.tell("device_add", options, timeout_s=ADD_TIMEOUT_S)


async def unplug(monitor: Monitor, ids: Sequence[str], timeout_s: float) -> None:
    """Return when all of `ids`, the functions of one card, are gone; the first is function 0.

    QEMU's reply alone means nothing: the guest has to release the device, and QEMU reports when it
    has (DEVICE_DELETED). Devices already gone are not an error. Raises UnplugRefusedError,
    TimedOutError (the guest has not answered, and may still release it), OutcomeUnknownError.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    with monitor.events("DEVICE_DELETED", "DEVICE_UNPLUG_GUEST_ERROR") as events:
        here = await _left(monitor, ids)
        if here:
            await _ask(monitor, here[0])
        while here:
            if loop.time() > deadline:
                raise TimedOutError(
                    f"the guest does not release '{ids[0]}'",
                    why=f"{', '.join(here)} is still there after {timeout_s:g} s",
                    remedy="see the guest's kernel log: something in it uses the device",
                )
            event = await events.next(min(POLL_S, timeout_s))
            if event and _guest_refuses(event, ids):
                raise _refused(ids[0], "the guest has said that it cannot")
            here = await _left(monitor, ids)


def _guest_refuses(event: Mapping[str, Any], ids: Sequence[str]) -> bool:
    return event["event"] == "DEVICE_UNPLUG_GUEST_ERROR" and event["data"].get("device") in ids


async def _left(monitor: Monitor, ids: Sequence[str]) -> list[str]:
    there = await plugged(monitor)
    return [name for name in ids if name in there]


async def _ask(monitor: Monitor, name: str) -> None:
    try:
        await monitor.tell("device_del", {"id": name})
    except CommandRefusedError as exc:
        if _ALREADY_REQUESTED not in exc.description:
            raise _refused(name, exc.description) from exc


def _refused(name: str, why: str) -> UnplugRefusedError:
    return UnplugRefusedError(
        f"'{name}' cannot be unplugged", why=why, remedy="see the guest's kernel log"
    )


async def take_back(monitor: Monitor, ids: Sequence[str]) -> None:
    """Unplug functions that the guest has never seen: function 0 was not plugged. Never raises."""
    for name in ids:
        try:
            await monitor.tell("device_del", {"id": name})
        except (CommandRefusedError, HostDownError, OutcomeUnknownError):
            continue  # it was never plugged, or goes with its QEMU
