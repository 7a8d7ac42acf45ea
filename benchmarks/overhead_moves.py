"""One guest moved there and back, by `vmckpt migrate` or by the bare script, timed from outside.

See benchmarks/overhead.py for what is measured and why so.
"""

import asyncio
import json
import os
import re
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from benchmarks import setting
from vmckpt.hosts.local import LocalHost
from vmckpt.migrate.outcome.ends import End
from vmckpt.migrate.steps.handover import find_qemu, release, settle_on_destination
from vmckpt.qemu.monitor import session
from vmckpt.vm.argv import qemu_argv
from vmckpt.vm.inventory import Vm, find_vm
from vmckpt.vm.paths import new_qemu_id, vm_dir

NAME, NUMBER = "bench", 11
BARE, VMCKPT, ONE_CHANNEL = "bare", "vmckpt", "vmckpt, one channel"
# What is typed besides. By itself vmckpt sends over two channels, the script over one.
OPTIONS = {VMCKPT: (), ONE_CHANNEL: ("--method", "precopy")}
WAYS = (BARE, *OPTIONS)
# After so many rounds each way has come first equally often, in both directions.
BLOCK = 2 * len(WAYS)
# Without a tight limit QEMU may stop the guest with 0.2 s of sending left, or with none, as it
# happens: what the command adds is lost in that. The rounds take turns with both.
USUAL_LIMIT_MS = 300  # of vmckpt's and of QEMU's: no one types it
DOWNTIME_LIMITS_MS = (USUAL_LIMIT_MS, 30)
SETTLE_S = 1.5
# The guest's own load is about 25 % of two cores.
QUIET_PERCENT = 40.0
PATIENCE_S = 10.0
AFTER_S = 0.3
STATE = re.compile(r"@(\d+\.\d+):migrate_set_state new state ([\w-]+)")
STOPPED = re.compile(r"@(\d+\.\d+):vm_state_notify running 0")
RAN = re.compile(r"@(\d+\.\d+):vm_state_notify running 1")


@dataclass(frozen=True, slots=True)
class Sample:
    """One move. Times in seconds but for `_ms`.

    `stopped_ms` is from the source's vCPUs stopping to the target's starting, by both QEMUs' words,
    `resume_lag_ms` the part of it after the source said `completed` (negative: it ran before that);
    `quiet_gap_ms` the longest silence in the second before the move: the noise of this machine.
    `busy_percent` is how much of the machine was in use just before it, the guest's load included.
    `phases_s` says when vmckpt's phases began, by its run record, whose clock starts with the
    migration, not with the process.
    """

    way: str
    round: int
    downtime_limit_ms: int
    source: str
    wall_s: float
    transfer_s: float
    before_s: float
    after_s: float
    qemu_downtime_ms: int
    stopped_ms: float
    resume_lag_ms: float
    guest_downtime_ms: float
    quiet_gap_ms: float
    heartbeats_lost: int
    transferred_bytes: int
    rounds: int
    busy_percent: float
    phases_s: Mapping[str, float]

    @property
    def fixed_ms(self) -> float:
        """What was not QEMU transferring."""
        return (self.wall_s - self.transfer_s) * 1e3


@dataclass(frozen=True, slots=True)
class Referee:
    """When the source's migration began, stopped the guest and was completed (Unix seconds)."""

    began_s: float
    stopped_s: float
    completed_s: float

    @classmethod
    def read(cls, log: str) -> Self:
        """From the source's trace of the move."""
        states = [(match[2], float(match[1])) for match in STATE.finditer(log)]
        if not states or states[-1][0] != "completed":
            raise SystemExit(f"no migration was completed: {log}")
        stops = [float(at) for at in STOPPED.findall(log)]
        return cls(began_s=states[0][1], stopped_s=stops[0], completed_s=states[-1][1])


