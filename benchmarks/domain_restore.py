"""How soon a libvirt domain's guest runs again from a checkpoint: `virsh restore`, and vmckpt.

A domain is ended, and restored at once: by virsh from a save image that was exported from the
checkpoint, by vmckpt with all memory loaded before (--eager), and by vmckpt as it does by itself,
with memory loaded while the guest runs. All take turns in one run, with two sizes of memory.
Measured is the longest silence of the guest's heartbeats at an observer outside, from the end of
the old guest on, and the wall time of the command. virsh runs on the host, vmckpt here, by SSH;
vmckpt writes the disk anew, which virsh does not. A first turn is a warm-up.
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
from benchmarks.virsh_hosts import NAME, VIRSH_HERE, Hosts, hosts

VIRSH, EAGER, LAZY = "virsh restore", "vmckpt --eager", "vmckpt"
WAYS = (VIRSH, EAGER, LAZY)
# Memory in MiB, and how much of it the guest fills with noise.
SIZES = {512: 256, 2048: 1536}
FILL_MIB_S, SETTLE_S, AFTER_S = 100, 10.0, 8.0
POINT = "point"
# How much longer silence may last with the larger memory, if it does not depend on memory.
MOST_GROWTH = 1.5


@dataclass(frozen=True, slots=True)
class Sample:
    """One restore."""

    way: str
    memory_mib: int
    round: int
    wall_s: float
    silent_ms: float


async def measure(rounds: int) -> list[Sample]:
    """All of them."""
    samples = list[Sample]()
    async with hosts() as lab:
        for memory_mib, filled_mib in SIZES.items():
            load = f"vk.mem=rate={FILL_MIB_S}M,set={filled_mib}M,content=random"
            guest = await lab.run_guest(direct=False, memory_mib=memory_mib, load=load)
            await asyncio.sleep(filled_mib / FILL_MIB_S * 3 + SETTLE_S)
            image = await _taken(lab, memory_mib)
            for number in range(rounds + 1):
                for way in (*WAYS[number % 3 :], *WAYS[: number % 3]):
                    sample = await _restored(lab, way, guest, image)
                    if number:
                        samples.append(Sample(way, memory_mib, number, *sample))
            await lab.end_guest()
    return samples


async def _taken(lab: Hosts, memory_mib: int) -> str:
    """Take the checkpoint; returns the save image that is made of it."""
    words = ("--name", f"{POINT}-{memory_mib}")
    await setting.run(setting.VMCKPT, "checkpoint", "create", NAME, *words)
    directory = lab.shared / f"export-{memory_mib}"
    export = ("checkpoint", "export", words[1], str(directory), "--json")
    done = await setting.run(setting.VMCKPT, *export)
    return str(json.loads(done.stdout)["image"])


async def _restored(lab: Hosts, way: str, guest: int, image: str) -> tuple[float, float]:
    """End the domain, and restore it; the command's wall time (s), and the silence (ms)."""
    host = lab.names[0]
    words = ("checkpoint", "restore", f"{POINT}-{Path(image).parent.name.split('-')[1]}")
    ended = await lab.on(host, *VIRSH_HERE, "destroy", NAME)
    if way == VIRSH:
        process = await lab.on(host, *VIRSH_HERE, "restore", image)
    else:
        await lab.on(host, *VIRSH_HERE, "undefine", NAME)
        (lab.shared / f"{NAME}.qcow2").unlink()
        more = ("--eager",) if way == EAGER else ()
        process = await setting.run(setting.VMCKPT, *words, *more)
    await setting.await_beats(lab.listener, guest)
    await asyncio.sleep(AFTER_S)
    until_ns = process.ended_ns + int(AFTER_S * 1e9)
    found = await setting.heard(lab.listener, guest, ended.began_ns, until_ns)
    return round(process.wall_s, 4), found["longest_gap_ms"]


def judge(samples: Sequence[Sample]) -> dict[str, Any]:
    """Medians, and whether the silence depends on memory."""
    silent = {f"{way}, {mib} MiB": _values(samples, way, mib) for mib in SIZES for way in WAYS}
    least, most = (statistics.median(silent[f"{LAZY}, {mib} MiB"]) for mib in SIZES)
    verdicts = [Verdict("silence does not grow with memory, times", most / least, MOST_GROWTH)]
    return {
        "machine": setting.machine(),
        "silent_ms": {what: asdict(spread(values)) for what, values in silent.items()},
        "verdicts": verdicts_as_json(verdicts),
        "samples": [asdict(sample) for sample in samples],
    }


def _values(samples: Sequence[Sample], way: str, memory_mib: int) -> list[float]:
    return [s.silent_ms for s in samples if (s.way, s.memory_mib) == (way, memory_mib)]


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Write the picture: every restore, and the medians."""
    mpl.use("agg")
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    for place, what in enumerate(result["silent_ms"]):
        way, _, size = what.partition(", ")
        of = [s for s in result["samples"] if (s["way"], f"{s['memory_mib']} MiB") == (way, size)]
        values = [sample["silent_ms"] / 1e3 for sample in of]
        colour = ("#888888", "#7fc29b", "#1f6fb4")[WAYS.index(way)]
        axes.plot([place] * len(values), values, "o", color=colour, markersize=4)
        axes.hlines(statistics.median(values), place - 0.3, place + 0.3, color=colour, linewidth=2)
    axes.set_xticks(
        range(len(result["silent_ms"])), [what.replace(", ", ",\n") for what in result["silent_ms"]]
    )
    axes.set_ylim(bottom=0)
    title = "silence of a domain's guest from its end until it runs from a checkpoint (s)"
    axes.set_title(f"{title}; lines are medians", loc="left", fontsize=10)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure, print, and write results/domain_restore.json and .png."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    samples = asyncio.run(measure(parser.parse_args().rounds))
    result = judge(samples)
    silent = {what: spread([*_of(samples, what)]) for what in result["silent_ms"]}
    print("\n".join(spread_lines(silent, "ms")))
    print("\n".join(verdict_lines(result["verdicts"])))
    path = setting.write_result("domain_restore", result)
    draw(result, Path(path).with_suffix(".png"))
    print(path)


def _of(samples: Sequence[Sample], what: str) -> list[float]:
    way, _, size = what.partition(", ")
    return _values(samples, way, int(size.split()[0]))


if __name__ == "__main__":
    main()
