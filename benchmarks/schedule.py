"""How right `schedule --every auto` is: with all known, and while it learns. Arithmetic, no clock.

Known: the interval that the product chooses against the minimum of the expected wall time, found
without its formula, for checkpoints that cost from a millionth of the time between failures to all
of it; and against failures played one by one. Learned: VMs whose failures come at random, whose
checkpoints cost now more, now less, and of whose time between failures something wrong was assumed;
each chooses its intervals by the product's own code. Seeded: it comes out the same each time.

Run it by `make bench BENCH=schedule`. It writes results/schedule.json and .png.
"""

import math
import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks.schedule_plot import draw
from benchmarks.setting import write_result
from benchmarks.summary import Verdict
from vmckpt.fleet.schedule.learned import CheckpointCost, LearnedCosts, interval
from vmckpt.forecast.model.interval import best_work_s, wall_time_ratio

SEED = 8
RATIOS = [10 ** (exponent / 4) for exponent in range(-24, 1)]
# One VM for the second part: what its checkpoints cost is this on average, by a factor of two.
DAY_S = 86400.0
MTBF_S, COST_S, COST_SIGMA, TOOK_S = 7 * DAY_S, 0.05, math.log(2) / 1.6449, 3.0
ASSUMED = {"a tenth of it": 0.1, "right": 1.0, "ten times it": 10.0}
VMS = 200
AFTER = [0, 1, 3, 10, 30, 100, 200, 300, 500, 1000]
# The interval is chosen again so often between two failures.
PARTS, LEARNS_FROM = 3, 4
KNOWN_LIMIT, LEARNED_LIMIT, SHARE = 0.01, 0.05, 0.95


def main() -> None:
    """Everything, printed and written."""
    known = [one_known(ratio) for ratio in RATIOS]
    played = [one_played(ratio) for ratio in (1e-4, 1e-2, 0.3)]
    learned = {name: learning(factor) for name, factor in ASSUMED.items()}
    worst = max(abs(one["off"]) for one in known)
    enough = {name: first_within(rows) for name, rows in learned.items()}
    needed = max(AFTER[-1] if count is None else count for count in enough.values())
    cheap = {
        name: first_within(rows, "overhead_more_p95") or AFTER[-1] for name, rows in learned.items()
    }
    few = max(cheap.values())
    verdicts = [
        Verdict("interval against the exact optimum, all known", worst, KNOWN_LIMIT),
        Verdict(
            f"interval of 95 % of the VMs, learned, after {needed} failures",
            max(at(rows, needed)["off_p95"] for rows in learned.values()),
            LEARNED_LIMIT,
        ),
        Verdict(
            f"what checkpoints and failures cost 95 % of the VMs, learned, after {few} failures",
            max(at(rows, few)["overhead_more_p95"] for rows in learned.values()),
            LEARNED_LIMIT,
        ),
    ]
    found = {
        "seed": SEED,
        "known": known,
        "played": played,
        "vms": VMS,
        "mtbf_s": MTBF_S,
        "cost_s": COST_S,
        "learned": learned,
        "within_5_percent_after_failures": enough,
        "overhead_within_5_percent_after_failures": cheap,
        "verdicts": [
            {"promise": v.promise, "measured": v.measured, "limit": v.limit, "met": v.met}
            for v in verdicts
        ],
    }
    path = write_result("schedule", found)
    draw(found, path.with_suffix(".png"))
    print(f"written: {path} and its picture")
    for one in verdicts:
        word = "met" if one.met else "MISSED"
        print(f"  {one.promise}: {100 * one.measured:.7f} %, at most {100 * one.limit:g} %: {word}")
    for name, count in enough.items():
        print(f"  assumed {name}: 95 % of the VMs within 5 % of the best interval after {count}")
    for name, rows in learned.items():
        for row in rows:
            print(
                f"  assumed {name}, {row['failures']:4d} failures: off by {row['off_median']:.3f} "
                f"(95 %: {row['off_p95']:.3f}), which costs {row['overhead_more_median']:.4f} more "
                f"(95 %: {row['overhead_more_p95']:.4f})"
            )


def one_known(ratio: float) -> dict[str, float]:
    """What the rule chooses for a cost of so much of the time between failures."""
    best = minimum(lambda work: math.log(wall_time_ratio(work, ratio, 1.0)), ratio)
    young = math.sqrt(2 * ratio)
    daly = young * (1 + math.sqrt(ratio / 2) / 3 + ratio / 18) - ratio if ratio < 2 else 1.0
    return {
        "cost_by_mtbf": ratio,
        "best": best,
        "off": best_work_s(ratio, 1.0) / best - 1,
        "young_off": young / best - 1,
        "daly_off": daly / best - 1,
    }


