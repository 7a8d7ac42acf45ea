"""vmckpt top: hosts, VMs, operations, protection and checkpoints, as they are now."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from vmckpt.cli.loop import run_until_interrupted
from vmckpt.cli.output import Json, show

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from vmckpt.cli.overview import Overview

# What looking costs the hosts is nobody's wish more often.
LEAST_EVERY_S = 0.1
# Stores are looked into each so many looks: they may be large, and far away.
STORES_EVERY = 10


def top(
    every: Annotated[str, typer.Option(help="Look again after so long.")] = "2s",
    once: Annotated[bool, typer.Option("--once", help="One look.")] = False,
    json: Json = False,
) -> None:
    """Show hosts, VMs, operations, protection and checkpoints, again and again until Ctrl-C.

    It only looks: rates are those that were measured last, and an encrypted store's checkpoints
    are there if its key is in the environment or with the agent.
    """
    from vmckpt.cli.output import run
    from vmckpt.errors import UsageError
    from vmckpt.units import parse_duration_s

    every_s = parse_duration_s(every)
    if every_s < LEAST_EVERY_S:
        raise UsageError(
            f"--every {every} is too often",
            why=f"each look asks all hosts: {LEAST_EVERY_S:g} s is the least",
            remedy="write e.g. --every 2s",
        )
    if once:
        _show(run(_look(None)), as_json=json)
    else:
        run_until_interrupted(_watch(every_s, as_json=json))


async def _watch(every_s: float, *, as_json: bool) -> None:
    import asyncio
    import sys

    checkpoints: dict[str, Any] = {}
    number = 0

    async def look() -> dict[str, Any]:
        nonlocal checkpoints, number
        facts = await _look(checkpoints if number % STORES_EVERY else None)
        checkpoints = {vm["name"]: vm["checkpoints"] for vm in facts["vms"]}
        number += 1
        return facts

    if as_json or not sys.stdout.isatty():
        while True:
            _show(await look(), as_json=as_json)
            await asyncio.sleep(every_s)
    from vmckpt.ui.top_live import screen

    with screen() as draw:
        while True:
            draw(await look())
            await asyncio.sleep(every_s)


def _show(facts: dict[str, Any], *, as_json: bool) -> None:
    from vmckpt.ui.top import frame

    show(facts, frame(facts), as_json=as_json)


async def _look(checkpoints: "Mapping[str, Any] | None") -> dict[str, Any]:
    """All facts of a moment; `checkpoints` by VM, None: they are looked for."""
    import time

    from vmckpt.cli.overview import look
    from vmckpt.errors import StorageError
    from vmckpt.fleet.schedule.status import all_now, next_by_vm

    seen = await look()
    silent = list(seen.silent)
    if checkpoints is None:
        from vmckpt.checkpoint.catalogue import catalogue
        from vmckpt.hosts.inventory import all_hosts

        found = await catalogue(all_hosts(), None)
        silent += [error for error in found.silent if error.what not in {e.what for e in silent}]
        checkpoints = _by_vm(
            (one.manifest.vm, one.manifest.created_unix_s) for one in found.entries
        )
    guards: dict[str, Any] = {}
    try:
        guards = _guards()
    except StorageError as exc:  # a damaged file of one guard hides no VM
        silent.append(exc)
    scheduled = all_now()
    silent += scheduled.damaged
    return {
        "at_unix_s": time.time(),
        "hosts": [host._asdict() for host in seen.hosts],
        "vms": _vms(seen, checkpoints, guards, next_by_vm(scheduled.statuses)),
        "silent": [{"what": error.what, "why": error.why} for error in silent],
    }


def _by_vm(taken: "Iterable[tuple[str, float]]") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for vm, at_s in taken:
        one = found.setdefault(vm, {"count": 0, "last_unix_s": at_s})
        one["count"] += 1
        one["last_unix_s"] = max(one["last_unix_s"], at_s)
    return found


def _guards() -> dict[str, Any]:
    """Those that are not over, by VM. Raises StorageError."""
    from vmckpt.fleet.guard.record import load_all

    return {
        one.vm: {"run": one.run, "phase": one.phase.value}
        for one in load_all()
        if not one.phase.is_over
    }


def _vms(
    seen: "Overview",
    checkpoints: "Mapping[str, Any]",
    guards: "Mapping[str, Any]",
    scheduled: "Mapping[str, Any]",
) -> list[dict[str, Any]]:
    from vmckpt.forecast.measure.last_measured import all_kept

    rates = {
        vm: {"at_unix_s": at_s, "bytes_per_s": rate.bytes_per_s} for vm, at_s, rate in all_kept()
    }
    primaries = {
        one.get("vm"): {
            key: one.get(key)
            for key in ("state", "standby", "rpo_now_ms", "output_commit", "answers")
        }
        for one in seen.replications
        if one["role"] == "primary"
    }
    return [
        vm.to_json()
        | {
            "dirty_rate": rates.get(vm.name),
            "replication": primaries.get(vm.name),
            "guard": guards.get(vm.name),
            "checkpoints": checkpoints.get(vm.name),
            "next_checkpoint": scheduled.get(vm.name),
        }
        for vm in seen.vms
    ]
