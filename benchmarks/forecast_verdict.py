"""Forecasts held against what came, and both against the aims.

Errors are judged twice: of each run, and of each way of a cell by the median of its runs.
"""

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
    runs = [[row] for row in ended]
    ways = list(by_cell_and_way(ended))
    inside = share(_inside(row["forecast"]["total_s"], row["total_time_s"]) for row in ended)
    pause_inside = share(
        _inside(row["forecast"]["downtime_s"], pause_ms(row) / 1e3) for row in ended
    )
    tried = [row for row in by_way if not given_up_early(row)]
    wrong = share(row["forecast_ends"] != (row["outcome"] == "completed") for row in tried)
    near = list(near_best(by_way))
    broken = [row for row in judged if "intent" in row and breaks(row)]
    aims = [
        *_errors("", runs),
        *_errors(", a way's middle run", ways),
        _between("total times within p10-p90", inside),
        _between("downtimes within p10-p90", pause_inside),
        _aim("ends, or not, against the forecast", wrong, WRONG_ENDS),
        {"aim": "the chosen way is near the best", "found": round(share(near), 4),
         "wanted": NEAR_BEST_SHARE, "met": share(near) >= NEAR_BEST_SHARE},
        _aim("intents broken and not said", len(broken), 0),
        _aim("forecasting, the slowest (ms)", max(row["forecast_ms"] for row in by_way),
             FORECAST_MS),
    ]  # fmt: skip
    counts |= {"ways_compared": len(ways), "choices": len(near)}
    return {**counts, "unforeseeable": unforeseeable(ways), "aims": aims}


def errors(rows: Iterable[Row]) -> dict[str, float]:
    """How far off the forecasts of runs were that were to end, and ended; no aims."""
    ended = forecast_and_ended(rows)
    if not ended:
        return {}
    pauses_ms = [abs(pause_error_ms(row)) for row in ended]
    totals = [abs(total_error(row)) for row in ended]
    inside = share(_inside(row["forecast"]["total_s"], row["total_time_s"]) for row in ended)
    pauses = share(_inside(row["forecast"]["downtime_s"], pause_ms(row) / 1e3) for row in ended)
    return {
        "runs": len(ended),
        "total_time_median": round(median(totals), 4),
        "total_time_p90": round(_nine_tenths(totals), 4),
        "downtime_median_ms": round(median(pauses_ms), 1),
        "total_times_inside": round(inside, 4),
        "downtimes_inside": round(pauses, 4),
    }


def unforeseeable(groups: Sequence[Sequence[Row]]) -> dict[str, float]:
    """How far off runs are from the middle one of their way, which no forecast knows before."""
    often = [group for group in groups if len(group) > 2]
    if not often:
        return {}
    totals, pauses_ms = list[float](), list[float]()
    for group in often:
        middle_s = median(row["total_time_s"] for row in group)
        middle_ms = median(pause_ms(row) for row in group)
        totals += [abs(row["total_time_s"] / middle_s - 1) for row in group]
        pauses_ms += [abs(pause_ms(row) - middle_ms) for row in group]
    return {
        "runs": len(totals),
        "total_time_median": round(median(totals), 4),
        "total_time_p90": round(_nine_tenths(totals), 4),
        "downtime_median_ms": round(median(pauses_ms), 1),
    }


def by_cell_and_way(rows: Iterable[Row]) -> Iterable[list[Row]]:
    """The runs of each way of each cell."""
    groups = dict[tuple[str, str], list[Row]]()
    for row in rows:
        groups.setdefault((row["cell"], row["way"]), []).append(row)
    return groups.values()


def _errors(of: str, groups: Sequence[Sequence[Row]]) -> list[dict[str, Any]]:
    """How far off total times and pauses were, each of a group's the median of its runs'."""
    totals = [abs(median(total_error(row) for row in group)) for group in groups]
    off_ms = [median(pause_error_ms(row) for row in group) for group in groups]
    off = [median(pause_error_ms(row) / max(pause_ms(row), 1.0) for row in g) for g in groups]
    middle_ms, middle = (median(abs(one) for one in errors) for errors in (off_ms, off))
    return [
        _aim(f"total time, median error{of}", median(totals), TOTAL_MEDIAN),
        _aim(f"total time, p90 error{of}", _nine_tenths(totals), TOTAL_P90),
        {"aim": f"downtime, median error{of} (ms, or part)",
         "found": [round(middle_ms, 1), round(middle, 4)],
         "wanted": [DOWNTIME_MEDIAN_MS, DOWNTIME_MEDIAN],
         "met": middle_ms <= DOWNTIME_MEDIAN_MS or middle <= DOWNTIME_MEDIAN},
    ]  # fmt: skip


def _nine_tenths(values: Sequence[float]) -> float:
    return sorted(values)[min(int(0.9 * len(values)), len(values) - 1)]


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


def pause_error_ms(row: Row) -> float:
    """Of the forecast's median; more than 0: it was longer."""
    return pause_ms(row) - 1e3 * float(row["forecast"]["downtime_s"][1])


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
    """For each cell and turn: whether the way chosen before its first run is hardly slower than the
    best; by the medians of what the ways took in all turns.

    A way that was not run, or given up before it could end, tells nothing. The best of the ways
    that the planner may choose without a constraint: one in which a broken link can cost the guest
    only where no other ends. Several channels count under a bandwidth limit too, where the planner
    leaves them out if they go beyond it: what is judged is the model's order of the ways.
    """
    for cell in dict.fromkeys(row["cell"] for row in judged):
        rows = [row for row in judged if row["cell"] == cell]
        completed = by_cell_and_way(row for row in rows if row["outcome"] == "completed")
        took_s = {runs[0]["way"]: median(run["total_time_s"] for run in runs) for runs in completed}
        safe = {way: s for way, s in took_s.items() if way not in POSTCOPIES}
        allowed = safe or took_s
        for turn in sorted({row["turn"] for row in rows}):
            first = next(row for row in rows if row["turn"] == turn)
            chosen = next((row for row in rows if row["way"] == first["chosen"]), None)
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
    # Rows of results/forecast.json have its former name.
    most = wished.get("--max-downtime") or wished["--max-pause"]
    return late or pause_ms(row) / 1e3 > parse_duration_s(most)
