"""QMP commands that save the state of devices alone; conventions as in `commands`."""

from vmckpt.qemu.monitor import Monitor
from vmckpt.qemu.shapes import HumanText


async def save_devices(monitor: Monitor, path: str) -> None:
    """Write the state of all devices, without RAM, to a file; a running VM continues.

    This QEMU keeps the disks.
    """
    await monitor.tell("xen-save-devices-state", {"filename": path, "live": False})


async def remove_fd(monitor: Monitor, fdset: int) -> None:
    """Have QEMU close the descriptors of a set."""
    await monitor.tell("remove-fd", {"fdset-id": fdset})


async def query_ram_blocks(monitor: Monitor) -> list[str]:
    """The names of all RAM blocks, including ROMs."""
    reply = await monitor.ask("x-query-ramblock", HumanText)
    rows = [line.split() for line in reply["human-readable-text"].splitlines()]
    # Below a heading: the name, and its page size in text form ("4 KiB").
    return [row[0] for row in rows if len(row) > 2 and row[2].endswith("iB")]
