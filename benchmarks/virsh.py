"""`virsh migrate`, vmckpt through libvirt, and vmckpt's own way, with one guest on the same hosts.

Two hosts that look like machines, and an operator who reaches them by SSH. A libvirt domain is
moved by `virsh migrate --live --p2p` and by `vmckpt migrate`, each run by the operator; and by
virsh run on the source itself, which pays for no SSH, and which no one could be quicker than. A VM
of vmckpt's own with the same memory, devices and load is moved by `vmckpt migrate`. Both are typed
as people do; beside them, for what channels alone make, virsh with `--parallel` and vmckpt with
`--method precopy`, which is one channel as virsh has it by itself. All take turns in one run, each
there and back, unencrypted alike, with the same shared disk; the order changes from round to round.
The first moves are a warm-up. Only one of the two guests runs at a time: the other would take its
processor.

A run may be short: rounds that this commit's results have are kept, and more are added to them.

Total time is the process's wall time on this machine's clock; guest-visible downtime the longest
silence of the guest's heartbeats at an observer outside, from the process's start to 0.3 s after
its end. Memory is warm, as in benchmarks/overhead.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import setting
from benchmarks.summary import Verdict, ratio, spread, spread_lines, verdicts_as_json
from benchmarks.virsh_hosts import MEMORY_MIB, Hosts, Move, hosts
from benchmarks.virsh_plot import draw
from benchmarks.warm_memory import warm

VIRSH, ON_SOURCE, PARALLEL = "virsh", "virsh on the source", "virsh, two channels"
LIBVIRT, DIRECT, ONE_CHANNEL = "vmckpt, libvirt", "vmckpt, direct", "vmckpt, direct, one channel"
OF_DOMAIN, OWN = (VIRSH, ON_SOURCE, PARALLEL, LIBVIRT), (DIRECT, ONE_CHANNEL)
WAYS = (*OF_DOMAIN, *OWN)
SETTLE_S, AFTER_S = 1.0, 0.3
LISTS = 10
SPARE_BYTES = 512 << 20  # warm besides what the guest has on both sides
EXTRA_S = 0.3  # what vmckpt's own checks and record may cost over virsh


@dataclass(frozen=True, slots=True)
class Sample:
    """One move."""

    way: str
    round: int
    source: str
    wall_s: float
    guest_downtime_ms: float


async def measure(samples: list[Sample], rounds: int, until_s: float) -> dict[str, Any]:
    """Everything, as the results file has it, with rounds added until it is `until_s`."""
    async with hosts() as lab:
        await _warm_up(lab)
        first = max((sample.round for sample in samples), default=0) + 1
        for number in range(first, rounds + 1):
            if time.monotonic() > until_s:
                break
            samples = samples + [sample async for sample in _round(lab, number)]
        lists_s = [(await lab.list_vms()).wall_s for _ in range(LISTS)]
    if not samples:
        raise SystemExit("not one round was measured: give it more --minutes")
    return {
        "machine": setting.machine(),
        "parameters": {"rounds": max(sample.round for sample in samples)},
        **judge(samples),
        "vm_list_s": asdict(spread(lists_s)),
    }


def kept() -> list[Sample]:
    """The moves that this commit was measured by so far."""
    path = setting.RESULTS / "virsh.json"
    found = json.loads(path.read_text()) if path.exists() else {"samples": []}
    if not found["samples"] or _commit(found["machine"]) != _commit(setting.machine()):
        return []
    return [Sample(**sample) for sample in found["samples"]]


def _commit(machine: Mapping[str, Any]) -> str:
    # Results that were written meanwhile make no other vmckpt.
    return str(machine["commit"]).removesuffix("-dirty")


async def _warm_up(lab: Hosts) -> None:
    await lab.run_guest(direct=False)
    for move in (lab.by_virsh(), lab.by_vmckpt()):
        for source, target in pairwise((*lab.names, lab.names[0])):
            await move(source, target)
    await lab.end_guest()


async def _round(lab: Hosts, number: int) -> AsyncIterator[Sample]:
    """Every way once, there and back."""
    ways: dict[str, Move] = {
        VIRSH: lab.by_virsh(),
        ON_SOURCE: lab.by_virsh_on_source,
        PARALLEL: lab.by_virsh("--parallel", "--parallel-connections", "2"),
        LIBVIRT: lab.by_vmckpt(),
        DIRECT: lab.by_vmckpt(),
        ONE_CHANNEL: lab.by_vmckpt("--method", "precopy"),
    }
    guests = [_turned(OF_DOMAIN, number), _turned(OWN, number)]
    for guest_ways in guests if number % 2 else reversed(guests):
        guest = await lab.run_guest(direct=DIRECT in guest_ways)
        await asyncio.sleep(SETTLE_S)
        for way in guest_ways:
            for source, target in pairwise((*lab.names, lab.names[0])):
                process = await ways[way](source, target)
                yield await _sample(lab, process, guest, (way, number, source))
                await asyncio.sleep(SETTLE_S)
        await lab.end_guest()


def _turned(ways: Sequence[str], number: int) -> tuple[str, ...]:
    turn = number % len(ways)
    return (*ways[turn:], *ways[:turn])


async def _sample(
    lab: Hosts, process: setting.Process, guest: int, what: tuple[str, int, str]
) -> Sample:
    await asyncio.sleep(AFTER_S)
    until_ns = process.ended_ns + int(AFTER_S * 1e9)
    found = await setting.heard(lab.listener, guest, process.began_ns, until_ns)
    way, number, source = what
    return Sample(way, number, source, round(process.wall_s, 4), found["longest_gap_ms"])


def judge(samples: Sequence[Sample]) -> dict[str, Any]:
    """Medians, and the figures held against what was promised."""
    wall = {way: [s.wall_s for s in samples if s.way == way] for way in WAYS}
    felt = {way: [s.guest_downtime_ms for s in samples if s.way == way] for way in WAYS}
    verdicts = [
        verdict for reference in (VIRSH, ON_SOURCE) for verdict in _verdicts(wall, felt, reference)
    ]
    return {
        "total_s": {way: asdict(spread(values)) for way, values in wall.items()},
        "guest_downtime_ms": {way: asdict(spread(values)) for way, values in felt.items()},
        "total_ratio_to_virsh": _ratios(wall),
        "guest_downtime_ratio_to_virsh": _ratios(felt),
        "verdicts": verdicts_as_json(verdicts),
        "samples": [asdict(sample) for sample in samples],
    }


def _ratios(values: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    return {way: asdict(ratio(values[way], values[VIRSH])) for way in WAYS if way != VIRSH}


def _verdicts(
    wall: Mapping[str, Sequence[float]], felt: Mapping[str, Sequence[float]], reference: str
) -> list[Verdict]:
    median = statistics.median
    virsh_s, virsh_ms = median(wall[reference]), median(felt[reference])
    return [
        Verdict(f"libvirt, total s ({reference})", median(wall[LIBVIRT]), virsh_s + EXTRA_S),
        Verdict(f"direct, total s ({reference})", median(wall[DIRECT]), 0.9 * virsh_s),
        Verdict(f"libvirt, felt ms ({reference})", median(felt[LIBVIRT]), virsh_ms),
        Verdict(f"direct, felt ms ({reference})", median(felt[DIRECT]), virsh_ms),
    ]


def main() -> None:
    """Measure, print, and write results/virsh.json and .png."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=16, help="as many, with those that are kept")
    parser.add_argument("--minutes", type=float, default=60, help="begin no round after so long")
    asked = parser.parse_args()
    until_s = time.monotonic() + 60 * asked.minutes
    with warm((2 * MEMORY_MIB << 20) + SPARE_BYTES):
        result = asyncio.run(measure(kept(), asked.rounds, until_s))
    for unit, field in (("s", "total_s"), ("ms", "guest_downtime_ms")):
        samples = result["samples"]
        name = "wall_s" if unit == "s" else field
        spreads = {way: spread([s[name] for s in samples if s["way"] == way]) for way in WAYS}
        print("\n".join([field, *spread_lines(spreads, unit)]))
    print(f"vmckpt vm list: median {result['vm_list_s']['median']:.3f} s")
    for field in ("total_ratio_to_virsh", "guest_downtime_ratio_to_virsh"):
        for way, found in result[field].items():
            bounds = f"{found['low']:.2f} to {found['high']:.2f}"
            print(f"{field} {way}: {found['value']:.2f} ({bounds})")
    for verdict in result["verdicts"]:
        word = "met" if verdict["met"] else "MISSED"
        print(f"{word}: {verdict['promise']} {verdict['measured']:.3f} <= {verdict['limit']:.3f}")
    path = setting.write_result("virsh", result)
    draw(result, Path(path).with_suffix(".png"))
    print(path)


if __name__ == "__main__":
    main()
