"""Forecasts held against what came, and both against the aims."""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from vmckpt.units import parse_duration_s

Row = Mapping[str, Any]

# Median and p90 of the total time's error; of the downtime's, in ms or as a part, whichever is met.
TOTAL_MEDIAN, TOTAL_P90 = 0.05, 0.12
DOWNTIME_MEDIAN_MS, DOWNTIME_MEDIAN = 5.0, 0.15
INSIDE = (0.75, 0.90)
WRONG_ENDS = 0.01
NEAR_BEST, NEAR_BEST_SHARE = 1.10, 0.90
FORECAST_MS = 50.0
POSTCOPIES = ("hybrid", "postcopy")


def verdict(rows: Sequence[Row]) -> dict[str, Any]:
    """Figures of the judged rows alone, and which aims they meet."""
    judged = [row for row in rows if row["judged"]]
    by_way = [row for row in judged if "intent" not in row]
    ended = forecast_and_ended(by_way)
    early = sum(given_up_early(row) for row in by_way)
    counts = {
        "runs": len(rows), "judged": len(judged), "compared": len(ended), "given_up_early": early,
    }  # fmt: skip
    if not ended:
        return {**counts, "aims": []}
    totals = sorted(abs(total_error(row)) for row in ended)
    pauses = [(pause_ms(row), 1e3 * row["forecast"]["downtime_s"][1]) for row in ended]
    off_ms = median(abs(came - expected) for came, expected in pauses)
    off = median(abs(came - expected) / max(came, 1.0) for came, expected in pauses)
    nine_tenths = totals[min(int(0.9 * len(totals)), len(totals) - 1)]
    inside = share(_inside(row["forecast"]["total_s"], row["total_time_s"]) for row in ended)
    pause_inside = share(
        _inside(row["forecast"]["downtime_s"], pause_ms(row) / 1e3) for row in ended
    )
    tried = [row for row in by_way if not given_up_early(row)]
    wrong = share(row["forecast_ends"] != (row["outcome"] == "completed") for row in tried)
    near = list(near_best(by_way))
    broken = [row for row in judged if "intent" in row and breaks(row)]
    aims = [
        _aim("total time, median error", median(totals), TOTAL_MEDIAN),
        _aim("total time, p90 error", nine_tenths, TOTAL_P90),
        {"aim": "downtime, median error (ms, or part)", "found": [round(off_ms, 1), round(off, 4)],
         "wanted": [DOWNTIME_MEDIAN_MS, DOWNTIME_MEDIAN],
         "met": off_ms <= DOWNTIME_MEDIAN_MS or off <= DOWNTIME_MEDIAN},
        _between("total times within p10-p90", inside),
        _between("downtimes within p10-p90", pause_inside),
        _aim("ends, or not, against the forecast", wrong, WRONG_ENDS),
        {"aim": "the chosen way is near the best", "found": round(share(near), 4),
         "wanted": NEAR_BEST_SHARE, "met": share(near) >= NEAR_BEST_SHARE},
        _aim("intents broken and not said", len(broken), 0),
        _aim("forecasting, the slowest (ms)", max(row["forecast_ms"] for row in by_way),
             FORECAST_MS),
    ]  # fmt: skip
    return {**counts, "cells_with_choice": len(near), "aims": aims}


def forecast_and_ended(rows: Iterable[Row]) -> list[Row]:
    """Those that were to end, and ended."""
    return [row for row in rows if row["outcome"] == "completed" and row["forecast_ends"]]


def given_up_early(row: Row) -> bool:
    """Whether it was forecast to end later than it was given: it says nothing of either."""
    worst_s = row["forecast"]["total_s"][2]
    late = worst_s is None or worst_s > row.get("give_up_s", math.inf)
    return bool(row["outcome"] == "timed-out" and row["forecast_ends"] and late)


def total_error(row: Row) -> float:
    """Of the forecast's median; more than 0: it took longer."""
    return float(row["total_time_s"] / row["forecast"]["total_s"][1] - 1)


def pause_ms(row: Row) -> float:
    """As the guest's heartbeats show, else QEMU's word."""
    felt = row["guest_downtime_ms"]
    return float(row["downtime_ms"] if felt is None else felt)


def share(true: Iterable[bool]) -> float:
    """Of all, how many; 0 of none."""
    values = list(true)
    return sum(values) / len(values) if values else 0.0


def _aim(what: str, found: float, most: float) -> dict[str, Any]:
    return {"aim": what, "found": round(found, 4), "wanted": most, "met": found <= most}


def _between(what: str, found: float) -> dict[str, Any]:
    met = INSIDE[0] <= found <= INSIDE[1]
    return {"aim": what, "found": round(found, 4), "wanted": INSIDE, "met": met}


def _inside(band: Sequence[float | None], came: float) -> bool:
    low, _, high = (math.inf if value is None else value for value in band)
    return low <= came <= high


def near_best(judged: Sequence[Row]) -> Iterable[bool]:
    """For each cell: whether the way chosen before its first run took hardly longer than the best.

    A way that was not run, or given up before it could end, tells nothing. The best of the ways
    that the planner may choose without a wish: one in which a broken link can cost the guest only
    where no other ends.
    """
    for cell in dict.fromkeys(row["cell"] for row in judged):
        rows = [row for row in judged if row["cell"] == cell]
        took_s = {row["way"]: row["total_time_s"] for row in rows if row["outcome"] == "completed"}
        safe = {way: s for way, s in took_s.items() if way not in POSTCOPIES}
        allowed = safe or took_s
        chosen = next((row for row in rows if row["way"] == rows[0]["chosen"]), None)
        if chosen is not None and allowed and not given_up_early(chosen):
            yield took_s.get(chosen["way"], math.inf) <= NEAR_BEST * min(allowed.values())


def breaks(row: Row) -> bool:
    """Whether a run by intent did not keep it though it was not refused."""
    if row["outcome"] == "refused":
        return False
    words = row["intent"]
    wished = dict(zip(words[::2], words[1::2], strict=True))
    if row["outcome"] != "completed":
        return True
    late = row["total_time_s"] > parse_duration_s(wished["--finish-within"])
    return late or pause_ms(row) / 1e3 > parse_duration_s(wished["--max-pause"])
