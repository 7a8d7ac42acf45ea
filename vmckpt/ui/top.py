"""The overview of everything, as text. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vmckpt.replicate.status import ENDED
from vmckpt.ui.shown import one_line
from vmckpt.ui.tables import table
from vmckpt.units import format_age, format_duration, format_rate, format_size

_HOSTS = ("host", "answers", "vms", "running", "their memory", "free")
_VMS = ("vm", "host", "state", "vcpus", "memory", "dirties", "operation", "protected", "checkpoint")
# A dash for missing values.
NONE = "-"


def frame(facts: Mapping[str, Any]) -> str:
    """Format the output of `top --json` for people."""
    now_s = facts["at_unix_s"]
    parts = [
        table(_HOSTS, [_host(host, facts["vms"]) for host in facts["hosts"]]),
        table(_VMS, [_vm(vm, now_s) for vm in facts["vms"]]) if facts["vms"] else "no VMs",
        *(one_line(f"incomplete: {one['what']}: {one['why']}") for one in facts["silent"]),
    ]
    return "\n\n".join(parts)


def _host(host: Mapping[str, Any], vms: Iterable[Mapping[str, Any]]) -> Sequence[str]:
    mine = [vm for vm in vms if vm["host"] == host["name"]]
    running = [vm for vm in mine if vm["state"] == "running"]
    free = host["free_bytes"]
    return (
        host["name"],
        "no" if free is None else "yes",
        str(len(mine)),
        str(len(running)),
        format_size(sum(vm["memory_bytes"] for vm in running)),
        "?" if free is None else format_size(free),
    )


def _vm(vm: Mapping[str, Any], now_s: float) -> Sequence[str]:
    return (
        vm["name"],
        vm["host"],
        vm["state"],
        str(vm["vcpus"]),
        format_size(vm["memory_bytes"]),
        _dirties(vm["dirty_rate"], now_s),
        vm["operation"] or NONE,
        "; ".join(_protections(vm)) or NONE,
        _checkpoints(vm, now_s),
    )


def _dirties(measured: Mapping[str, Any] | None, now_s: float) -> str:
    """The last measurement: `top` takes none itself, since that would cost the guest something."""
    if measured is None:
        return NONE
    rate = format_rate(measured["bytes_per_s"])
    return f"{rate}, {_ago(measured['at_unix_s'], now_s)}"


def _protections(vm: Mapping[str, Any]) -> Iterable[str]:
    if replication := vm["replication"]:
        has_ended = replication["state"] in ENDED
        by = f"{replication['state']} by {replication['standby'] or '?'}"
        words = "unprotected" if has_ended else by
        if (behind_ms := replication["rpo_now_ms"]) is not None:
            words += f", {behind_ms:.0f} ms behind"
        if not (replication["answers"] or has_ended):
            words += ", its service is silent"
        if replication["output_commit"] is False:
            words += ", OUTPUT NOT HELD"
        yield words
    if guard := vm["guard"]:
        yield f"guard {guard['run']}: {guard['phase']}"


def _checkpoints(vm: Mapping[str, Any], now_s: float) -> str:
    """The number of checkpoints, and when the next one is due."""
    words = []
    if there := vm["checkpoints"]:
        words.append(f"{there['count']}, {_ago(there['last_unix_s'], now_s)}")
    if following := vm["next_checkpoint"]:
        in_s = following["next_unix_s"] - now_s
        words.append(f"next in {format_duration(in_s)}" if in_s > 0 else "next is due")
        if following["failures"]:
            words[-1] += f" ({following['failures']} failed)"
    return "; ".join(words) or NONE


def _ago(at_s: float, now_s: float) -> str:
    return f"{format_age(max(now_s - at_s, 0.0))} ago"