async def move(way: str, number: int, limit_ms: int, hosts: Sequence[LocalHost]) -> Sample:
    """Move the guest to the other host, one way or the other, and measure it."""
    await asyncio.sleep(SETTLE_S)
    busy = await setting.await_quiet(QUIET_PERCENT, PATIENCE_S)
    vm = await find_vm(NAME)
    target = next(host for host in hosts if host.name != vm.host.name)
    async with session(await vm.host.connect(vm.qemu.files.onlooker), "the source") as monitor:
        await monitor.tell("trace-event-set-state", {"name": "migrate_set_state", "enable": True})
    # Both ways remove the source's files: what is open stays readable.
    with vm.qemu.files.stderr.open() as log:
        log.seek(0, os.SEEK_END)
        async with _moving(way, limit_ms, vm, target) as argv:
            process = await setting.run(*argv)
        referee = Referee.read(log.read())
    until_ns = process.ended_ns + int(AFTER_S * 1e9)
    await asyncio.sleep(AFTER_S + 0.05)
    heard = await setting.heard(target, NUMBER, process.began_ns, until_ns)
    quiet = await setting.heard(target, NUMBER, process.began_ns - 10**9, process.began_ns)
    ran_s = max(
        float(at) for at in RAN.findall((await find_vm(NAME)).qemu.files.stderr.read_text())
    )
    result = json.loads(process.stdout)
    return Sample(
        way=way,
        round=number,
        downtime_limit_ms=limit_ms,
        source=vm.host.name,
        wall_s=process.wall_s,
        transfer_s=referee.completed_s - referee.began_s,
        before_s=referee.began_s - process.began_unix_s,
        after_s=process.ended_unix_s - referee.completed_s,
        qemu_downtime_ms=result["downtime_ms"],
        stopped_ms=(ran_s - referee.stopped_s) * 1e3,
        resume_lag_ms=(ran_s - referee.completed_s) * 1e3,
        guest_downtime_ms=heard["longest_gap_ms"],
        quiet_gap_ms=quiet["longest_gap_ms"],
        heartbeats_lost=heard["lost"],
        transferred_bytes=result["transferred_bytes"],
        rounds=result["rounds"],
        busy_percent=round(busy, 1),
        phases_s=_phases_s(result.get("run_record")),
    )


def _phases_s(run_record: str | None) -> dict[str, float]:
    if run_record is None:
        return {}
    record = json.loads(Path(run_record).read_text())
    phases = {e["phase"]: e["at_s"] for e in record["events"] if e["event"] == "PhaseBegan"}
    return phases | {"end": record["result"]["total_time_s"]}


@asynccontextmanager
async def _moving(
    way: str, limit_ms: int, vm: Vm, target: LocalHost
) -> AsyncIterator[tuple[str | Path, ...]]:
    """The command that moves `vm`. After the block vmckpt finds it on `target`, either way."""
    if way in OPTIONS:
        limit = () if limit_ms == USUAL_LIMIT_MS else ("--max-downtime", f"{limit_ms}ms")
        options = ("--json", *limit, *OPTIONS[way])
        yield setting.VMCKPT, "migrate", *options, NAME, target.name
        return
    directory = vm_dir(target.state_dir, NAME)
    source, to = End(vm.host, vm.qemu.files), End(target, directory.qemu(new_qemu_id()))
    await target.make_dir(to.files.path)
    await target.make_private_dir(to.files.memory(vm.spec.ram_dir))
    await target.write_text(directory.spec, vm.spec.text)
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
        "downtime_limit_ms": limit_ms,
        "plug_argv": [*target.enter, "ip", "link", "set", "dev", tap, "master", bridge, "up"],
    }
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(plan, file)
        file.flush()
        yield setting.PYTHON, "-m", "benchmarks.bare_migrate", file.name
    qemu = await find_qemu(to, vm.qemu.platform)
    if qemu is None:
        raise SystemExit("the bare script's target QEMU has ended")
    await settle_on_destination(to, qemu, vm.host)
    await release(source, vm.spec.ram_dir)


async def moves(rounds: int, hosts: Sequence[LocalHost]) -> list[Sample]:
    """The guest moved once each way per round; the counted rounds only, `rounds` at each limit.

    Each way comes equally often with each limit, in each place of a round and in each direction.
    """
    samples = []
    for number in range(-1, rounds * len(DOWNTIME_LIMITS_MS)):
        limit_ms = DOWNTIME_LIMITS_MS[number // BLOCK % len(DOWNTIME_LIMITS_MS)]
        turn = number % len(WAYS)
        for way in (*WAYS[turn:], *WAYS[:turn]):
            sample = await move(way, number, limit_ms, hosts)
            print(
                f"{number:3} {way:19} wall {sample.wall_s:6.3f} s  "
                f"fixed {sample.fixed_ms:6.1f} ms  "
                f"guest {sample.guest_downtime_ms:6.1f} ms  stopped {sample.stopped_ms:6.1f} ms",
                flush=True,
            )
            samples += [sample] if number >= 0 else []
    return samples
