"""What a guest dirtied when, and what follows for moves that begin at different moments."""

import math

import pytest

from vmckpt.memory.dirty_pages import PageSet
from vmckpt.memory.windows import Windows
from vmckpt.plan.course import STARTS, Course, From
from vmckpt.plan.dirtying import DirtyCurve

pytestmark = pytest.mark.unit

# A second each: it dirties 100 pages, the same ones again, nothing, 100 others.
CURVE = DirtyCurve.measured([[(1.0, 75.0)], [(2.0, 100.0)], [(4.0, 200.0)]], 1000)
COURSE = Course(
    (1.0, 2.0, 3.0, 4.0), ((100, 100, 100, 200), (100, 100, 200), (0, 100), (100,)), CURVE
)


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


def test_moves_begin_at_moments_of_the_first_half() -> None:
    assert COURSE.starts_s() == [0.0, 1.0, 2.0]
    many = Course(tuple(0.1 * n for n in range(1, 101)), (), CURVE)
    assert len(many.starts_s()) <= STARTS
    assert max(many.starts_s()) <= 5.0


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
