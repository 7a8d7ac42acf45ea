"""What `vmckpt migrate` adds to QEMU's own migration, and what starting the command costs.

One guest, moved between two hosts of a lab, in turns by `vmckpt migrate` and by the script in
bare_migrate.py: the same RAM, load and QEMUs for both, nothing else running. Of the two moves of a
round the first one alternates, so that each way of moving goes equally often in each direction.
Between turns the guest settles until its caches of translated code are warm again. After a bare
move the files by which vmckpt finds the VM are put right, outside the measured time. The first
round is a warm-up and not counted: in it vmckpt asks each QEMU binary what it can do, once for
good.

Both ways are timed by the same outsider. The process's wall time is this process's clock. The
transfer is from the source QEMU's first MIGRATION event to `completed`, by QEMU's timestamps, heard
on a monitor that neither way uses. Guest-visible downtime is the longest silence of the guest's
1 kHz heartbeats, at an observer outside of it, within the time of the process and 0.3 s more.
Fixed cost is wall time less transfer: before the transfer, and after it.
"""

import argparse
import asyncio
import json
import re
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import setting
from benchmarks.overhead_plot import draw
from benchmarks.summary import (
    Spread,
    Verdict,
    ratio,
    spread,
    spread_lines,
    verdicts_as_json,
)
from vmckpt.hosts.host import Host
from vmckpt.migrate.ends import End
from vmckpt.migrate.handover import find_qemu, release, settle_on_target
from vmckpt.qemu.monitor import Events, session
from vmckpt.vm.argv import qemu_argv
from vmckpt.vm.inventory import Vm, find_vm
from vmckpt.vm.paths import vm_dir
from vmckpt.vm.start import new_qemu_id

NAME, NUMBER = "bench", 11
LOAD = "vk.mem=rate=20M,set=256M,content=random"
MEMORY = "512M"
BARE, VMCKPT = "bare", "vmckpt"
SETTLE_S = 2.5
AFTER_S = 0.3
BOOT_SETTLE_S = 5.0
EVENT_TIMEOUT_S = 60.0
RAN = re.compile(r"@(\d+\.\d+):vm_state_notify running 1")


@dataclass(frozen=True, slots=True)
class Sample:
    """One move. Times in seconds but for `_ms`.

    `stopped_ms` is from the source's vCPUs stopping to the target's starting, by both QEMUs' words;
    `quiet_gap_ms` the longest silence in the second before the move: the noise of this machine.
    """

    way: str
    round: int
    source: str
    wall_s: float
    transfer_s: float
    before_s: float
    after_s: float
    qemu_downtime_ms: int
    stopped_ms: float
    guest_downtime_ms: float
    quiet_gap_ms: float
    heartbeats_lost: int
    transferred_bytes: int
    rounds: int

    @property
    def fixed_ms(self) -> float:
        """What was not QEMU transferring."""
        return (self.wall_s - self.transfer_s) * 1e3


@dataclass(slots=True)
class Referee:
    """When the source's migration began, stopped the guest and was completed (Unix seconds)."""

    began_s: float = 0.0
    stopped_s: float = 0.0
    completed_s: float = 0.0

    async def listen(self, events: Events) -> None:
        """Until the migration is completed."""
        while not self.completed_s:
            event = await events.next(EVENT_TIMEOUT_S)
            if event is None:
                raise SystemExit("no migration was completed")
            stamp: Any = event["timestamp"]
            data: Any = event.get("data", {})
            at_s = stamp["seconds"] + stamp["microseconds"] / 1e6
            if event["event"] == "STOP":
                self.stopped_s = at_s
            elif data.get("status") == "completed":
                self.completed_s = at_s
            elif not self.began_s:
                self.began_s = at_s


