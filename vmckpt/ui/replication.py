"""A replication in words: how it is now, and what happened to it."""

from typing import Any

from vmckpt.replicate.paths import FIRST, HEARD, SECOND, UNHEARD
from vmckpt.ui.tables import fields
from vmckpt.units import format_duration, format_size

# What a primary that answers tells of; one of another version of vmckpt may leave some out.
_FIGURES = (
    "acknowledged_epoch", "epoch_is_auto", "epoch_ms", "epochs_per_s", "may_run", "output_commit",
    "raw_bytes", "sent_bytes", "tracker",
)  # fmt: skip


def status_text(name: str, sides: list[dict[str, Any]]) -> str:
    """Both sides' status (`replicate status --json`) for people."""
    about = sides[0]
    lines = [f"{name}: {about.get('primary') or '?'} -> {about.get('standby') or '?'}"]
    pairs: list[tuple[str, str]] = []
    for side in sides:
        pairs += _primary(side) if side["role"] == "primary" else _standby(side)
    return "\n".join([*lines, *(f"  {line}" for line in fields(pairs).splitlines())])


def event_text(event: dict[str, Any]) -> str:
    """A line of `replicate events`."""
    state = event["state"] + (f" ({event['ending']})" if event.get("ending") else "")
    if event.get("may_run") is False:
        state += ", the guest may not run: its lease has ended"
    if event.get("output_commit") is False:
        state += ", output not held"
    paths = event.get("paths", {})
    state += "".join(f", {path} path {how}" for path, how in paths.items() if how in UNHEARD)
    if paths and set(paths.values()) == {HEARD}:
        state += ", heard over both paths"
    why = f": {event['why']}" if event.get("why") else ""
    where = f"{event['host']} {event.get('role', '?')}"
    return f"{event['time']}  {where:<20}  {state}, term {event.get('term', '?')}{why}"


def _primary(side: dict[str, Any]) -> list[tuple[str, str]]:
    pairs = [("primary", _where(side)), *_paths(side)]
    if side.get("epochs") is None or not side["answers"]:
        return pairs
    if any(side.get(name) is None for name in _FIGURES):
        return [*pairs, ("figures", f"{side['host']} has another version of vmckpt: see --json")]
    if not side["may_run"]:
        pairs.append(("guest", "STOPPED: its lease has ended, until the arbiter answers again"))
    if side.get("rpo_now_ms") is not None:
        pairs.append(("safe until", f"{side['rpo_now_ms']:g} ms ago (epoch {_epoch(side)})"))
    length = f"{side['epoch_ms']:g} ms{' (auto)' if side['epoch_is_auto'] else ''}"
    pairs += [
        ("epochs", f"{side['epochs_per_s']:g} a second, of {length}"),
        ("pauses", _spread(side, "pause")),
        *_lease(side),
        ("written", f"found by {side['tracker']}"),
        ("output", _output(side)),
        ("sent", f"{format_size(side['sent_bytes'])} for {format_size(side['raw_bytes'])} written"),
    ]
    if side.get("slowed_percent"):
        slowed = f"{side['slowed_percent']} % of its time: it writes faster than the link takes"
        pairs.append(("held back", slowed))
    if side.get("disk_bytes") is not None and side.get("disk_bytes_not_sent") is not None:
        known = format_size(side["disk_bytes_not_sent"])
        pairs.append(("disks", f"{format_size(side['disk_bytes'])}, {known} the same already"))
    return pairs


def _lease(side: dict[str, Any]) -> list[tuple[str, str]]:
    """Of a service of an older vmckpt that is not known."""
    if side.get("lease_s") is None:
        return []
    return [
        ("lease", f"{side['lease_s']:g} s, renewed each third of it, at {side.get('arbiter', '?')}")
    ]


def _standby(side: dict[str, Any]) -> list[tuple[str, str]]:
    pairs = [("standby", _where(side))]
    if side["answers"] and side.get("heard_ms_ago") is not None:
        received = format_size(side.get("received_bytes") or 0)
        heard = f"{side['heard_ms_ago']:g} ms ago, {received} so far"
        pairs += [("has epoch", str(side.get("epoch", "?"))), ("heard", heard)]
    pairs += _paths(side)
    if side.get("took_over_ms") is not None:
        pairs.append(("took over", f"in {side['took_over_ms']:g} ms"))
    return pairs


def _paths(side: dict[str, Any]) -> list[tuple[str, str]]:
    """How the other side is heard, while this one lives."""
    if not side["answers"]:
        return []
    labels = {FIRST: "connection", SECOND: "2nd path"}
    paths = side.get("paths") or {}
    return [(labels[path], _path(side, path)) for path in labels if path in paths]


def _path(side: dict[str, Any], path: str) -> str:
    how = str(side["paths"][path])
    if how == "none":
        return f"none: {side.get('second_path_lacks') or 'it was not asked for'}"
    addresses = (side.get("path_addresses") or {}).get(path) or ("?", "?")
    here, there = addresses[0], addresses[-1]
    ago_ms = (side.get("path_heard_ms_ago") or {}).get(path)
    words = {
        "heard": f"{there} is heard at {here}",
        "one way": f"ONE WAY: {there} is heard at {here}, but hears nothing",
        "silent": f"SILENT: {there} is not heard at {here}",
        "waiting": f"nothing came from {there} to {here} yet",
    }.get(how, how)
    if how == "silent" and ago_ms is not None:
        words += f", for {format_duration(ago_ms / 1e3)}"
    return words


def _where(side: dict[str, Any]) -> str:
    words = f"{side['host']}, {side['state']}"
    if side.get("term"):
        words += f", term {side['term']}"
    return words + (f": {side['why']}" if side.get("why") else "")


def _epoch(side: dict[str, Any]) -> str:
    return str(side["acknowledged_epoch"])


def _output(side: dict[str, Any]) -> str:
    if not side["output_commit"]:
        return "NOT HELD: after a failover the guest may have said what it does not know"
    return f"held until safe, {_spread(side, 'output_latency')}"


def _spread(side: dict[str, Any], what: str) -> str:
    median, worst = side.get(f"{what}_p50_ms"), side.get(f"{what}_p99_ms")
    if median is None or worst is None:
        return "none yet"
    return f"{median:g} ms, p99 {worst:g} ms"
