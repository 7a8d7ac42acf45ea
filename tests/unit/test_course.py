"""What a guest dirtied when, and what follows for moves that begin at different moments."""

import math
from collections.abc import Sequence
from itertools import accumulate

import pytest

from vmckpt.forecast.model.course import BEGINS_S, STARTS, DirtyProfile, From, OnAverage, Slowed
from vmckpt.forecast.model.dirtying import DirtyCurve
from vmckpt.memory.dirty_pages import PageSet
from vmckpt.memory.windows import Dirtied, Windows

pytestmark = pytest.mark.unit

# A second each: it dirties 100 pages, the same ones again, nothing, 100 others.
CURVE = DirtyCurve.measured([[(1.0, 75.0)], [(2.0, 100.0)], [(4.0, 200.0)]], 1000)
ROWS = ((100, 100, 100, 200), (100, 100, 200), (0, 100), (100,))
COURSE = DirtyProfile.seen((1.0, 2.0, 3.0, 4.0), ROWS, [()] * 4, CURVE)


def test_distinct_pages_between_two_moments() -> None:
    assert COURSE.between(0.0, 1.0) == 100
    assert COURSE.between(0.0, 2.0) == 100
    assert COURSE.between(2.0, 3.0) == 0
    assert COURSE.between(1.0, 4.0) == 200
    assert COURSE.between(2.0, 3.5) == pytest.approx(50)
    assert COURSE.between(1.5, 3.0) == pytest.approx(50)
    assert COURSE.between(3.0, 3.0) == 0


def test_beyond_what_was_seen_it_goes_on_as_on_average() -> None:
    assert COURSE.between(5.0, 7.0) == CURVE.within(2.0)
    assert COURSE.between(3.0, 5.0) == pytest.approx(100 + CURVE.within(2.0) - CURVE.within(1.0))


def test_a_load_counts_from_the_beginning_of_the_move() -> None:
    assert From(COURSE, 2.0).between(0.0, 1.0) == 0
    assert From(COURSE, 1.0).between(0.0, 3.0) == 200


def test_a_slowed_guest_dirties_later_from_then_on() -> None:
    half = Slowed(From(COURSE, 0.0), 2.0, 0.5)
    assert half.between(0.0, 2.0) == From(COURSE, 0.0).between(0.0, 2.0)
    assert half.between(2.0, 4.0) == From(COURSE, 0.0).between(2.0, 3.0)
    assert half.between(1.0, 6.0) == From(COURSE, 0.0).between(1.0, 4.0)
    quarter = Slowed(half, 4.0, 0.5)
    assert quarter.between(4.0, 8.0) == From(COURSE, 0.0).between(3.0, 4.0)
    assert Slowed(OnAverage(CURVE), 0.0, 0.5).between(0.0, 4.0) == CURVE.within(2.0)


def test_moves_begin_at_moments_of_the_first_half() -> None:
    starts_s = COURSE.starts_s()
    assert len(starts_s) == STARTS
    assert starts_s[0] == 0.0
    assert starts_s == sorted(starts_s)
    assert starts_s[-1] < 2.0


def test_windows_tell_the_course_in_spans() -> None:
    windows = Windows(1.0)
    for bits in (0b1, 0b10, 0b10, 0b100):
        windows.add(0, 0.5, PageSet(bits))
    course = windows.course()
    assert course.ends_s == (1.0, 2.0)
    assert course.pages == ((2, 3), (2,))


def test_a_course_that_is_not_asked_for_is_one_span() -> None:
    windows = Windows(math.inf)
    for bits in (0b1, 0b10, 0b10):
        windows.add(0, 0.5, PageSet(bits))
    assert windows.course().ends_s == (1.5,)
    assert windows.course().pages == ((2,),)


def test_a_long_window_is_a_span_with_what_its_parts_came_to() -> None:
    windows = Windows(1.0)
    windows.add(0, 0.5, PageSet(0b1), (Dirtied(0.25, 1),))
    windows.add(1, 1.0, PageSet(0b110), (Dirtied(0.25, 0), Dirtied(0.5, 1)))
    windows.add(1, 1.0, PageSet(0b110))
    course = windows.course()
    assert course.ends_s == (0.5, 1.5, 2.5)
    assert course.pages == ((1, 3, 3), (2, 2), (2,))
    assert course.counts == ((), (Dirtied(0.25, 0), Dirtied(0.5, 1)), ())


# As many pages within each time on average as it has that dirties 500 in a second, others each.
EVEN = DirtyCurve.measured([[(0.1, 50.0)], [(1.6, 800.0)], [(8.0, 4000.0)]], 1_000_000)


