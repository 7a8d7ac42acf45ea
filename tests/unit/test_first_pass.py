"""The first pass, played with two ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmckpt.forecast.model.first_pass import (
    SOCKETS_BYTES,
    WINDOW_S,
    BandwidthLimit,
    Stretch,
    TransferPace,
    play,
)

pytestmark = pytest.mark.unit

# 5 us for the target to take any page, 1 us to look at one of zeroes, and 3 us more for a hole.
PACE = TransferPace(0.0, 5e-6, 1e-6, 5e-6, 3e-6, 4104, 9)
FILLED, ZERO = Stretch(10_000, 0), Stretch(0, 10_000)

STRETCHES = st.lists(
    st.builds(Stretch, st.floats(0, 1e5), st.floats(0, 1e5), st.just(0.0)), min_size=1, max_size=20
).map(tuple)


def test_the_target_is_what_is_waited_for() -> None:
    assert play((FILLED, ZERO), PACE) == pytest.approx(0.1)
    assert play((ZERO, FILLED), PACE) == pytest.approx(0.1)


def test_a_hole_holds_up_only_the_source() -> None:
    holes = Stretch(0, 10_000, 10_000)
    assert play((holes,), PACE) == pytest.approx(0.05)
    assert play((holes,), PACE._replace(hole_s=7e-6)) == pytest.approx(0.08)


def test_under_a_limit_the_target_catches_up_unless_zeroes_come_last() -> None:
    """50 MB/s: 10,000 pages take 0.8 s, a window's bytes at its beginning."""
    pace = PACE._replace(held=BandwidthLimit(50e6, 1.0, 0.0))
    sending_s = 10_000 * 4104 / 50e6
    first, last = play((ZERO, FILLED), pace), play((FILLED, ZERO), pace)
    assert first == pytest.approx(0.01 + sending_s - WINDOW_S, abs=WINDOW_S)
    assert last > sending_s - WINDOW_S + 0.05


def test_what_the_sockets_hold_bounds_how_far_the_source_runs_ahead() -> None:
    """Under a limit: a source that is held up by its target loses windows for good."""
    slow = PACE._replace(zero_s=1e-3, held=BandwidthLimit(500e6, 1.0, 0.0))
    pages = 2 * SOCKETS_BYTES / 4104
    alone = play((ZERO,), slow)
    assert play((ZERO, Stretch(pages, 0)), slow) == pytest.approx(alone + pages * 5e-6, rel=0.01)


@given(STRETCHES, st.floats(1e5, 1e9))
def test_it_takes_as_long_as_each_end_and_the_link_at_least(
    stretches: tuple[Stretch, ...], limit_bytes_per_s: float
) -> None:
    free = play(stretches, PACE)
    sent_bytes = sum(4104 * one.pages + 9 * one.zero_pages for one in stretches)
    assert free == pytest.approx(sum(5e-6 * (one.pages + one.zero_pages) for one in stretches))
    limit = BandwidthLimit(limit_bytes_per_s, 1.0, 0.0)
    held = play(stretches, PACE._replace(held=limit))
    assert held >= free - 1e-6
    # A window lets whole bytes through.
    assert held >= (sent_bytes / limit.window_bytes(1.0) - 1) * WINDOW_S - 1e-6


def test_what_a_window_lets_through_is_whole_packets_and_those_in_hand() -> None:
    held = BandwidthLimit(50e6, 525_312, 1.5)
    assert held.window_bytes(1.0) == pytest.approx((10 + 1.5) * 525_312)
    assert held.window_bytes(0.5) == pytest.approx((20 + 1.5) * 525_312 / 2)


def test_under_a_limit_noise_takes_long_wherever_it_lies_among_words() -> None:
    """As one mixture the link would never be what is waited for: 50 MB/s of 100 a second."""
    pace = PACE._replace(compresses=True, squeezed_s=35e-6, held=BandwidthLimit(50e6, 1.0, 0.0))
    noise, words = Stretch(10_000, 0, ratio=1.0), Stretch(10_000, 0, ratio=0.01)
    noise_s, words_s = 10_000 * 4104 / 50e6, 10_000 * 40e-6
    apart_s = play((words, noise), pace)
    assert apart_s == pytest.approx(words_s + noise_s, abs=1.5 * WINDOW_S)
    mixed_s = play((Stretch(20_000, 0, ratio=0.5),), pace)
    assert mixed_s == pytest.approx(noise_s, abs=1.5 * WINDOW_S)


def test_without_compression_what_a_page_holds_makes_no_difference() -> None:
    words = Stretch(10_000, 0, ratio=0.1)
    assert play((words,), PACE) == play((FILLED,), PACE)