def minimum(of: Callable[[float], float], ratio: float) -> float:
    """Where the slope of a function is 0; by halving, on differences of logarithms far apart.

    A minimum's place is known to half of the digits only that its value has; the place where two
    values at equal distance are equal, to more.
    """
    low, high = math.log(1e-3 * math.sqrt(ratio)), 0.0
    step = 0.05
    # Symmetric differences are off by the third derivative; it is taken out by halving the step.
    roots = []
    for width in (step, step / 2):
        a, b = low, high
        for _ in range(100):
            middle = (a + b) / 2
            if of(math.exp(middle + width)) < of(math.exp(middle - width)):
                a = middle
            else:
                b = middle
        roots.append(a)
    return math.exp(roots[1] + (roots[1] - roots[0]) / 3)


def one_played(ratio: float) -> dict[str, Any]:
    """Wall time by work, of failures that come one by one, around the interval that is chosen."""
    best = best_work_s(ratio, 1.0)
    rows = []
    for factor in (0.5, 0.8, 1.0, 1.25, 2.0):
        rng, work = random.Random(SEED), factor * best
        wall = done = 0.0
        for _ in range(40_000):
            up = rng.expovariate(1.0)
            wall += up
            done += up // (work + ratio) * work
        expected = wall_time_ratio(work, ratio, 1.0)
        rows.append({"factor": factor, "wall_by_work": wall / done, "expected": expected})
    return {"cost_by_mtbf": ratio, "rows": rows}


def learning(factor: float) -> list[dict[str, float]]:
    """How far off the intervals of many VMs are after so many failures each."""
    best_s = best_work_s(COST_S, MTBF_S)
    least = overhead(best_s)
    off: dict[int, list[float]] = {count: [] for count in AFTER}
    lost: dict[int, list[float]] = {count: [] for count in AFTER}
    since: dict[int, list[float]] = {count: [] for count in AFTER}
    for number in range(VMS):
        rng = random.Random(SEED * 1000 + number)
        learned, wall, weighed = LearnedCosts().paid(cost(rng)), 0.0, 0.0
        for failures in range(AFTER[-1] + 1):
            if failures in off:
                work_s = chosen(learned, factor)
                off[failures].append(abs(work_s / best_s - 1))
                lost[failures].append(overhead(work_s) / least - 1)
                since[failures].append(weighed / wall - 1 if wall else 0.0)
            up_s = rng.expovariate(1 / MTBF_S)
            for _ in range(PARTS):
                # Hundreds of checkpoints lie between two failures; so many are enough to learn.
                for _ in range(LEARNS_FROM):
                    learned = learned.paid(cost(rng))
                work_s = chosen(learned, factor)
                weighed += up_s / PARTS * overhead(work_s) / least
                learned = replace(learned, up_s=learned.up_s + up_s / PARTS)
            wall += up_s
            learned = replace(learned, failures=failures + 1)
    return [
        {
            "failures": count,
            "off_median": statistics.median(off[count]),
            "off_p95": percentile(off[count]),
            "overhead_more_median": statistics.median(lost[count]),
            "overhead_more_p95": percentile(lost[count]),
            "overhead_more_since_the_beginning_p95": percentile(since[count]),
        }
        for count in AFTER
    ]


def overhead(work_s: float) -> float:
    """What checkpoints and failures add to the time that work takes, by that time."""
    return wall_time_ratio(work_s, COST_S, MTBF_S) - 1


def cost(rng: random.Random) -> CheckpointCost:
    """A checkpoint's, of the mean COST_S."""
    mean = math.log(COST_S) - COST_SIGMA**2 / 2
    return CheckpointCost(rng.lognormvariate(mean, COST_SIGMA), TOOK_S)


def chosen(learned: LearnedCosts, factor: float) -> float:
    """The work time between two checkpoints that the product chooses now."""
    now = interval(learned, factor * MTBF_S, None)
    if now is None:
        raise ValueError("nothing was learned")
    return now.every_s - now.cost_s


def first_within(rows: list[dict[str, float]], key: str = "off_p95") -> int | None:
    """After how many failures, of those looked at, all is well from then on; None: never."""
    good = None
    for row in reversed(rows):
        if row[key] > LEARNED_LIMIT:
            break
        good = int(row["failures"])
    return good


def at(rows: list[dict[str, float]], failures: int) -> dict[str, float]:
    """The row of so many failures."""
    return next(row for row in rows if row["failures"] == failures)


def percentile(values: list[float]) -> float:
    """Of which SHARE are no more."""
    return sorted(values)[math.ceil(SHARE * len(values)) - 1]


if __name__ == "__main__":
    main()
