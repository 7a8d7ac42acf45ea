"""`virsh migrate`, vmckpt through libvirt, and vmckpt's own way, with one guest on the same hosts.

Two hosts that look like machines. A libvirt domain is moved by `virsh migrate --live --p2p`, run on
its host, and by `vmckpt migrate`, run here over SSH; a VM of vmckpt's own with the same memory,
devices and load by `vmckpt migrate`. The three take turns in one run, each there and back, in clear
alike, with the same shared disk format; which comes first changes from round to round. The first
round is a warm-up. Only one of the two guests runs at a time: the other would take its processor.

Total time is the process's wall time on this machine's clock; guest-visible downtime the longest
silence of the guest's heartbeats at an observer outside, from the process's start to 0.3 s later.
"""

import argparse
import asyncio
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import setting
from benchmarks.summary import Verdict, ratio, spread, spread_lines, verdicts_as_json
from benchmarks.virsh_hosts import Hosts, hosts
from benchmarks.virsh_plot import draw

VIRSH, LIBVIRT, DIRECT = "virsh", "vmckpt, libvirt", "vmckpt, direct"
WAYS = (VIRSH, LIBVIRT, DIRECT)
SETTLE_S, AFTER_S = 2.0, 0.3
EXTRA_S = 0.3  # what vmckpt's own checks and record may cost over virsh


@dataclass(frozen=True, slots=True)
class Sample:
    """One move."""

    way: str
    round: int
    source: str
    wall_s: float
    guest_downtime_ms: float


async def measure(rounds: int) -> dict[str, Any]:
    """Everything, as the results file has it."""
    async with hosts() as lab:
        ways: dict[str, Callable[[str, str], Awaitable[setting.Process]]] = {
            VIRSH: lab.by_virsh,
            LIBVIRT: lab.by_vmckpt,
            DIRECT: lab.by_vmckpt,
        }
        samples: list[Sample] = []
        for number in range(rounds + 1):
            turn = number % len(WAYS)
            for way in (*WAYS[turn:], *WAYS[:turn]):
                guest = await lab.run_guest(direct=way == DIRECT)
                await asyncio.sleep(SETTLE_S)
                for source, target in pairwise((*lab.names, lab.names[0])):
                    process = await ways[way](source, target)
                    sample = await _sample(lab, process, guest, (way, number, source))
                    if number:
                        samples.append(sample)
                    await asyncio.sleep(SETTLE_S)
                await lab.end_guest()
    return {"machine": setting.machine(), "parameters": {"rounds": rounds}, **judge(samples)}


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
    virsh_s, virsh_ms = statistics.median(wall[VIRSH]), statistics.median(felt[VIRSH])
    verdicts = [
        Verdict("through libvirt, total s", statistics.median(wall[LIBVIRT]), virsh_s + EXTRA_S),
        Verdict("direct, total s", statistics.median(wall[DIRECT]), 0.9 * virsh_s),
        Verdict("through libvirt, felt ms", statistics.median(felt[LIBVIRT]), virsh_ms),
        Verdict("direct, felt ms", statistics.median(felt[DIRECT]), virsh_ms),
    ]
    return {
        "total_s": {way: asdict(spread(values)) for way, values in wall.items()},
        "guest_downtime_ms": {way: asdict(spread(values)) for way, values in felt.items()},
        "total_ratio_to_virsh": {
            way: asdict(ratio(wall[way], wall[VIRSH])) for way in (LIBVIRT, DIRECT)
        },
        "verdicts": verdicts_as_json(verdicts),
        "samples": [asdict(sample) for sample in samples],
    }


def main() -> None:
    """Measure, print, and write results/virsh.json and .png."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    result = asyncio.run(measure(parser.parse_args().rounds))
    for unit, field in (("s", "total_s"), ("ms", "guest_downtime_ms")):
        samples = result["samples"]
        name = "wall_s" if unit == "s" else field
        spreads = {way: spread([s[name] for s in samples if s["way"] == way]) for way in WAYS}
        print("\n".join([field, *spread_lines(spreads, unit)]))
    for verdict in result["verdicts"]:
        word = "met" if verdict["met"] else "MISSED"
        print(f"{word}: {verdict['promise']} {verdict['measured']:.3f} <= {verdict['limit']:.3f}")
    path = setting.write_result("virsh", result)
    draw(result, Path(path).with_suffix(".png"))
    print(path)


if __name__ == "__main__":
    main()
