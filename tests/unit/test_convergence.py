"""Will a pre-copy end? The judgement rests on rounds, never on one sample."""

from hypothesis import given
from hypothesis import strategies as st

from vmckpt.plan.convergence import NO_GAIN, PATIENCE_ROUNDS, eta_s, has_stalled

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
