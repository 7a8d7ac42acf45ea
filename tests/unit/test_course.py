"""What a guest dirtied when, and what follows for moves that begin at different moments."""

import math
from itertools import accumulate

import pytest

from vmckpt.memory.dirty_pages import PageSet
from vmckpt.memory.windows import Windows
from vmckpt.plan.course import BEGINS_S, STARTS, Course, From, OnAverage, Slowed
from vmckpt.plan.dirtying import DirtyCurve

pytestmark = pytest.mark.unit

# A second each: it dirties 100 pages, the same ones again, nothing, 100 others.
CURVE = DirtyCurve.measured([[(1.0, 75.0)], [(2.0, 100.0)], [(4.0, 200.0)]], 1000)
ROWS = ((100, 100, 100, 200), (100, 100, 200), (0, 100), (100,))
COURSE = Course.seen((1.0, 2.0, 3.0, 4.0), ROWS, [()] * 4, CURVE)


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


def _course(rates: list[int], span_s: float = 0.25) -> Course:
    """Each span dirties so many pages that no other does."""
    rows = tuple(tuple(accumulate(rates[first:])) for first in range(len(rates)))
    ends_s = tuple(span_s * n for n in range(1, len(rates) + 1))
    return Course.seen(ends_s, rows, [()] * len(rates), CURVE)


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
    assert Course.seen((0.25, 0.5, 8.0), rows, [()] * 3, CURVE).rhythm_s == 0.0
