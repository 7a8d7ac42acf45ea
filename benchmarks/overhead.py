"""What `vmckpt migrate` adds to QEMU's own migration, and what starting the command costs.

One guest, moved between two hosts of a lab, in turns by the script in bare_migrate.py, by
`vmckpt migrate` as people type it, and by `vmckpt migrate --method precopy`, which sends over one
channel as the script does: the same RAM, load and QEMUs for all, nothing else running. Another way
is the first of each round, so that each goes equally often in each direction.
Between turns the guest settles until its caches of translated code are warm again, and what else
uses the machine is waited for, within limits. After a bare move the files by which vmckpt finds the
VM are put right, outside the measured time. The first round is a warm-up and not counted: in it
vmckpt asks each QEMU binary what it can do, once for good.

Both ways are timed by the same outsider. The process's wall time is this process's clock. The
transfer is from the source QEMU's migration state `setup` to `completed`, by the trace in its log,
switched on beforehand. Guest-visible downtime is the longest silence of the guest's 1 kHz
heartbeats, at an observer outside of it, within the time of the process and 0.3 s more. It is
measured at two downtime limits: at 300 ms, the default, it is mostly QEMU's choice of the moment to
stop the guest, at 30 ms what the command adds can be seen.
Fixed cost is wall time less transfer: before the transfer, and after it.

Memory is warm (warm_memory.py): where this machine's hypervisor takes back what is free for two
seconds, each process would wait for it again, by half as long again for both ways.
"""

import argparse
import asyncio
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks import setting
from benchmarks.overhead_moves import (
    BARE,
    DOWNTIME_LIMITS_MS,
    NAME,
    NUMBER,
    ONE_CHANNEL,
    PATIENCE_S,
    VMCKPT,
    WAYS,
    Sample,
    moves,
)
from benchmarks.overhead_plot import draw
from benchmarks.summary import (
    Spread,
    Verdict,
    ratio,
    spread,
    spread_lines,
    verdicts_as_json,
)
from benchmarks.warm_memory import warm
from vmckpt.hosts.host import Host
from vmckpt.units import parse_size_bytes

LOAD = "vk.mem=rate=20M,set=256M,content=random"
MEMORY = "512M"
# Warm besides what the guest has on both sides.
SPARE_BYTES = 512 << 20
BOOT_SETTLE_S = 5.0
OURS = (VMCKPT, ONE_CHANNEL)


async def starts(count: int, *commands: tuple[str, ...]) -> dict[str, list[float]]:
    """How long each command takes as a whole process, in ms, the commands in turns."""
    taken: dict[str, list[float]] = {" ".join(command): [] for command in commands}
    for number in range(count + 1):
        for command in commands:
            process = await setting.run(setting.VMCKPT, *command)
            if number:
                taken[" ".join(command)].append(process.wall_s * 1e3)
    return taken


async def run_vm(host: Host, name: str, number: int, load: str = "") -> None:
    """A guest on `host`, booted and beating."""
    text = setting.guest_spec(name, number, memory=MEMORY, load=load)
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(text)
        file.flush()
        await setting.run(setting.VMCKPT, "vm", "run", file.name, "--host", host.name)
    await setting.await_beats(host, number)


async def measure(rounds: int, start_count: int) -> dict[str, Any]:
    """Everything, as the results file has it."""
    busy = await setting.await_quiet(10.0, PATIENCE_S)
    if busy > 10.0:
        print(f"note: others use {busy:.0f} % of this machine; the figures will be noisy")
    async with setting.lab() as hosts:
        cold = await starts(start_count, ("--help",), ("vm", "list"))
        await run_vm(hosts[0], NAME, NUMBER, LOAD)
        await asyncio.sleep(BOOT_SETTLE_S)
        samples = await moves(rounds, hosts)
        await run_vm(hosts[0], f"{NAME}-2", NUMBER + 1)
        warm = await starts(start_count, ("vm", "list"))
    commands = {
        "vmckpt --help": cold["--help"],
        "vmckpt vm list, no VMs": cold["vm list"],
        "vmckpt vm list, 2 VMs running": warm["vm list"],
    }
    summary, verdicts = judge(samples, commands)
    return {
        "machine": setting.machine(),
        "parameters": {
            "rounds": rounds,
            "guest_memory": MEMORY,
            "guest_load": LOAD,
            "busy_before_percent": round(busy, 1),
        },
        "summary": summary,
        "verdicts": verdicts_as_json(verdicts),
        "samples": [asdict(sample) | {"fixed_ms": sample.fixed_ms} for sample in samples],
        "commands_ms": commands,
    }


