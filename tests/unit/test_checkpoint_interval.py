"""The interval that loses least, against the expected wall time itself; and what is learned."""

import math
import random

import pytest

from vmckpt.codec import builtins, convert
from vmckpt.fleet.schedule.due import ClockReading
from vmckpt.fleet.schedule.learned import (
    MOST_COSTS,
    CheckpointCost,
    LearnedCosts,
    VmSample,
    interval,
)
from vmckpt.forecast.model.interval import FailureRate, best_work_s, wall_time_ratio

DAY_S = 86400.0
# What a day's stalls, a minute's and a slow whole save may be to a VM that fails so often.
RATIOS = [1e-12, 1e-9, 1e-6, 1e-4, 2e-4, 1e-3, 0.01, 0.1, 0.49, 0.51, 1.0, 3.0, 29.0, 31.0, 500.0]


def minimum(cost_s: float, mtbf_s: float) -> float:
    """Where the derivative of the wall time's logarithm is zero, by halving."""
    low_s, high_s = 1e-9 * math.sqrt(cost_s * mtbf_s), mtbf_s
    for _ in range(200):
        work_s = math.sqrt(low_s * high_s)
        if work_s / mtbf_s + math.expm1(-(work_s + cost_s) / mtbf_s) < 0:
            low_s = work_s
        else:
            high_s = work_s
    return work_s


@pytest.mark.parametrize("ratio", RATIOS)
def test_it_is_the_exact_optimum(ratio: float) -> None:
    mtbf_s = 30 * DAY_S
    assert best_work_s(ratio * mtbf_s, mtbf_s) == pytest.approx(
        minimum(ratio * mtbf_s, mtbf_s), rel=1e-6
    )


@pytest.mark.parametrize("ratio", [1e-4, 0.01, 1.0, 3.0])
def test_no_other_interval_takes_less_time(ratio: float) -> None:
    best_s = best_work_s(ratio, 1.0)
    least = wall_time_ratio(best_s, ratio, 1.0)
    for other in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0):
        assert wall_time_ratio(other * best_s, ratio, 1.0) > least


def test_it_is_work_time_without_the_cost() -> None:
    """Daly's higher-order formula: much public code adds the cost instead of taking it away."""
    cost_s, mtbf_s = 60.0, DAY_S
    root = cost_s / (2 * mtbf_s)
    daly_s = math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(root) / 3 + root / 9) - cost_s
    assert best_work_s(cost_s, mtbf_s) == pytest.approx(daly_s, rel=1e-3)


@pytest.mark.parametrize(("cost_s", "mtbf_s"), [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.0)])
def test_what_has_no_optimum_is_refused(cost_s: float, mtbf_s: float) -> None:
    with pytest.raises(ValueError, match="no optimum"):
        best_work_s(cost_s, mtbf_s)


def learned_ratios(failures: int, off: float, seeds: int) -> list[float]:
    """The intervals after so many failures, by the best one; the prior was wrong by `off`."""
    cost_s, mtbf_s = 0.05, 7 * DAY_S
    found = []
    for seed in range(seeds):
        rng = random.Random(seed)
        up_s = sum(rng.expovariate(1 / mtbf_s) for _ in range(failures))
        rate = FailureRate.prior(off * mtbf_s).observed(failures, up_s)
        found.append(best_work_s(cost_s, rate.mtbf_s) / best_work_s(cost_s, mtbf_s))
    return found


@pytest.mark.parametrize("off", [0.1, 1.0, 10.0])
def test_what_is_learned_comes_within_five_percent(off: float) -> None:
    found = learned_ratios(500, off, 100)
    assert sum(abs(one - 1) <= 0.05 for one in found) >= 95
    # What it costs is flat near its minimum: there a tenth as many are enough.
    cost_s, mtbf_s = 0.05, 7 * DAY_S
    best_s = best_work_s(cost_s, mtbf_s)
    least = wall_time_ratio(best_s, cost_s, mtbf_s) - 1
    ratios = learned_ratios(50, off, 100)
    more = [(wall_time_ratio(one * best_s, cost_s, mtbf_s) - 1) / least - 1 for one in ratios]
    assert sum(one <= 0.05 for one in more) >= 95


def at(seconds: float, boot: str = "a") -> ClockReading:
    return ClockReading(1e9 + seconds, seconds, boot)


def test_up_time_is_what_was_seen_and_a_failure_what_ended_running() -> None:
    seen = (
        LearnedCosts()
        .seen(VmSample(at(0), "q1", alive=True))
        .seen(VmSample(at(100), "q1", alive=True))
    )
    assert (seen.up_s, seen.failures) == (100, 0)
    failed = seen.seen(VmSample(at(120), "q1", alive=False, ended_running=True))
    assert (failed.up_s, failed.failures) == (110, 1)
    # It is counted once, and its next QEMU begins again.
    again = failed.seen(VmSample(at(200), "q1", alive=False, ended_running=True))
    again = again.seen(VmSample(at(300), "q2", alive=True)).seen(
        VmSample(at(310), "q2", alive=True)
    )
    assert (again.up_s, again.failures) == (120, 1)
    # One that was stopped or moved has not failed.
    stopped = again.seen(VmSample(at(400), "q2", alive=False)).seen(
        VmSample(at(500), "q3", alive=True)
    )
    assert (stopped.up_s, stopped.failures) == (120, 1)
    # Over a reboot of the scheduler's machine the wall clock counts.
    other = stopped.seen(VmSample(ClockReading(1e9 + 900, 20, "b"), "q3", alive=True))
    assert other.up_s == 120 + 400


def test_the_interval_is_held_within_what_is_possible() -> None:
    assert interval(LearnedCosts(), None, None) is None
    learned = LearnedCosts().paid(CheckpointCost(0.02, 2.0))
    free = interval(learned, 30 * DAY_S, None)
    assert free is not None
    assert free.every_s == pytest.approx(best_work_s(0.02, 30 * DAY_S) + 0.02)
    bounded = interval(learned, 30 * DAY_S, 60.0)
    assert bounded is not None
    assert (bounded.every_s, bounded.by) == (58.0, "--rpo")
    slow = interval(learned, 30 * DAY_S, 5.0)
    assert slow is not None
    assert (slow.every_s, slow.by) == (4.0, "how long one takes: --rpo cannot be kept")
    assert convert(LearnedCosts, builtins(learned)) == learned


def test_what_it_costs_is_the_mean_and_what_it_takes_nearly_the_longest() -> None:
    learned = LearnedCosts()
    for number in range(1, 11):
        learned = learned.paid(CheckpointCost(float(number), 10.0 - number))
    assert learned.cost is not None
    assert learned.cost.stall_s == pytest.approx(5.5)
    assert 6 < learned.cost.took_s < 9
    # What is so now counts in the end, whatever was before.
    for _ in range(5 * MOST_COSTS):
        learned = learned.paid(CheckpointCost(1.0, 1.0))
    assert learned.cost is not None
    assert learned.cost.stall_s == pytest.approx(1.0, rel=0.05)
    assert learned.cost.took_s == pytest.approx(1.0, rel=0.05)