def _in_long_windows(busy: Sequence[float], window: int = 16) -> DirtyProfile:
    """Tenths of a second in which it dirties so many pages, looked at in windows of so many."""
    pages, counts, ends_s = list[int](), list[list[tuple[float, int]]](), list[float]()
    for first in range(0, len(busy), window):
        so_far = list(accumulate(busy[first : first + window]))
        pages.append(round(so_far[-1]))
        counts.append([(0.1 * (n + 1), round(one)) for n, one in enumerate(so_far[:-1])])
        ends_s.append(0.1 * (first + len(so_far)))
    rows = [list(accumulate(pages[first:])) for first in range(len(pages))]
    return DirtyProfile.seen(ends_s, rows, counts, EVEN)


def test_a_rhythm_is_seen_in_windows_that_are_longer_than_its_bursts() -> None:
    for turned in range(0, 30, 7):
        tenths = [*[0.0] * 30, *[200.0] * 10] * 2
        course = _in_long_windows([*tenths[turned:], *tenths[:turned]])
        assert course.rhythm_s == pytest.approx(4.0, abs=0.1)
        # The next work is as far away as it was at the beginning.
        until_s = 3.0 - 0.1 * turned
        assert course.between(8.0, 8.0 + until_s) == pytest.approx(0.0, abs=250)
        assert course.between(8.0 + until_s, 9.0 + until_s) == pytest.approx(2000, abs=250)


def test_that_nothing_new_comes_where_nothing_new_could_says_nothing() -> None:
    """It writes the same pages all the time: after the first part of each window none is new."""
    same = DirtyCurve.measured([[(0.1, 100.0)], [(0.2, 100.0)], [(8.0, 100.0)]], 1_000_000)
    counts = [[(0.1 * n, 100) for n in range(1, 16)]] * 5
    rows = [[100] * (5 - first) for first in range(5)]
    course = DirtyProfile.seen([1.6 * n for n in range(1, 6)], rows, counts, same)
    assert course.rhythm_s == 0.0
    assert course.between(2.4, 2.5) == pytest.approx(100)
    assert course.between(2.4, 4.0) == pytest.approx(100)


def test_two_looks_at_one_moment_are_one() -> None:
    counts = [[(0.5, 40), (0.5, 40), (1.0, 100)]]
    course = DirtyProfile.seen((1.0,), ((100,),), counts, CURVE)
    assert course.between(0.0, 1.0) == pytest.approx(100)
    assert 0 < course.between(0.0, 0.5) < 60


def _course(rates: list[int], span_s: float = 0.25) -> DirtyProfile:
    """Each span dirties so many pages that no other does."""
    rows = tuple(tuple(accumulate(rates[first:])) for first in range(len(rates)))
    ends_s = tuple(span_s * n for n in range(1, len(rates) + 1))
    return DirtyProfile.seen(ends_s, rows, [()] * len(rates), CURVE)


# Three seconds of rest, one of work.
BURSTS = [*[10] * 12, *[500] * 4] * 2


def test_a_rhythm_is_found_and_goes_on() -> None:
    course = _course(BURSTS)
    assert course.rhythm_s == pytest.approx(4.0, abs=0.1)
    exact = course._replace(rhythm_s=4.0)
    assert exact.between(8.0, 11.0) == 120
    assert exact.between(10.5, 11.5) == 20 + 1000
    # Across more than one period, and where it is longer than all that was seen.
    assert exact.between(16.5, 17.5) == 40
    assert exact.between(10.0, 20.0) == exact.between(2.0, 12.0)


def test_a_move_begins_now_where_the_rhythm_is_then() -> None:
    now_s = _course(BURSTS).now_s()
    assert now_s == pytest.approx(BEGINS_S, abs=0.2)
    later = _course([*BURSTS[6:], *BURSTS[:6]]).now_s()
    assert later == pytest.approx(BEGINS_S, abs=0.2)
    # What comes after that is what came after it a period before: the end of the rest, and work.
    course = _course([*BURSTS[10:], *BURSTS[:10]])
    assert (start_s := course.now_s()) is not None
    assert From(course, start_s).between(0.0, 1.2) > 1000
    assert From(_course(BURSTS), 0.4).between(0.0, 1.2) < 100


@pytest.mark.parametrize(
    "rates",
    [
        [100] * 32,
        [100 + 10 * (n % 3) for n in range(32)],
        [20 * n for n in range(32)],
        [500] + [0] * 31,
        [int(1000 * abs(math.sin(n * n))) for n in range(32)],
        [100],
        [],
    ],
    ids=["steady", "hardly varies", "rises", "once", "by chance", "one span", "nothing"],
)
def test_what_has_no_rhythm_has_none(rates: list[int]) -> None:
    course = _course(rates)
    assert course.rhythm_s == 0.0
    assert course.now_s() is None


def test_a_long_last_span_has_no_rhythm_of_its_own() -> None:
    rows = ((500, 510, 1010), (10, 510), (500,))
    assert DirtyProfile.seen((0.25, 0.5, 8.0), rows, [()] * 3, CURVE).rhythm_s == 0.0
