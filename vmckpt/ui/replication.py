"""A replication in words: its status and its events."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from vmckpt.replicate.operator.sides import ReplicaSide, latest
from vmckpt.replicate.paths import FIRST, HEARD, SECOND, UNHEARD
from vmckpt.replicate.status import COPYING, ReplicaStatus
from vmckpt.ui.tables import fields
from vmckpt.units import format_duration, format_size, format_time


def status_text(name: str, sides: Sequence[ReplicaSide]) -> str:
    """Format both sides' status (`replicate status --json`) for people."""
    about = next(iter(latest(sides).values()), sides[0]).status
    head = f"{name}: {about.primary or '?'} -> {about.standby or '?'}"
    pairs: list[tuple[str, str]] = []
    for side in sides:
        pairs += _primary(side) if side.status.is_primary else _standby(side)
    return f"{head}\n{fields(pairs, indent='  ')}"


def event_text(event: dict[str, Any]) -> str:
    """Format a line of `replicate events`."""
    state = event["state"]
    if event.get("may_run") is False and event["state"] != COPYING:  # it has no lease yet
        state += ", the guest may not run: its lease has ended"
    if event.get("output_commit") is False:
        state += ", output not held"
    paths = event.get("paths", {})
    state += "".join(f", {path} path {how}" for path, how in paths.items() if how in UNHEARD)
    if paths and set(paths.values()) == {HEARD}:
        state += ", heard over both paths"
    why = f": {event['why']}" if event.get("why") else ""
    where = f"{event['host']} {event.get('role', '?')}"
    return f"{_local(event['time'])}  {where:<20}  {state}, term {event.get('term', '?')}{why}"


def _local(time: str) -> str:
    """An event's time, which is in UTC, in the local time zone; unchanged if it is not a time."""
    try:
        unix_s = datetime.fromisoformat(time).timestamp()
    except (ValueError, OverflowError):
        return time
    return f"{format_time(unix_s)}.{round(unix_s * 1e3) % 1000:03}"


def _primary(side: ReplicaSide) -> list[tuple[str, str]]:
    status = side.status
    pairs = [("primary", _where(side)), *_paths(side)]
    if status.epochs is None or not side.answers:
        return pairs
    if (
        status.acknowledged_epoch is None or status.epoch_ms is None or status.epochs_per_s is None
        or status.raw_bytes is None or status.sent_bytes is None
        or None in (status.epoch_is_auto, status.may_run, status.output_commit, status.tracker)
    ):  # fmt: skip
        return [*pairs, ("figures", f"{side.host.name} has another version of vmckpt: see --json")]
    if not status.may_run:
        pairs.append(("guest", "STOPPED: its lease has ended, until the arbiter answers again"))
    if status.rpo_now_ms is not None:
        epoch = status.acknowledged_epoch
        pairs.append(("safe until", f"{status.rpo_now_ms:g} ms ago (epoch {epoch})"))
    length = f"{status.epoch_ms:g} ms{' (auto)' if status.epoch_is_auto else ''}"
    pairs += [
        ("epochs", f"{status.epochs_per_s:g} per second, of {length}"),
        ("pauses", _spread(status.pause_p50_ms, status.pause_p99_ms)),
        *_lease(status),
        ("tracking", str(status.tracker)),
        ("output", _output(status)),
        ("sent", f"{format_size(status.sent_bytes)} for {format_size(status.raw_bytes)} written"),
    ]
    if status.slowed_percent:
        slowed = f"{status.slowed_percent:g} % of its time: it writes faster than the link takes"
        pairs.append(("held back", slowed))
    if status.disk_bytes is not None and status.disk_bytes_not_sent is not None:
        known = format_size(status.disk_bytes_not_sent)
        pairs.append(("disks", f"{format_size(status.disk_bytes)}, {known} already identical"))
    return pairs


def _lease(status: ReplicaStatus) -> list[tuple[str, str]]:
    """The lease; unknown for a service of an older vmckpt."""
    if status.lease_s is None:
        return []
    location = status.arbiter or "?"
    return [
        ("lease", f"{status.lease_s:g} s, renewed every {status.lease_s / 3:.2g} s, at {location}")
    ]


def _standby(side: ReplicaSide) -> list[tuple[str, str]]:
    status = side.status
    pairs = [("standby", _where(side))]
    if side.answers and status.heard_ms_ago is not None:
        received = format_size(status.received_bytes or 0)
        heard = f"{status.heard_ms_ago:g} ms ago, {received} so far"
        epoch = "?" if status.epoch is None else str(status.epoch)
        pairs += [("has epoch", epoch), ("heard", heard)]
    pairs += _paths(side)
    if status.took_over_ms is not None:
        pairs.append(("took over", f"in {status.took_over_ms:g} ms"))
    return pairs


def _paths(side: ReplicaSide) -> list[tuple[str, str]]:
    """The paths on which the other side is reachable, while this one runs."""
    if not side.answers:
        return []
    labels = {FIRST: "connection", SECOND: "2nd path"}
    paths = side.status.paths or {}
    return [
        (label, _path(side.status, path, paths[path]))
        for path, label in labels.items()
        if path in paths
    ]


def _path(status: ReplicaStatus, path: str, how: str) -> str:
    if how == "none":
        return f"none: {status.second_path_lacks or 'it was not asked for'}"
    addresses = (status.path_addresses or {}).get(path) or ("?", "?")
    here, there = addresses[0], addresses[-1]
    ago_ms = (status.path_heard_ms_ago or {}).get(path)
    words = {
        "heard": f"{here} hears {there}",
        "one way": f"ONE WAY: {here} hears {there}, which hears nothing",
        "silent": f"SILENT: {there} is not heard at {here}",
        "waiting": f"nothing came from {there} to {here} yet",
    }.get(how, how)
    if how == "silent" and ago_ms is not None:
        words += f", for {format_duration(ago_ms / 1e3)}"
    return words


def _where(side: ReplicaSide) -> str:
    status = side.status
    words = f"{side.host.name}, {status.state}"
    if status.term:
        words += f", term {status.term}"
    return words + (f": {status.why}" if status.why else "")


def _output(status: ReplicaStatus) -> str:
    if not status.output_commit:
        return "NOT HELD: after a failover the guest may not know what it has sent"
    held = _spread(status.output_latency_p50_ms, status.output_latency_p99_ms)
    return f"held until safe, {held}"


def _spread(median_ms: float | None, worst_ms: float | None) -> str:
    if median_ms is None or worst_ms is None:
        return "none yet"
    return f"median {median_ms:g} ms, p99 {worst_ms:g} ms"
