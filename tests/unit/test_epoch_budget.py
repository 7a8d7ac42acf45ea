"""When pages are copied before an epoch instead of in its pause."""

from hypothesis import given
from hypothesis import strategies as st

from vmckpt.epoch.budget import MOST_PASSES, Budget
from vmckpt.replicate.primary.pace import LONGEST_S, PAUSED_SHARE, SHORTEST_S, EpochPace


def test_what_fits_the_pause_is_copied_in_it() -> None:
    assert not Budget(0.010, fixed_s=0.004, page_s=1e-5).wants_pass(599)
    assert Budget(0.010, fixed_s=0.004, page_s=1e-5).wants_pass(601)


def test_passes_end_when_the_guest_writes_as_fast_as_is_copied() -> None:
    budget = Budget(0.010, fixed_s=0.004, page_s=1e-5)
    assert budget.wants_pass(10_000)
    assert budget.wants_pass(6_000)
    assert not budget.wants_pass(5_000)
    budget.paused(5_000, 0.06, 0.05)
    assert budget.wants_pass(10_000)


@given(st.lists(st.integers(0, 1 << 20), min_size=MOST_PASSES + 1))
def test_an_epoch_comes_after_so_many_passes(left: list[int]) -> None:
    budget = Budget(0.001)
    assert not all([budget.wants_pass(pages) for pages in left])


def test_the_cost_of_pages_is_learned() -> None:
    budget = Budget(0.010)
    for _ in range(50):
        budget.paused(1000, 0.030, 0.025)
    assert abs(budget.fixed_s - 0.005) < 1e-4
    assert abs(budget.page_s - 25e-6) < 1e-6


def test_an_asked_pace_is_kept_and_auto_keeps_the_pauses_small() -> None:
    asked = EpochPace(0.025)
    asked.paused(1.0)
    assert asked.run_s == 0.025
    auto = EpochPace(None)
    assert auto.run_s == SHORTEST_S
    for _ in range(50):
        auto.paused(0.010)
    assert abs(0.010 / (0.010 + auto.run_s) - PAUSED_SHARE) < 0.001
    for _ in range(50):
        auto.paused(5.0)
    assert auto.run_s == LONGEST_S
