"""What moving costs, found again from moves that were."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.test_forecast import LINK, guest
from vmckpt.forecast.model.forecast import MigrationLimits, TransferMode, forecast
from vmckpt.forecast.model.link import Moved, learn
from vmckpt.forecast.model.rounds import BATCH_BYTES, PACKET_BYTES, wire

pytestmark = pytest.mark.unit


def test_parallel_channels_send_more_than_the_limit() -> None:
    plain, multifd = (wire(LINK.costs, 50e6, channels=channels) for channels in (0, 2))
    # 50 MB/s are 38.07 batches of 32 pages in a tenth of a second, or 9.52 packets of 128.
    assert plain.held_bytes_per_s == pytest.approx(39 * BATCH_BYTES * 10)
    assert multifd.held_bytes_per_s == pytest.approx((10 + 1.5) * PACKET_BYTES * 10)
    squeezed = wire(LINK.costs, 50e6, parts=(0.5, 1.0), channels=2)
    assert squeezed.held_bytes_per_s == pytest.approx((20 + 1.5) * PACKET_BYTES * 5)


def test_a_calibration_guest_hardly_counts_where_real_ones_have_moved() -> None:
    at_rest = [
        Moved(1000 * n, 0, 0.005 * n, 0.005 * n + 0.1, 0.01, weight=0.2) for n in range(1, 9)
    ]
    busy = [
        Moved(1000 * n, 0, 0.01 * n, 0.01 * n + 0.2, 0.02, similarity=2)
        for n in (50, 100, 150, 200)
    ]
    alone, both = learn(at_rest), learn(at_rest + busy)
    assert alone is not None
    assert both is not None
    assert alone.costs.page_s == pytest.approx(5e-6)
    assert both.costs.page_s == pytest.approx(1e-5, rel=0.01)
    assert alone.fixed_s == pytest.approx(0.1)
    assert both.fixed_s == pytest.approx(0.2)


def test_pages_cost_less_while_the_guest_is_stopped() -> None:
    moves = [
        Moved(10**5, 0, 1.0, 1.1, 0.03 + pages * 2e-6, last_pages=pages, felt=True)
        for pages in (0, 100, 200, 10_000, 15_000)
    ]
    link, unsure = learn(moves), learn(moves[:3])
    assert link is not None
    assert unsure is not None
    assert link.stopped_share == pytest.approx(0.2)
    assert link.switch_s == pytest.approx(0.03)
    assert unsure.stopped_share == 1.0
    hot, limits = guest(500_000, 2_000), MigrationLimits(0.3)
    slow, fast = (
        forecast(
            TransferMode.PRECOPY, hot, replace(LINK, stopped_share=share), limits
        ).downtime_s.p50
        for share in (1.0, 0.2)
    )
    assert (fast - LINK.switch_s) / (slow - LINK.switch_s) == pytest.approx(0.2)


def test_what_compresses_costs_more_to_send() -> None:
    """0.01 ms a page, and 0.005 ms more for each whose bytes compression saved."""
    moves = [
        Moved(pages, 0, pages * 1e-5 + saved * 5e-6, 1.0, None, squeezed=saved)
        for pages, saved in ((10**5, 0.0), (10**5, 5e4), (2 * 10**5, 1.5e5), (5 * 10**4, 0.0))
    ]
    link = learn(moves)
    assert link is not None
    assert link.costs == pytest.approx((1e-5, 0.0, 0.0, 5e-6, 0.0, 0.0), abs=1e-9)
    noise, text = (wire(link.costs, parts=(part, part)).dirtied_s(1, 0) for part in (1.0, 0.2))
    assert noise == pytest.approx(1e-5, rel=1e-3)
    assert text == pytest.approx(1.4e-5, rel=1e-3)


def test_moves_that_a_limit_held_tell_no_costs() -> None:
    moves = [Moved(n, 2 * n, n * (1e-5 + 2 * 3e-6), 9.0, None) for n in (10**4, 10**5, 10**6)]
    assert learn(moves) is not None
    assert learn([one._replace(limited=True) for one in moves]) is None


def test_a_hole_costs_more_than_a_page_of_zeroes() -> None:
    moves = [
        Moved(pages, zero, pages * 1e-5 + zero * 2e-6 + holes * 3e-6, 9.0, None, holes=holes)
        for pages, zero, holes in (
            (10**5, 10**5, 0), (10**5, 10**5, 10**5), (10**4, 2 * 10**5, 10**5), (10**5, 10**4, 0),
        )
    ]  # fmt: skip
    link = learn(moves, look_s=1e-6)
    assert link is not None
    assert link.costs == pytest.approx((1e-5, 2e-6, 0.0, 0.0, 3e-6, 1e-6), rel=1e-6, abs=1e-9)


def test_ways_of_sending_share_what_is_not_sending() -> None:
    plain = [Moved(1000, 0, 0.01, 0.31, 0.05, felt=True)] * 3
    other = [Moved(1000, 0, 0.02, 0.22, None)]
    link = learn(other, (), plain)
    assert link is not None
    assert link.costs.page_s == pytest.approx(2e-5)
    assert link.fixed_s == pytest.approx(0.3)
    assert link.switch_s == pytest.approx(0.05)


@given(
    st.floats(1e-6, 1e-4),
    st.floats(0.01, 1.0),
    st.lists(st.tuples(st.integers(100, 10**6), st.integers(0, 10**6)), min_size=4, max_size=9),
)
def test_costs_are_found_again(page_s: float, part: float, moves: list[tuple[int, int]]) -> None:
    zero_s = part * page_s
    moved = [
        Moved(n, z, n * page_s + z * zero_s, n * page_s + z * zero_s + 0.2, 0.01) for n, z in moves
    ]
    link = learn(moved)
    assert link is not None
    assert link.fixed_s == pytest.approx(0.2, abs=1e-6)
    for one in moved:
        costs = link.costs
        again = costs.page_s * one.pages + costs.zero_page_s * one.zero_pages + costs.start_s
        assert again == pytest.approx(one.transfer_s, rel=1e-3)


def test_nothing_is_learned_from_nothing_and_misses_widen_a_forecast() -> None:
    assert learn([]) is None
    moved = [Moved(1000 * n, 0, 0.01 * n, 0.01 * n + 0.2, 0.01) for n in range(1, 9)]
    sure, unsure = learn(moved), learn(moved, [0.5, -0.5])
    assert sure is not None
    assert unsure is not None
    assert sure.spread < 0.1
    assert unsure.spread == pytest.approx(0.5)


@given(st.lists(st.floats(0, 1), min_size=3, max_size=3), st.floats(0, 1), st.floats(0, 1))
def test_a_longer_slow_phase_makes_the_guest_wait_no_shorter(
    waits_s: list[float], one_s: float, other_s: float
) -> None:
    low_s, middle_s, high_s = sorted(waits_s)
    link = replace(LINK, waiting_s=(low_s, middle_s, high_s))
    short_s, long_s = sorted((one_s, other_s))
    assert all(
        link.waits_s(short_s, scenario) <= link.waits_s(long_s, scenario) for scenario in (-1, 0, 1)
    )
    good, middle, bad = (link.waits_s(long_s, scenario) for scenario in (-1, 0, 1))
    assert good <= middle <= bad <= 2 * long_s
    assert middle <= long_s
    assert link.waits_s(0.0, 1) == 0.0
