"""Forecasts held against what came, and both against the aims."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

Row = Mapping[str, Any]

# Median and p90 of the total time's error; of the downtime's, in ms or as a part, whichever is met.
TOTAL_MEDIAN, TOTAL_P90 = 0.05, 0.12
DOWNTIME_MEDIAN_MS, DOWNTIME_MEDIAN = 5.0, 0.15
INSIDE = (0.75, 0.90)
WRONG_ENDS = 0.01
NEAR_BEST, NEAR_BEST_SHARE = 1.10, 0.90


def verdict(rows: Sequence[Row]) -> dict[str, Any]:
    """Figures of the judged rows alone, and which aims they meet."""
    judged = [row for row in rows if row["judged"]]
    ended = [row for row in judged if row["outcome"] == "completed" and row["forecast"]]
    if not ended:
        return {"runs": len(rows), "judged": len(judged), "aims": []}
    totals = sorted(abs(total_error(row)) for row in ended)
    pauses = [(pause_ms(row), 1e3 * row["forecast"]["downtime_s"][1]) for row in ended]
    off_ms = median(abs(came - expected) for came, expected in pauses)
    off = median(abs(came - expected) / max(came, 1.0) for came, expected in pauses)
    nine_tenths = totals[min(int(0.9 * len(totals)), len(totals) - 1)]
    inside = share(_inside(row["forecast"]["total_s"], row["total_time_s"]) for row in ended)
    wrong = share(row["forecast_ends"] != (row["outcome"] == "completed") for row in judged)
    near = share(_near_best(judged))
    aims = [
        _aim("total time, median error", median(totals), TOTAL_MEDIAN),
        _aim("total time, p90 error", nine_tenths, TOTAL_P90),
        _aim("downtime, median error (ms)", off_ms, DOWNTIME_MEDIAN_MS),
        _aim("downtime, median error (part)", off, DOWNTIME_MEDIAN),
        {"aim": "outcomes within p10-p90", "found": inside, "wanted": INSIDE,
         "met": INSIDE[0] <= inside <= INSIDE[1]},
        _aim("ends, or not, against the forecast", wrong, WRONG_ENDS),
        {"aim": "fastest forecast is near the fastest", "found": near, "wanted": NEAR_BEST_SHARE,
         "met": near >= NEAR_BEST_SHARE},
    ]  # fmt: skip
    return {"runs": len(rows), "judged": len(judged), "aims": aims}


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


def _inside(band: Sequence[float], came: float) -> bool:
    return band[0] <= came <= band[2]


def _near_best(judged: Sequence[Row]) -> list[bool]:
    """For each cell: whether the way that was forecast fastest took hardly longer than the best."""
    found = []
    for cell in {row["cell"] for row in judged}:
        ended = [
            row
            for row in judged
            if row["cell"] == cell and row["outcome"] == "completed" and row["forecast"]
        ]
        if len(ended) > 1:
            chosen = min(ended, key=lambda row: float(row["forecast"]["total_s"][1]))
            best_s = min(row["total_time_s"] for row in ended)
            found.append(chosen["total_time_s"] <= NEAR_BEST * best_s)
    return found
