"""Many domains from one moment: forks, and as many copies of the same checkpoint.

Of one checkpoint of a libvirt domain, vmckpt makes as many forks, and as many copies (`restore
--as`, one command each), in turns. Measured are the wall time of the commands until the last guest
runs, and what all QEMUs of them take of the host's memory once all of it is there (PSS, /proc/PID/
smaps_rollup: what several share counts for each in part). A first turn is a warm-up.
"""

import argparse
import asyncio
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks import setting
from benchmarks.summary import Verdict, spread, spread_lines, verdict_lines, verdicts_as_json
from benchmarks.virsh_hosts import NAME, Hosts, hosts
from vmckpt.hosts.processes.process import find_by_argument

FORKS, COPIES = "fork", "copies"
WAYS = (FORKS, COPIES)
# The domain's memory, how much of it has noise, and how many are made.
MEMORY_MIB, FILLED_MIB, COUNT = 512, 256, 4
FILL_MIB_S, SETTLE_S, AFTER_S, PATIENCE_S = 100, 10.0, 3.0, 120.0
POINT = "point"
# Memory of all forks, as a share of that of as many copies.
MOST_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Sample:
    """As many domains, made once. `memory_mib`: of all of their QEMUs together."""

    way: str
    round: int
    wall_s: float
    memory_mib: float


async def measure(rounds: int) -> list[Sample]:
    """All of them."""
    samples = list[Sample]()
    async with hosts() as lab:
        load = f"vk.mem=rate=1M,set={FILLED_MIB}M,content=random"
        await lab.run_guest(direct=False, memory_mib=MEMORY_MIB, load=load)
        await asyncio.sleep(FILLED_MIB / FILL_MIB_S * 3 + SETTLE_S)
        await setting.run(setting.VMCKPT, "checkpoint", "create", NAME, "--name", POINT)
        for number in range(rounds + 1):
            for way in (*WAYS[number % 2 :], *WAYS[: number % 2]):
                sample = await _made(lab, way)
                if number:
                    samples.append(Sample(way, number, *sample))
        await lab.end_guest()
    return samples


async def _made(lab: Hosts, way: str) -> tuple[float, float]:
    """Make them, and remove them: the wall time (s), and their memory (MiB)."""
    names = [f"{way}-{number + 1}" for number in range(COUNT)]
    if way == FORKS:
        words = ("--count", str(COUNT), "--name", way)
        done = [await setting.run(setting.VMCKPT, "fork", POINT, *words)]
    else:
        words = ("checkpoint", "restore", POINT, "--as")
        done = [await setting.run(setting.VMCKPT, *words, name) for name in names]
    wall_s = (done[-1].ended_ns - done[0].began_ns) / 1e9
    for name in names:
        await _settled(name)
    await asyncio.sleep(AFTER_S)
    memory_mib = sum(_memory_mib(name) for name in names)
    for name in names:
        await setting.run(setting.VMCKPT, "vm", "stop", name, "--force")
        await setting.run(setting.VMCKPT, "vm", "rm", name, "--disks", "--yes")
    return round(wall_s, 4), round(memory_mib, 1)


async def _settled(name: str) -> None:
    """Wait until all of its memory is there."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            done = await setting.run(setting.VMCKPT, "vm", "show", name, "--json")
            if json.loads(done.stdout)["operation"] is None:
                return
            await asyncio.sleep(0.2)


def _memory_mib(name: str) -> float:
    (qemu,) = find_by_argument(f"-name\0guest={name},")
    text = Path(f"/proc/{qemu.pid}/smaps_rollup").read_text()
    return int(text.split("\nPss:")[1].split()[0]) / 1024


def judge(samples: Sequence[Sample]) -> dict[str, Any]:
    """Medians, and whether forks take less memory."""
    memory = {way: [s.memory_mib for s in samples if s.way == way] for way in WAYS}
    walls = {way: [s.wall_s for s in samples if s.way == way] for way in WAYS}
    share = statistics.median(memory[FORKS]) / statistics.median(memory[COPIES])
    verdicts = [Verdict("memory of forks, as a share of that of copies", share, MOST_SHARE)]
    return {
        "machine": setting.machine(),
        "count": COUNT,
        "memory_mib": {way: asdict(spread(values)) for way, values in memory.items()},
        "wall_s": {way: asdict(spread(values)) for way, values in walls.items()},
        "verdicts": verdicts_as_json(verdicts),
        "samples": [asdict(sample) for sample in samples],
    }


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Write the picture: every sample, and the medians."""
    mpl.use("agg")
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    titles = {"wall_s": "until the last one runs (s)", "memory_mib": "memory of all (MiB)"}
    for axes, (what, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        for place, way in enumerate(WAYS):
            values = [sample[what] for sample in result["samples"] if sample["way"] == way]
            axes.plot([place] * len(values), values, "o", color="#1f6fb4", markersize=4)
            axes.hlines(statistics.median(values), place - 0.3, place + 0.3, color="#1f6fb4")
        axes.set_xticks(range(len(WAYS)), WAYS)
        axes.set_xlim(-0.6, len(WAYS) - 0.4)
        axes.set_ylim(bottom=0)
        axes.set_title(title, loc="left", fontsize=10)
    count = result["count"]
    figure.suptitle(f"{count} libvirt domains from one checkpoint; lines are medians", fontsize=10)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure, print, and write results/domain_forks.json and .png."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    samples = asyncio.run(measure(parser.parse_args().rounds))
    result = judge(samples)
    for what, unit in (("wall_s", "s"), ("memory_mib", "MiB")):
        values = {w: spread([getattr(s, what) for s in samples if s.way == w]) for w in WAYS}
        print(what, *spread_lines(values, unit), sep="\n")
    print("\n".join(verdict_lines(result["verdicts"])))
    path = setting.write_result("domain_forks", result)
    draw(result, Path(path).with_suffix(".png"))
    print(path)


if __name__ == "__main__":
    main()
