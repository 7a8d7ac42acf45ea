"""Will a pre-copy end? The judgement rests on rounds, never on one sample."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmckpt.errors import TimedOutError
from vmckpt.forecast.model.convergence import NO_GAIN, PATIENCE_ROUNDS, Rounds, eta_s, has_stalled
from vmckpt.migrate.steps.steering import Steering, SteeringOrder, TransferFigures
from vmckpt.options.migration import Method, MigrationOptions, OnTimeout

sizes = st.integers(0, 1 << 40)


def test_shrinking_rounds_go_on() -> None:
    assert not has_stalled([1000, 500, 250, 125, 62])


def test_rounds_that_gain_nothing_stall() -> None:
    assert has_stalled([1000, 300, 300, 299])
    assert has_stalled([1000, 500, 300, 400, 310])


def test_one_bad_round_is_forgiven() -> None:
    assert not has_stalled([1000, 300, 310, 200])
    assert not has_stalled([1000, 300, 200, 310])


def test_the_first_round_is_all_of_ram_and_says_nothing() -> None:
    # Later rounds are larger than the first only when RAM is tiny; still nothing to compare with.
    assert not has_stalled([100, 900, 900])
    assert has_stalled([100, 900, 900, 900])


@given(st.lists(sizes, max_size=PATIENCE_ROUNDS + 1))
def test_nothing_stalls_before_there_is_something_to_compare(rounds: list[int]) -> None:
    assert not has_stalled(rounds)


@given(st.lists(sizes, min_size=4, max_size=12))
def test_a_stall_means_that_no_recent_round_beat_the_best_before(rounds: list[int]) -> None:
    best = min(rounds[1:-PATIENCE_ROUNDS])
    gained = any(left < NO_GAIN * best for left in rounds[-PATIENCE_ROUNDS:])
    assert has_stalled(rounds) is not gained


def test_eta_counts_only_what_is_gained_on_the_guest() -> None:
    assert eta_s(1000, 100.0, 0.0) == 10
    assert eta_s(1000, 100.0, 60.0) == 25


@given(sizes, st.floats(0, 1e12), st.floats(0, 1e12))
def test_a_guest_that_dirties_as_fast_as_the_link_has_no_eta(
    remaining_bytes: int, throughput: float, dirty_rate: float
) -> None:
    eta = eta_s(remaining_bytes, throughput, dirty_rate)
    assert (eta is None) is (dirty_rate >= throughput)
    assert eta is None or eta >= 0


def test_rounds_while_the_switchover_is_held_do_not_count() -> None:
    rounds = Rounds()
    assert rounds.see(1, 1000, held=True)
    for number in (2, 3, 4, 5):
        assert rounds.see(number, 7, held=True)
        assert not rounds.see(number, 99, held=True)
    assert not has_stalled(rounds.counting)
    for number in (6, 7, 8):
        rounds.see(number, 7)
    assert list(rounds.counting) == [7, 7, 7, 7]
    assert has_stalled(rounds.counting)
    assert len(rounds.left_bytes) == 8


def steered(method: Method, lefts: list[int], *, held: int, fitting_bytes: float = 0.0) -> int:
    """In which round post-copy is asked for when the first so many are held; 0: in none."""
    steering = Steering(MigrationOptions(method=method))
    for number, left in enumerate(lefts, 1):
        figures, is_held = TransferFigures(number, left, 10**6 * number, 1e6, 1e6), number <= held
        steering.see(figures, held=is_held)
        order = steering.steer(figures, 1.0, fitting_bytes=fitting_bytes)
        if order is not None:
            assert order[0] is SteeringOrder.START_POSTCOPY
            return number
    return 0


def test_a_hybrid_that_is_held_back_or_about_to_end_does_not_go_over() -> None:
    flat = [1000, *[50] * 9]
    assert steered(Method.HYBRID, flat, held=0) == 4
    assert steered(Method.HYBRID, flat, held=5) == 8
    assert steered(Method.HYBRID, flat, held=0, fitting_bytes=60) == 0
    assert steered(Method.HYBRID, flat, held=0, fitting_bytes=40) == 4


def test_a_time_limit_may_count_in_what_sending_memory_once_takes() -> None:
    options = MigrationOptions(timeout_passes=3.0, on_timeout=OnTimeout.POSTCOPY)
    steering, orders = Steering(options), list[float]()
    for number, at_s in enumerate((0.0, 2.0, 5.9, 6.1, 7.0), 1):
        figures = TransferFigures(number, 50, 10**6 * number, 1e6, 1e6)
        if steering.steer(figures, at_s) is not None:
            orders.append(at_s)
    assert orders == [6.1]
    giving_up = Steering(replace(options, on_timeout=OnTimeout.ABORT))
    for number, at_s in enumerate((0.0, 2.0, 5.9), 1):
        giving_up.steer(TransferFigures(number, 50, 1, 1e6, 1e6), at_s)
    with pytest.raises(TimedOutError, match=r"3 times the 2\.00 s"):
        giving_up.steer(TransferFigures(4, 50, 1, 1e6, 1e6), 6.1)
