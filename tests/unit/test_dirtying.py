"""U(t): windows that are joined, and the curve through what was seen."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmckpt.codec import builtins, convert
from vmckpt.forecast.model.dirtying import DirtyCurve
from vmckpt.memory.dirty_pages import PageSet
from vmckpt.memory.windows import Dirtied, Windows
from vmckpt.ui.charts import bars

pytestmark = pytest.mark.unit

GROUPS = st.lists(
    st.lists(st.tuples(st.floats(0.01, 100), st.floats(0, 1e6)), min_size=1, max_size=8),
    min_size=1,
    max_size=8,
)


def test_neighbours_are_joined_and_pages_counted_once() -> None:
    windows = Windows()
    for pages in (0b0011, 0b0110, 0b1000, 0b1000):
        windows.add(0, 0.05, PageSet(pages))
    seen = windows.samples()
    assert [one.pages for one in seen[0]] == [2, 2, 1, 1]
    assert seen[1] == [Dirtied(0.1, 3), Dirtied(0.1, 1)]
    assert seen[2] == [Dirtied(0.2, 4)]
    assert windows.all.count == 4


def test_windows_get_longer_and_the_whole_time_counts_too() -> None:
    windows = Windows()
    windows.add(0, 0.05, PageSet(0b1))
    windows.note(0, 0.05, 1)
    windows.add(1, 0.1, PageSet(0b110))
    windows.add(1, 0.1, PageSet(0b110))
    windows.add(1, 0.1, PageSet(0b1000))
    seen = windows.samples()
    assert [one.pages for one in seen[0]] == [1, 1]
    assert [one.pages for one in seen[1]] == [2, 2, 1]
    assert [one.pages for one in seen[2]] == [2]
    (whole,) = seen[3]
    assert whole.t_s == pytest.approx(0.35)
    assert whole.pages == 4


@given(st.integers(0, 1 << 80))
def test_page_numbers_are_the_bits(bits: int) -> None:
    numbers = list(PageSet(bits).numbers())
    assert sum(1 << number for number in numbers) == bits
    assert numbers == sorted(numbers)


@given(GROUPS, st.lists(st.floats(0, 300), min_size=2, max_size=20), st.integers(1, 1 << 20))
def test_more_time_never_dirties_less_and_never_more_than_there_is(
    groups: list[list[tuple[float, float]]], times: list[float], total: int
) -> None:
    curve = DirtyCurve.measured(groups, total)
    for quantile in (0.1, 0.5, 0.9):
        pages = [curve.within(t_s, quantile) for t_s in sorted(times)]
        assert pages == sorted(pages)
        assert 0 <= pages[0] <= pages[-1] <= total
    for t_s in times:
        low, middle, high = (curve.within(t_s, quantile) for quantile in (0.1, 0.5, 0.9))
        assert low <= middle * (1 + 1e-9) + 1e-9
        assert middle <= high * (1 + 1e-9) + 1e-9


@given(GROUPS, st.integers(1, 1 << 20))
def test_a_curve_survives_its_record(groups: list[list[tuple[float, float]]], total: int) -> None:
    curve = DirtyCurve.measured(groups, total)
    assert convert(DirtyCurve, builtins(curve)) == curve


def test_between_points_it_is_a_line() -> None:
    curve = DirtyCurve.measured([[(1.0, 100)] * 8, [(3.0, 200)] * 8], 1000)
    assert curve.within(0.5) == pytest.approx(100 * 0.5**0.6309, rel=0.01)
    assert curve.within(2.0) == 150
    assert curve.within(5.0) == 300
    assert curve.within(500.0) == 1000
    assert DirtyCurve((), 1000).within(3.0) == 0
    assert curve.working_set_pages == 200


def test_bars_are_as_high_as_their_values() -> None:
    assert bars((0.0, 4.0, 8.0), rows=2) == ["  █", " ██"]
    assert bars((4.0, 16.0), rows=2) == [" █", "▄█"]
    assert bars((), rows=2) == ["", ""]
