"""What being measured by `vmckpt dirty-rate` costs a guest.

Run: python -m benchmarks.tracker [--rounds 5] [--seconds 4]. A guest of 512 MiB under TCG, with and
without page tracking in turns, at several dirty rates:

- Loads that do nothing but write memory, as fast as they can: how many writes they lose.
- Loads of a given rate: how much more of a processor QEMU needs for the same work.

Writes are counted by the guest, which checks each; processor time is QEMU's in /proc.
"""

import argparse
import asyncio
import statistics
from typing import Any

from benchmarks.setting import await_quiet, machine, processor_s, write_result
from benchmarks.summary import ratio
from benchmarks.tracker_plot import draw
from tests.qemu.world import World, image, qemu, world
from vmckpt.lab.guests.guest import GuestControl
from vmckpt.lab.guests.labguest import LabGuest

NAME, PATIENCE_S = "bench", 60.0
# Before a window: the load, or the tracker, gets going. After it the tracker goes on for a moment.
SETTLE_S, BEYOND_S = 1.0, 1.0
MIB = 1 << 20
FULL = {
    "all it can, in 4 MiB": "rate=8G set=4M pattern=uniform content=random touch=line",
    "all it can, in 32 MiB": "rate=8G set=32M pattern=uniform content=random touch=line",
    "all it can, in 256 MiB": "rate=8G set=256M pattern=uniform content=random touch=line",
}
GIVEN = {
    "20 MB/s": "rate=20M set=128M pattern=uniform content=random touch=line",
    "100 MB/s": "rate=100M set=128M pattern=uniform content=random touch=line",
}


def main(rounds: int, seconds: float) -> None:
    """Everything, printed and written to results/tracker.json."""
    busy = asyncio.run(await_quiet(10.0, PATIENCE_S))
    with world(qemu("10.0")) as made:
        loads = asyncio.run(all_loads(made, rounds, seconds))
    found = {
        "machine": machine(),
        "others_use_percent": round(busy, 1),
        "rounds": rounds,
        "seconds": seconds,
        "loads": loads,
    }
    path = write_result("tracker", found)
    draw(found, path.with_suffix(".png"))
    print(f"written: {path} and its picture")
    for name, load in loads.items():
        lost, low, high = (100 * load[key] for key in ("lost", "lost_low", "lost_high"))
        cpu = 100 * load["more_processor"]
        print(
            f"  {name:<24} dirties {load['dirtied_bytes_per_s'] / MIB:5.1f} MiB/s, "
            f"{load['faults_per_s']:6.0f} faults/s: work lost {lost:5.1f} % ({low:.1f} to "
            f"{high:.1f}), processor {cpu:+.1f} %, {load['fault_us']:.1f} us a fault"
        )


async def all_loads(made: World, rounds: int, seconds: float) -> dict[str, Any]:
    """Every load in turn."""
    guest = LabGuest(NAME, 1, image(), memory="512M", disk=None)
    await asyncio.to_thread(made.run_guest, guest, "lab-a")
    control = await guest.control(made.lab)
    (pid,) = made.pids(NAME)
    found = {}
    for name, words in (FULL | GIVEN).items():
        await control.load_memory(words)
        await asyncio.sleep(SETTLE_S)
        found[name] = await one_load(made, control, pid, rounds, seconds)
        found[name] |= compared(found[name], by_processor=name in FULL)
    await control.close()
    return found


async def one_load(
    made: World, control: GuestControl, pid: int, rounds: int, seconds: float
) -> dict[str, Any]:
    """One load, with the tracker and without in turns, which of them first by turns too."""
    free, tracked, rates = [], [], []
    for number in range(rounds):
        if number % 2:
            free.append(await work(control, pid, seconds))
        told, during = await watched(made, control, pid, seconds)
        tracked.append(during)
        rates.append(told)
        if not number % 2:
            free.append(await work(control, pid, seconds))
    return {
        "free": free,
        "tracked": tracked,
        "faults_per_s": statistics.median(one["faults_per_s"] for one in rates),
        "dirtied_bytes_per_s": statistics.median(
            one["working_set_bytes"] / one["took_s"] for one in rates
        ),
        "source": sorted({one["source"] for one in rates}),
    }


def compared(load: dict[str, Any], *, by_processor: bool) -> dict[str, float]:
    """With the tracker against without it, as parts of what was without, and 95 % bounds.

    `lost`: writes, of a load that does all it can `by_processor` time: how much of that QEMU gets
    on a machine that is itself a guest is a matter of luck. `more_processor`: for the same work.
    """
    turns = load["tracked"], load["free"]
    by_time, by_use = (
        [[one["touches_per_s"] / part(one) for one in turn] for turn in turns]
        for part in (lambda _: 1.0, lambda one: one["processor"])
    )
    kept = ratio(*(by_use if by_processor else by_time))
    slower = ratio(by_use[1], by_use[0])
    extra = statistics.median(one["processor"] for one in load["free"]) * (slower.value - 1)
    return {
        "lost": 1 - kept.value,
        "lost_low": 1 - kept.high,
        "lost_high": 1 - kept.low,
        "more_processor": slower.value - 1,
        "more_processor_low": slower.low - 1,
        "more_processor_high": slower.high - 1,
        "fault_us": 1e6 * extra / load["faults_per_s"],
    }


async def watched(
    made: World, control: GuestControl, pid: int, seconds: float
) -> tuple[dict[str, Any], dict[str, float]]:
    """What `dirty-rate` says, and what the guest got done meanwhile."""
    for_s = f"{SETTLE_S + seconds + BEYOND_S:g}s"
    measuring = asyncio.create_task(asyncio.to_thread(made.ok, "dirty-rate", NAME, "--for", for_s))
    await asyncio.sleep(SETTLE_S)
    during = await work(control, pid, seconds)
    return await measuring, during


async def work(control: GuestControl, pid: int, seconds: float) -> dict[str, float]:
    """Writes a second, and what part of one processor QEMU used."""
    loop = asyncio.get_running_loop()
    began, used_s, began_s = (await control.stat()).mem_touches, processor_s([pid]), loop.time()
    await asyncio.sleep(seconds)
    ended, now_s = (await control.stat()).mem_touches, loop.time()
    took_s = now_s - began_s
    return {
        "touches_per_s": (ended - began) / took_s,
        "processor": (processor_s([pid]) - used_s) / took_s,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    given = parser.parse_args()
    main(given.rounds, given.seconds)