async def move(way: str, number: int, hosts: Sequence[Host]) -> Sample:
    """Move the guest to the other host, one way or the other, and measure it."""
    await asyncio.sleep(SETTLE_S)
    vm = find_vm(NAME)
    target = next(host for host in hosts if host.name != vm.host.name)
    referee = Referee()
    async with (
        session(await vm.host.connect(vm.qemu.files.rescue), "the referee's source") as monitor,
        _moving(way, vm, target) as argv,
    ):
        with monitor.events("MIGRATION", "STOP") as events:
            listening = asyncio.ensure_future(referee.listen(events))
            try:
                process = await setting.run(*argv)
                await asyncio.wait_for(listening, 1.0)
            finally:
                listening.cancel()
    until_ns = process.ended_ns + int(AFTER_S * 1e9)
    await asyncio.sleep(AFTER_S + 0.05)
    heard = await setting.heard(target, NUMBER, process.began_ns, until_ns)
    quiet = await setting.heard(target, NUMBER, process.began_ns - 10**9, process.began_ns)
    log = find_vm(NAME).qemu.files.stderr.read_text()
    result = json.loads(process.stdout)
    ran_s = max(float(at) for at in RAN.findall(log))
    return Sample(
        way=way,
        round=number,
        source=vm.host.name,
        wall_s=process.wall_s,
        transfer_s=referee.completed_s - referee.began_s,
        before_s=referee.began_s - process.began_unix_s,
        after_s=process.ended_unix_s - referee.completed_s,
        qemu_downtime_ms=result["downtime_ms"],
        stopped_ms=(ran_s - referee.stopped_s) * 1e3,
        guest_downtime_ms=heard["longest_gap_ms"],
        quiet_gap_ms=quiet["longest_gap_ms"],
        heartbeats_lost=heard["lost"],
        transferred_bytes=result["transferred_bytes"],
        rounds=result["rounds"],
    )


@asynccontextmanager
async def _moving(way: str, vm: Vm, target: Host) -> AsyncIterator[tuple[str | Path, ...]]:
    """The command that moves `vm`. After the block vmckpt finds it on `target`, either way."""
    if way == VMCKPT:
        yield setting.VMCKPT, "migrate", "--json", "--max-downtime", "300ms", NAME, target.name
        return
    directory = vm_dir(target.state_dir, NAME)
    source, to = End(vm.host, vm.qemu.files), End(target, directory.qemu(new_qemu_id()))
    target.make_dir(to.files.path)
    target.write_text(directory.spec, vm.spec.text)
    argv = qemu_argv(vm.spec, vm.qemu.platform, to.files, target.qemu, incoming=True)
    argv.remove("-S")
    tap, bridge = to.files.tap(0), str(target.bridge)
    plan = {
        "source_monitor": str(vm.qemu.files.operator),
        "source_ram_file": str(vm.qemu.files.ram(vm.spec.ram_dir)),
        "target_argv": [*target.enter, *argv],
        "target_monitor": str(to.files.operator),
        "target_stderr": str(to.files.stderr),
        "target_address": target.migration_address,
        "plug_argv": [*target.enter, "ip", "link", "set", "dev", tap, "master", bridge, "up"],
    }
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(plan, file)
        file.flush()
        yield setting.PYTHON, "-m", "benchmarks.bare_migrate", file.name
    qemu = find_qemu(to, vm.qemu.platform)
    if qemu is None:
        raise SystemExit("the bare script's target QEMU has ended")
    settle_on_target(to, qemu, vm.host)
    await release(source, vm.spec.ram_dir)


async def moves(rounds: int, hosts: Sequence[Host]) -> list[Sample]:
    """The guest moved once each way per round, the counted rounds only."""
    samples = []
    for number in range(rounds + 1):
        order = (BARE, VMCKPT) if number % 2 == 0 else (VMCKPT, BARE)
        for way in order:
            sample = await move(way, number, hosts)
            print(
                f"{number:3} {way:7} wall {sample.wall_s:6.3f} s  fixed {sample.fixed_ms:6.1f} ms  "
                f"guest {sample.guest_downtime_ms:6.1f} ms  stopped {sample.stopped_ms:6.1f} ms",
                flush=True,
            )
            samples += [sample] if number else []
    return samples


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
    busy = await setting.busy_percent()
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


