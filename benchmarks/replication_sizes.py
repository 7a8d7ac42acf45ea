"""Whether a guest is paused for longer the more memory it has: pauses by size, one dirty rate.

Run: python -m benchmarks.replication_sizes [--seconds 20] [--sizes 256M 1G 6G]. Each guest dirties
20 MB/s of text under TCG and is protected in the lab at 25 ms epochs, one after the other; pauses
are those that `replicate status` tells of the last 512 epochs. The lab takes twice the memory.
"""

import argparse
import asyncio
from collections.abc import Sequence
from typing import Any

from benchmarks.replication import FIGURES, NAME, PATIENCE_S, TEXT, told
from benchmarks.setting import await_quiet, machine, write_result
from benchmarks.summary import Verdict, verdicts_as_json
from tests.qemu.world import World, image, qemu, world
from vmckpt.lab.guests.labguest import LabGuest


def main(seconds: float, sizes: Sequence[str]) -> None:
    """Printed and written to results/replication_sizes.json."""
    busy = asyncio.run(await_quiet(10.0, PATIENCE_S))
    found: dict[str, Any] = {"machine": machine(), "others_use_percent": round(busy, 1)}
    found["sizes"] = {}
    for size in sizes:
        with world(qemu("10.0"), qemu("10.0")) as made:
            found["sizes"][size] = asyncio.run(pauses(made, size, seconds))
        print(f"{size}: {found['sizes'][size]}", flush=True)
    first, last = (found["sizes"][size]["pause_p50_ms"] for size in (sizes[0], sizes[-1]))
    promise = f"pause of a guest of {sizes[-1]}, times as long as of {sizes[0]}"
    found["verdicts"] = verdicts_as_json([Verdict(promise, last / first, 2)])
    print(f"written: {write_result('replication_sizes', found)}: {last / first:.2f} times")


async def pauses(made: World, size: str, seconds: float) -> dict[str, Any]:
    """What the primary tells after `seconds` of protection."""
    guest = LabGuest(NAME, 1, image(), memory=size, disk=None)
    await asyncio.to_thread(made.run_guest, guest, "lab-a")
    control = await guest.control(made.lab)
    await control.load_memory(TEXT)
    await asyncio.to_thread(made.ok, "replicate", "start", NAME, "lab-b")
    await asyncio.sleep(seconds)
    found = await told(made)
    await asyncio.to_thread(made.ok, "replicate", "stop", NAME)
    await control.close()
    return {key: found[key] for key in FIGURES}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--sizes", nargs="+", default=["256M", "1G", "6G"])
    given = parser.parse_args()
    main(given.seconds, given.sizes)
