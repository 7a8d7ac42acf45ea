"""The contents of a running QEMU: drives, devices and their settings, back ends."""

import re
from typing import Any, NamedTuple

from vmckpt.qemu import commands, shapes
from vmckpt.qemu.monitor import CommandRefusedError, Monitor

# Set by QEMU itself, or meaningless on another host.
_NOT_SETTINGS = frozenset({"busnr", "hotplugged", "parent_bus", "failover_pair_id"})
# The port of a hub precedes what is plugged into it.
_NETWORK = re.compile(
    r"^(?:\s*\\ )?(?:hub\d+port\d+: )?(?P<id>\S+): index=\d+,type=(?P<words>\S+)", re.MULTILINE
)


class GuestDrive(NamedTuple):
    """A guest's drive. `device` is its -drive's id, `owner` the id of the device.

    `node` is the top block node, `driver` its format, `file` the image, "" if there is none.
    """

    device: str
    owner: str
    node: str
    driver: str
    file: str
    read_only: bool
    direct: bool


async def query_drives(monitor: Monitor) -> tuple[GuestDrive, ...]:
    """Every drive of the guest, empty ones included."""
    return tuple(_drive(item) for item in await monitor.ask("query-block", list[shapes.BlockInfo]))


def _drive(item: shapes.BlockInfo) -> GuestDrive:
    inserted: shapes.Inserted = item.get("inserted", {})
    cache: shapes.Cache = inserted.get("cache", {})
    path = item.get("qdev", "")
    # Before 8.0 QEMU names a device by its id, later by its path.
    owner = path.removeprefix("/machine/peripheral/").partition("/")[0]
    return GuestDrive(
        device=item["device"],
        owner="" if path.startswith("/machine/unattached") else owner,
        node=inserted.get("node-name", ""),
        driver=inserted.get("drv", ""),
        file=inserted.get("file", ""),
        read_only=inserted.get("ro", False),
        direct=cache.get("direct", False),
    )


async def query_chardev_labels(monitor: Monitor) -> frozenset[str]:
    """The names of all character devices."""
    found = await monitor.ask("query-chardev", list[shapes.ChardevInfo])
    return frozenset(item["label"] for item in found)


async def query_memory_bytes(monitor: Monitor) -> int:
    """The guest's memory, with its memory modules (DIMMs)."""
    found = await monitor.ask("query-memory-size-summary", shapes.MemorySize)
    return found["base-memory"] + found.get("plugged-memory", 0)


async def query_back_ends(monitor: Monitor) -> dict[str, int]:
    """The ids of all memory back ends, and their sizes in bytes.

    The guest's RAM is among them; back ends that no device uses, or that are no RAM, may be, too.
    """
    found = await monitor.ask("query-memdev", list[shapes.MemoryBackEnd])
    return {one["id"]: one["size"] for one in found if "id" in one}


class MemoryModule(NamedTuple):
    """Where a DIMM is: its address in the guest's memory, and its slot."""

    address: int
    slot: int


async def query_memory_modules(monitor: Monitor) -> dict[str, MemoryModule]:
    """The DIMMs that have an id, by id."""
    found = await monitor.ask("query-memory-devices", list[shapes.MemoryDevice])
    return {
        one["data"]["id"]: MemoryModule(one["data"]["addr"], one["data"]["slot"])
        for one in found
        if one["type"] == "dimm" and one["data"].keys() >= {"id", "addr", "slot"}
    }


async def query_ram_id(monitor: Monitor, machine: str) -> str | None:
    """The name of the machine type's main memory; None: it has none."""
    machines = await monitor.ask("query-machines", list[shapes.MachineInfo])
    return next((item.get("default-ram-id") for item in machines if item["name"] == machine), None)


async def query_architecture(monitor: Monitor) -> str:
    """The architecture of the guest's processors, such as "x86_64"."""
    return (await monitor.ask("query-target", shapes.TargetInfo))["arch"]


async def query_networks(monitor: Monitor) -> dict[str, str]:
    """QEMU's description of each network back end, by id; there is no other query for them."""
    text = await monitor.ask("human-monitor-command", str, {"command-line": "info network"})
    return {found["id"]: found["words"] for found in _NETWORK.finditer(text)}


async def device_settings(monitor: Monitor, name: str, driver: str) -> dict[str, Any]:
    """The `-device` properties that recreate the device `name` at the same address.

    Without a `bus` only its type is known: a processor, or memory.
    """
    path = f"/machine/peripheral/{name}"
    settings: dict[str, Any] = {"driver": driver, "id": name}
    try:
        bus = await commands.qom_get(monitor, path, "parent_bus", str)
    except CommandRefusedError:
        return settings  # a processor, or memory: on no bus
    settings["bus"] = bus.rpartition("/")[2]
    where = {"typename": driver}
    for item in await monitor.ask("device-list-properties", list[shapes.Property], where):
        key, kind = item["name"], item["type"]
        if key in _NOT_SETTINGS or kind.startswith(("child<", "link<")) or key.startswith("x-"):
            continue
        try:
            value = await commands.qom_get(monitor, path, key, object)
        except CommandRefusedError:
            continue  # write-only
        if key == "addr":
            value = _slot(value)
        unset = value in ("", None, []) or (key == "bootindex" and value == -1)
        if not unset and value != item.get("default-value"):
            settings[key] = value
    return settings


async def query_slot(monitor: Monitor, name: str) -> str | None:
    """The PCI address of a device on its bus; None if it has none."""
    try:
        path = f"/machine/peripheral/{name}"
        return _slot(await commands.qom_get(monitor, path, "addr", object))
    except CommandRefusedError:
        return None


def _slot(value: object) -> str:
    if isinstance(value, int):
        return f"{value >> 3:x}.{value & 7}"
    return str(value)