def judge(
    samples: Sequence[Sample], commands: dict[str, list[float]]
) -> tuple[dict[str, Any], list[Verdict]]:
    """Medians, ratios, and whether they keep the promises."""
    columns: dict[str, Callable[[Sample], float]] = {
        "wall_ms": lambda s: s.wall_s * 1e3,
        "transfer_ms": lambda s: s.transfer_s * 1e3,
        "fixed_ms": lambda s: s.fixed_ms,
        "before_ms": lambda s: s.before_s * 1e3,
        "after_ms": lambda s: s.after_s * 1e3,
        "qemu_downtime_ms": lambda s: float(s.qemu_downtime_ms),
        "stopped_ms": lambda s: s.stopped_ms,
        "guest_downtime_ms": lambda s: s.guest_downtime_ms,
        "quiet_gap_ms": lambda s: s.quiet_gap_ms,
    }
    values = {
        way: {name: [take(s) for s in samples if s.way == way] for name, take in columns.items()}
        for way in (BARE, VMCKPT)
    }
    spreads = {
        way: {name: spread(column) for name, column in table.items()}
        for way, table in values.items()
    }
    ratios = {
        name: ratio(values[VMCKPT][name], values[BARE][name])
        for name in ("wall_ms", "transfer_ms", "guest_downtime_ms", "stopped_ms")
    }
    started = {name: spread(column) for name, column in commands.items()}
    theirs_ms = spreads[BARE]["guest_downtime_ms"].median
    listed_ms = max(s.median for name, s in started.items() if "list" in name)
    verdicts = [
        Verdict("total time, ratio of medians", ratios["wall_ms"].value, 1.10),
        Verdict(
            "guest-visible downtime, ms (1.10 x or + 2 ms)",
            spreads[VMCKPT]["guest_downtime_ms"].median,
            max(1.10 * theirs_ms, theirs_ms + 2.0),
        ),
        Verdict("fixed cost of vmckpt migrate, ms", spreads[VMCKPT]["fixed_ms"].median, 250.0),
        Verdict("vmckpt --help, ms", started["vmckpt --help"].median, 200.0),
        Verdict("vmckpt vm list, ms (the slower case)", listed_ms, 300.0),
    ]
    summary = {
        "ways": {
            way: {name: asdict(s) for name, s in table.items()} for way, table in spreads.items()
        },
        "ratios": {name: asdict(r) for name, r in ratios.items()},
        "commands_ms": {name: asdict(s) for name, s in started.items()},
    }
    return summary, verdicts


def show(result: dict[str, Any]) -> None:
    """The result for people."""
    for way, table in result["summary"]["ways"].items():
        print(f"{way}:")
        print("\n".join(spread_lines({name: Spread(**s) for name, s in table.items()}, "")))
    print("commands:")
    commands = result["summary"]["commands_ms"].items()
    print("\n".join(spread_lines({name: Spread(**s) for name, s in commands}, "ms")))
    print("vmckpt / bare, ratios of medians:")
    for name, r in result["summary"]["ratios"].items():
        print(f"  {name:<38} {r['value']:.3f}  (95 %: {r['low']:.3f} to {r['high']:.3f})")
    for verdict in result["verdicts"]:
        met = "met   " if verdict["met"] else "MISSED"
        print(
            f"{met} {verdict['promise']}: {verdict['measured']:.3f}, limit {verdict['limit']:.3f}"
        )


async def main() -> None:
    """Measure, write, draw, print. SIGTERM ends it as Ctrl-C does: with the lab taken down."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help="moves each way that count")
    parser.add_argument("--starts", type=int, default=20, help="runs of each command")
    given = parser.parse_args()
    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    result = await measure(given.rounds, given.starts)
    path = setting.write_result("overhead", result)
    draw(result, path.with_suffix(".png"))
    show(result)
    print(f"written: {path} and its picture {path.with_suffix('.png').name}")


if __name__ == "__main__":
    asyncio.run(main())