# Quantities of a move that do not depend on the downtime limit, and those that do, or on whether it
# was typed.
COLUMNS: dict[str, Callable[[Sample], float]] = {
    "wall_ms": lambda s: s.wall_s * 1e3,
    "transfer_ms": lambda s: s.transfer_s * 1e3,
    "before_ms": lambda s: s.before_s * 1e3,
    "after_ms": lambda s: s.after_s * 1e3,
    "resume_lag_ms": lambda s: s.resume_lag_ms,
    "quiet_gap_ms": lambda s: s.quiet_gap_ms,
    "busy_percent": lambda s: s.busy_percent,
}
BY_LIMIT: dict[str, Callable[[Sample], float]] = {
    "fixed_ms": lambda s: s.fixed_ms,
    "qemu_downtime_ms": lambda s: float(s.qemu_downtime_ms),
    "stopped_ms": lambda s: s.stopped_ms,
    "guest_downtime_ms": lambda s: s.guest_downtime_ms,
}


def judge(
    samples: Sequence[Sample], commands: Mapping[str, Sequence[float]]
) -> tuple[dict[str, Any], list[Verdict]]:
    """Medians, ratios, and whether they keep the promises.

    A quantity's name ends in `_limit_N` when it holds for moves with a downtime limit of N ms.
    """
    values: dict[str, dict[str, list[float]]] = {}
    for way in WAYS:
        mine = [s for s in samples if s.way == way]
        values[way] = {name: [take(s) for s in mine] for name, take in COLUMNS.items()} | {
            f"{name}_limit_{limit}": [take(s) for s in mine if s.downtime_limit_ms == limit]
            for limit in DOWNTIME_LIMITS_MS
            for name, take in BY_LIMIT.items()
        }
    ways = {way: {name: spread(v) for name, v in table.items()} for way, table in values.items()}
    ratios = {
        way: {
            name: ratio(values[way][name], values[BARE][name])
            for name in values[BARE]
            if name.startswith(("wall", "transfer", "guest", "stopped"))
        }
        for way in OURS
    }
    started = {name: spread(column) for name, column in commands.items()}
    listed_ms = max(s.median for name, s in started.items() if "list" in name)
    verdicts = [
        *(
            Verdict(f"{way}: total time, ratio of medians", ratios[way]["wall_ms"].value, 1.10)
            for way in OURS
        ),
        *(_downtime_verdict(ways, way, limit) for way in OURS for limit in DOWNTIME_LIMITS_MS),
        *(
            Verdict(
                f"{way}: fixed cost, limit {limit} ms, ms",
                ways[way][f"fixed_ms_limit_{limit}"].median,
                250.0,
            )
            for way in OURS
            for limit in DOWNTIME_LIMITS_MS
        ),
        Verdict("vmckpt --help, ms", started["vmckpt --help"].median, 200.0),
        Verdict("vmckpt vm list (the slower case), ms", listed_ms, 300.0),
    ]
    summary = {
        "ways": {
            way: {name: asdict(s) for name, s in table.items()} for way, table in ways.items()
        },
        "ratios": {
            way: {name: asdict(r) for name, r in table.items()} for way, table in ratios.items()
        },
        "commands_ms": {name: asdict(s) for name, s in started.items()},
    }
    return summary, verdicts


def _downtime_verdict(ways: Mapping[str, Mapping[str, Spread]], way: str, limit_ms: int) -> Verdict:
    name = f"guest_downtime_ms_limit_{limit_ms}"
    theirs_ms = ways[BARE][name].median
    return Verdict(
        f"{way}: guest-visible downtime, limit {limit_ms} ms (1.10 x or + 2 ms), ms",
        ways[way][name].median,
        max(1.10 * theirs_ms, theirs_ms + 2.0),
    )


def show(result: dict[str, Any]) -> None:
    """The result for people."""
    for way, table in result["summary"]["ways"].items():
        print(f"{way}:")
        print("\n".join(spread_lines({name: Spread(**s) for name, s in table.items()}, "")))
    print("commands:")
    commands = result["summary"]["commands_ms"].items()
    print("\n".join(spread_lines({name: Spread(**s) for name, s in commands}, "ms")))
    for way, ratios in result["summary"]["ratios"].items():
        print(f"{way} / bare, ratios of medians:")
        for name, r in ratios.items():
            print(f"  {name:<38} {r['value']:.3f}  (95 %: {r['low']:.3f} to {r['high']:.3f})")
    for verdict in result["verdicts"]:
        met = "met   " if verdict["met"] else "MISSED"
        print(
            f"{met} {verdict['promise']}: {verdict['measured']:.3f}, limit {verdict['limit']:.3f}"
        )


async def main() -> None:
    """Measure, write, draw, print. SIGTERM ends it as Ctrl-C does: with the lab taken down."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=24, help="moves each way at each limit")
    parser.add_argument("--starts", type=int, default=20, help="runs of each command")
    given = parser.parse_args()
    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with warm(2 * parse_size_bytes(MEMORY) + SPARE_BYTES):
        result = await measure(given.rounds, given.starts)
    path = setting.write_result("overhead", result)
    draw(result, path.with_suffix(".png"))
    show(result)
    print(f"written: {path} and its picture {path.with_suffix('.png').name}")


if __name__ == "__main__":
    asyncio.run(main())
