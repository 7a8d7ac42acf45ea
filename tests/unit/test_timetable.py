"""When moves begin and end, and how near that is to what nothing can beat."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.drain_fleets import fleet
from vmckpt.forecast.drain.crowding import Past, PastMove, forecast_s, learn
from vmckpt.forecast.drain.fleet import MoveCost, PlannedMove
from vmckpt.forecast.drain.placement import place
from vmckpt.forecast.drain.timetable import COMMON_SPREAD, bound_anywhere, play, timetable

pytestmark = pytest.mark.unit

costs = st.builds(MoveCost, st.floats(0, 3), st.floats(0, 20), st.floats(0, 3), st.floats(0, 2))
ends = st.tuples(st.sampled_from("AB"), st.sampled_from("XYZ"))


@st.composite
def moves(draw: st.DrawFn) -> list[PlannedMove]:
    pairs = draw(st.lists(ends, max_size=8))
    return [PlannedMove(f"vm{n}", *pair, draw(costs)) for n, pair in enumerate(pairs)]


@settings(max_examples=30)
@given(moves(), st.integers(1, 9), st.sampled_from((0.0, 0.3, 1.0)))
def test_nothing_is_over_before_the_bound_or_later_than_one_by_one(
    all_: list[PlannedMove], most: int, crowding: float
) -> None:
    table = timetable(all_, most, crowding)
    assert sorted(move.vm for move in table.moves) == sorted(move.vm for move in all_)
    assert table.at_once <= most
    assert table.bound_s <= table.total_s + 1e-6
    assert table.total_s <= sum(move.cost.alone_s for move in all_) + 1e-6
    low, middle, high = table.band_s()
    assert low <= middle <= high
    assert middle == table.total_s


@settings(max_examples=30)
@given(moves(), st.integers(1, 4), st.sampled_from((0.0, 0.5)))
def test_no_host_has_more_than_its_places(
    all_: list[PlannedMove], at_once: int, crowding: float
) -> None:
    spans = play(all_, at_once, crowding)
    for move in all_:
        span = spans[move.vm]
        assert span.end_s - span.begin_s >= move.cost.alone_s - 1e-6
        for end in (0, 1):
            mine = (move.source, move.destination)[end]
            # An instant within its beginning, at which others may be under way too.
            beside = [
                other
                for other in all_
                if (other.source, other.destination)[end] == mine
                and spans[other.vm].begin_s <= span.begin_s < spans[other.vm].end_s - 1e-9
            ]
            assert len(beside) <= at_once


def four(fixed_s: float = 1.0, work_s: float = 2.0, end_s: float = 0.5) -> list[PlannedMove]:
    cost = MoveCost(fixed_s, work_s, end_s)
    return [PlannedMove(f"vm{n}", "A", "XY"[n % 2], cost) for n in range(4)]


def test_several_at_once_hide_all_but_the_link() -> None:
    one_by_one = max(span.end_s for span in play(four(), 1).values())
    assert one_by_one == pytest.approx(4 * 3.5)
    table = timetable(four())
    assert table.total_s == pytest.approx(1.0 + 4 * 2.0 + 0.5)
    assert table.bound_s == pytest.approx(table.total_s)
    # No more at once than it takes.
    assert table.at_once == 2


def test_no_more_at_once_than_allowed() -> None:
    assert timetable(four(), 1).total_s == pytest.approx(14.0)


def test_where_moves_crowd_one_another_less_is_gained() -> None:
    free, crowded = (timetable(four(2.0, 0.1, 2.0), crowding=c).total_s for c in (0.0, 1.0))
    assert free == pytest.approx(4.4, abs=0.4)
    # One processor for all: what is not sending takes as long as one after the other.
    assert crowded >= 4 * 4.0


def test_what_drains_have_gone_by_is_left_for_a_clear_gain_only() -> None:
    little, much = four(fixed_s=0.2), four(fixed_s=1.0)
    assert timetable(little, crowding=0.9).at_once == 2
    assert timetable(little, crowding=0.9, usual=1).at_once == 1
    assert timetable(much, crowding=0.3, usual=1).at_once == 2
    # It is not done where it is not allowed any longer.
    assert timetable(little, 2, crowding=0.9, usual=4).at_once == 2
    assert learn([past(0.4, 3), past(0.4, 2)], 0.0).at_once == 2
    assert learn([past(0.4, 3), Past(past(0.4, 1).moves[:1], 1, 4.0)], 0.0).at_once == 3
    assert learn([], 0.0).at_once is None


def past(crowding: float, at_once: int, *, slower: float = 1.0) -> Past:
    """Four moves that took what they cost, in such a crowd; sending `slower` than was expected."""
    order = four(2.0, 1.0, 1.0)
    really = [move._replace(cost=MoveCost(2.0, 1.0 * slower, 1.0)) for move in order]
    spans = play(really, at_once, crowding)
    taken = tuple(PastMove(move, spans[move.vm]) for move in order)
    return Past(taken, at_once, max(span.end_s for span in spans.values()))


def test_crowding_is_learned_from_what_parts_took_in_a_crowd_and_alone() -> None:
    found = learn([past(0.4, 3), past(0.4, 2)], unknown=0.0)
    assert found.crowding == pytest.approx(0.4)
    assert found.around_s == pytest.approx((2.0, 1.0))
    assert found.work == pytest.approx(1.0)
    assert COMMON_SPREAD <= found.spread < 2 * COMMON_SPREAD


def test_a_link_that_is_slower_beside_others_is_learned() -> None:
    found = learn([past(0.0, 3, slower=1.7)], unknown=0.0)
    assert found.crowding == 0.0
    assert found.work == pytest.approx(1.7)
    # And what is learned from one number at once holds for another.
    other = past(0.4, 4, slower=1.7)
    assert forecast_s(other, learn([past(0.4, 2, slower=1.7)], 0.0)) == pytest.approx(
        other.took_s, rel=0.05
    )


def test_where_nothing_was_in_the_way_of_another_the_guess_stays() -> None:
    assert learn([], 0.5).crowding == learn([past(0.0, 1)], 0.5).crowding == 0.5
    assert learn([], 0.5).around_s is None
    assert learn([], 0.5).spread > learn([past(0.0, 1)] * 2, 0.5).spread


@pytest.mark.parametrize("drained", [1, 4])
def test_a_fleet_is_planned_near_the_bound(drained: int) -> None:
    """Smaller than those of benchmarks/drain, which judges many."""
    one = fleet(seed=7, vms=400, hosts=20, drained=drained)
    placed = place(one.movers, one.rooms)
    assert not placed.stay
    table = timetable(placed.moves)
    assert table.total_s <= 1.05 * bound_anywhere(one.movers, len(one.rooms), 8)
