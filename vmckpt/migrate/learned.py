"""What moving between two hosts costs, learned from the run records of migrations that were."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from vmckpt.events.record import RunRecord
from vmckpt.plan.forecast import Way
from vmckpt.plan.link import Link, Moved, learn

# Older ones were on another day, with other neighbours.
LATEST_MOVES = 40
IDLE_ROUNDS = 2
ENCRYPTED = ", encrypted"
PLAIN, MULTIFD, ZSTD = "plain", "multifd", "zstd"
SENDING = {Way.MULTIFD: MULTIFD, Way.ZSTD: ZSTD}


def sending(way: Way, *, encrypted: bool) -> str:
    """How pages are sent on this way: what was learned of one does not hold for another."""
    return SENDING.get(way, PLAIN) + (ENCRYPTED if encrypted else "")


def learned(
    records: Iterable[RunRecord], source: str, target: str, vm: str | None = None
) -> dict[str, Link]:
    """The constants of the pair, in this direction, for every way of sending that was seen.

    What a move takes besides sending depends on the guest: `vm`'s own moves tell it where it has
    any.
    """
    ours = [
        record
        for record in records
        if record.request.get("source") == source and record.request.get("target") == target
    ]
    moves: dict[str, list[Moved]] = {}
    for record in ours:
        if (one := moved(record)) is not None:
            one = one._replace(fixed_counts=record.request.get("vm") == vm)
            moves.setdefault(_sent_by(record), []).append(one)
    found = {kind: learn(seen[-LATEST_MOVES:], _misses(ours, kind)) for kind, seen in moves.items()}
    return {kind: link for kind, link in found.items() if link is not None}


def moved(record: RunRecord) -> Moved | None:
    """The migration as numbers; None where it teaches nothing: undone, or held to a bandwidth."""
    result, samples = record.result or {}, record.samples
    if result.get("outcome") != "completed" or record.request.get("bandwidth_bytes_per_s"):
        return None
    counted = [sample for sample in samples if sample.get("normal_pages")]
    if not counted or not result.get("transfer_time_s"):
        return None
    last = counted[-1]
    active = [sample["normal_pages"] for sample in counted if sample["status"] == "active"]
    copied = int(record.request.get("disk_bytes") or 0)
    return Moved(
        pages=last["normal_pages"],
        zero_pages=last.get("zero_pages", 0),
        transfer_s=result["transfer_time_s"],
        total_s=result["total_time_s"],
        stalled_s=_stalled_s(result),
        last_pages=last["normal_pages"] - (active[-1] if active else 0),
        felt=result.get("guest_downtime_ms") is not None,
        slow_s=_phase_s(record.events, "drain"),
        copied_bytes=copied,
        copying_s=_phase_s(record.events, "mirror") if copied else 0.0,
    )


def pause_ms(result: Mapping[str, Any]) -> float | None:
    """How long the guest stood still: as it was felt, else by QEMU's word."""
    felt = result.get("guest_downtime_ms")
    return felt if felt is not None else result.get("downtime_ms")


def _stalled_s(result: Mapping[str, Any]) -> float | None:
    pause = pause_ms(result)
    # A guest that dirties nothing is switched over by QEMU without asking, target ready or not.
    idle = result.get("rounds", 0) <= IDLE_ROUNDS
    if result.get("method") == "postcopy":
        felt = result.get("guest_downtime_ms")  # QEMU's word hides the waiting for pages
        return felt / 1e3 if felt is not None else None
    if pause is None or idle or result.get("method") != "precopy":
        return None
    return pause / 1e3


def _phase_s(events: Sequence[Mapping[str, Any]], phase: str) -> float:
    began = [e for e in events if e["event"] == "PhaseBegan"]
    for event, after in pairwise(began):
        if event["phase"] == phase:
            return float(after["at_s"] - event["at_s"])
    return 0.0


def _sent_by(record: RunRecord) -> str:
    request, encryption = record.request, (record.result or {}).get("encryption", "off")
    how = ZSTD if request.get("compression") else MULTIFD if request.get("channels") else PLAIN
    return how + (ENCRYPTED if encryption != "off" else "")


def _misses(records: Sequence[RunRecord], kind: str) -> list[float]:
    """How far off the forecasts of the pair's total times were, of 1."""
    misses = []
    for record in records[-LATEST_MOVES:]:
        result, forecast = record.result or {}, record.forecast
        completed = result.get("outcome") == "completed"
        if forecast and completed and _sent_by(record) == kind:
            expected_s = forecast["forecast"]["total_s"][1]
            if expected_s:
                misses.append(result["total_time_s"] / expected_s - 1)
    return misses
