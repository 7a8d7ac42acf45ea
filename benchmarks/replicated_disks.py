"""What a disk adds to the price of protecting a guest.

Run: python -m benchmarks.replicated_disks [--seconds 18]. All in one run, on guests of 256 MiB
under TCG that dirty 20 MB/s of text, at epochs of 25 ms:

- Pauses: without a disk, with an idle one, and with records written to it (2 MB/s, each synced).
- Records a second that a guest writes as fast as it can, each synced: protected, before, after.
- The first copy, and the way back after a hand-over: bytes of the disk that were sent, and those
  that were not, because they were there.
"""

import argparse
import asyncio
import statistics
from typing import Any

from benchmarks.replication import FIGURES, NAME, SETTLE_S, TEXT, told
from benchmarks.setting import await_quiet, machine, write_result
from tests.qemu.world import World, image, qemu, world
from vmckpt.lab.guests.guest import GuestControl
from vmckpt.lab.guests.labguest import LabGuest

PATIENCE_S, DISK = 60.0, "256M"
RECORDS, AS_FAST_AS_IT_CAN = "rate=2M size=64M", "rate=1G"


def main(seconds: float) -> None:
    """Everything, printed and written to results/replicated_disks.json."""
    busy = asyncio.run(await_quiet(10.0, PATIENCE_S))
    found: dict[str, Any] = {"machine": machine(), "others_use_percent": round(busy, 1)}
    for disk in (None, DISK):
        with world(qemu("10.0"), qemu("10.0")) as made:
            found |= asyncio.run(measured(made, disk, seconds))
    for name, value in found.items():
        print(f"{name}: {value}")
    print(f"written: {write_result('replicated_disks', found)}")


async def measured(made: World, disk: str | None, seconds: float) -> dict[str, Any]:
    """All that is measured on a guest with or without a disk."""
    guest = LabGuest(NAME, 1, image(), disk=disk, disk_format="raw")
    await asyncio.to_thread(made.run_guest, guest, "lab-a", own_disk=True)
    control = await guest.control(made.lab)
    await control.load_memory(TEXT)
    if disk is None:
        await do(made, "start", "lab-b")
        found = {"without a disk": await paused(made, seconds)}
    else:
        found = await with_disk(made, control, seconds)
    await do(made, "stop")
    await control.close()
    return found


async def with_disk(made: World, control: GuestControl, seconds: float) -> dict[str, Any]:
    """Pauses, records a second, and copies there and back."""
    await control.load_disk(RECORDS)
    before = await records_per_s(control, seconds / 2)
    await control.stop_disk()
    await do(made, "start", "lab-b")
    found = {"first copy": sent(await told(made)), "idle disk": await paused(made, seconds)}
    await control.load_disk("rate=2M")
    found["written disk"] = await paused(made, seconds)
    protected = await records_per_s(control, seconds)
    await control.stop_disk()
    await do(made, "failover")
    after = await records_per_s(control, seconds / 2)
    await control.stop_disk()
    await do(made, "stop")
    await do(made, "start", "lab-a")
    free = statistics.mean((before, after))
    return found | {
        "records a second": {"before": before, "protected": protected, "after": after},
        "records lost": round(1 - protected / free, 3),
        "way back": sent(await told(made)),
    }


async def do(made: World, word: str, *more: str) -> None:
    """A command of `replicate`."""
    await asyncio.to_thread(made.ok, "replicate", word, NAME, *more)


async def paused(made: World, seconds: float) -> dict[str, Any]:
    """Pauses and the like of some seconds."""
    await asyncio.sleep(max(SETTLE_S, seconds))
    found = await told(made)
    return {key: found[key] for key in FIGURES}


async def records_per_s(control: GuestControl, seconds: float) -> float:
    """How many records it writes, one synced after the other, as fast as it can."""
    await control.load_disk(AS_FAST_AS_IT_CAN)
    loop = asyncio.get_running_loop()
    began, began_s = (await control.stat()).disk_seq, loop.time()
    await asyncio.sleep(seconds)
    return round(((await control.stat()).disk_seq - began) / (loop.time() - began_s), 1)


def sent(status: dict[str, Any]) -> dict[str, int]:
    """Of a disk: bytes that went over, and that were there."""
    not_sent = status["disk_bytes_not_sent"]
    return {"sent": status["disk_bytes"] - not_sent, "not sent": not_sent}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=18.0)
    main(parser.parse_args().seconds)
