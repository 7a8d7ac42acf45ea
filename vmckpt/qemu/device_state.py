"""QMP commands that save the state of devices alone; conventions as in `commands`."""

import re

from vmckpt.qemu.monitor import Monitor
from vmckpt.qemu.shapes import HumanText
from vmckpt.qemu.stream_head import RamBlock

# A row below the headings: name, page size in words, offset, used and total bytes; in newer QEMUs
# the address in its own memory, and whether the guest may write it.
_ROW = re.compile(
    r"\s*([!-~]{1,255})\s+\d+ [KMG]iB\s+0x[0-9a-f]+ (0x[0-9a-f]{1,16}) (0x[0-9a-f]{1,16})"
    r"(?: (0x[0-9a-f]{1,16})  r[ow])?"
)


async def save_devices(monitor: Monitor, path: str) -> None:
    """Write the state of all devices, without RAM, to a file; a running VM continues.

    This QEMU keeps the disks.
    """
    await monitor.tell("xen-save-devices-state", {"filename": path, "live": False})


async def remove_fd(monitor: Monitor, fdset: int) -> None:
    """Have QEMU close the descriptors of a set."""
    await monitor.tell("remove-fd", {"fdset-id": fdset})


async def query_ram_blocks(monitor: Monitor) -> tuple[RamBlock, ...]:
    """All RAM blocks, including ROMs, in the order in which QEMU migrates them."""
    reply = await monitor.ask("x-query-ramblock", HumanText)
    rows = map(_ROW.fullmatch, reply["human-readable-text"].splitlines())
    return tuple(
        RamBlock(row[1], int(row[2], 16), int(row[3], 16), int(row[4], 16) if row[4] else None)
        for row in rows
        if row
    )


async def query_machine_type(monitor: Monitor) -> str:
    """The versioned name of its machine type, as migration streams have it."""
    reply = await monitor.ask("qom-get", str, {"path": "/machine", "property": "type"})
    return reply.removesuffix("-machine")
