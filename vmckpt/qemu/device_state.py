"""QMP commands by which the state of devices is saved alone; as those of `commands`."""

from vmckpt.qemu.monitor import Monitor
from vmckpt.qemu.shapes import HumanText


async def save_devices(monitor: Monitor, path: str) -> None:
    """Write the state of all devices, RAM left out, to a file; the VM runs on if it ran.

    The disks stay this QEMU's.
    """
    await monitor.tell("xen-save-devices-state", {"filename": path, "live": False})


async def remove_fd(monitor: Monitor, fdset: int) -> None:
    """Have QEMU close the descriptors of a set."""
    await monitor.tell("remove-fd", {"fdset-id": fdset})


async def query_ram_blocks(monitor: Monitor) -> list[str]:
    """The names of all blocks of RAM, ROMs among them."""
    reply = await monitor.ask("x-query-ramblock", HumanText)
    rows = [line.split() for line in reply["human-readable-text"].splitlines()]
    # Below a head: the name, and the size of its pages in words ("4 KiB").
    return [row[0] for row in rows if len(row) > 2 and row[2].endswith("iB")]
