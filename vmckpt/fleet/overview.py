"""All hosts, VMs and replications now, with the state of guards, schedules and stores.

For `top`, `metrics` and programs.
"""

import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from vmckpt.drivers.driver import VmInfo
from vmckpt.drivers.find import inspect_everywhere
from vmckpt.errors import VmckptError
from vmckpt.hosts.every import ask_every
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory.inventory import all_hosts
from vmckpt.replicate.operator.sides import ReplicaSide, all_sides, latest


class HostNow(NamedTuple):
    """A host; `free_bytes` is memory for new guests, None if the host is silent."""

    name: str
    free_bytes: int | None


class Overview(NamedTuple):
    """`replications` has both sides of each; `silent` explains what is missing."""

    hosts: list[HostNow]
    vms: list[VmInfo]
    replications: list[ReplicaSide]
    silent: list[VmckptError]


async def overview() -> Overview:
    """Ask all hosts; silent ones do not delay the others."""

    async def now(host: Host) -> HostNow:
        return HostNow(host.name, await host.available_memory_bytes())

    everywhere = all_hosts()
    up = {host.name: host for host in (await ask_every(everywhere, now)).given}
    found = await inspect_everywhere()
    sides = [side for some in (await all_sides(everywhere)).given for side in some]
    return Overview(
        [up.get(host.name, HostNow(host.name, None)) for host in everywhere],
        found.given,
        sides,
        found.silent,
    )


async def facts(checkpoints: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """All facts of a moment, in the format of `top --json`.

    `checkpoints` are those of an earlier moment, by VM; None: query the stores.
    """
    from vmckpt.fleet.guard.record import load_all as load_guards
    from vmckpt.fleet.schedule.status import all_now, next_by_vm

    seen = await overview()
    silent = list(seen.silent)
    if checkpoints is None:
        from vmckpt.checkpoint.catalogue.catalogue import catalogue

        found = await catalogue(all_hosts(), None)
        silent += [error for error in found.silent if error.what not in {e.what for e in silent}]
        checkpoints = _by_vm(
            (one.manifest.vm, one.manifest.created_unix_s) for one in found.entries
        )
    guarding = load_guards()
    silent += guarding.damaged
    guards = {
        one.vm: {"run": one.run, "phase": one.phase.value}
        for one in guarding.records.values()
        if not one.phase.is_over
    }
    scheduled = all_now()
    silent += scheduled.damaged
    return {
        "at_unix_s": time.time(),
        "hosts": [host._asdict() for host in seen.hosts],
        "vms": _vms(seen, checkpoints, guards, next_by_vm(scheduled.statuses)),
        "silent": [{"what": error.what, "why": error.why} for error in silent],
    }


def _by_vm(taken: Iterable[tuple[str, float]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for vm, at_s in taken:
        one = found.setdefault(vm, {"count": 0, "last_unix_s": at_s})
        one["count"] += 1
        one["last_unix_s"] = max(one["last_unix_s"], at_s)
    return found


def _vms(
    seen: Overview,
    checkpoints: Mapping[str, Any],
    guards: Mapping[str, Any],
    scheduled: Mapping[str, Any],
) -> list[dict[str, Any]]:
    from vmckpt.forecast.measure.last_measured import all_kept

    rates = {
        vm: {"at_unix_s": at_s, "bytes_per_s": rate.bytes_per_s} for vm, at_s, rate in all_kept()
    }
    protections = {
        name: {
            "state": side.status.state,
            "standby": side.status.standby if side.status.is_primary else None,
            "rpo_now_ms": side.status.rpo_now_ms,
            "output_commit": side.status.output_commit,
            "answers": side.answers,
        }
        for name, side in latest(seen.replications).items()
    }
    return [
        vm.to_json()
        | {
            "dirty_rate": rates.get(vm.name),
            "replication": protections.get(vm.name),
            "guard": guards.get(vm.name),
            "checkpoints": checkpoints.get(vm.name),
            "next_checkpoint": scheduled.get(vm.name),
        }
        for vm in seen.vms
    ]
