"""The planner's arithmetic: what a migration comes to, and which one is chosen."""

import math
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vmckpt.cli.options.arguments import intent, seconds_until
from vmckpt.errors import UsageError
from vmckpt.forecast.calm import is_calm
from vmckpt.forecast.model.choose import Intent, choose, judge
from vmckpt.forecast.model.course import DirtyProfile
from vmckpt.forecast.model.dirtying import DirtyCurve
from vmckpt.forecast.model.first_pass import WINDOW_S, Stretch
from vmckpt.forecast.model.forecast import (
    MODEL_SPREAD,
    Band,
    Forecast,
    MigrationLimits,
    TransferMode,
    forecast,
    from_json,
)
from vmckpt.forecast.model.guest import Guest
from vmckpt.forecast.model.link import LinkModel, PageCosts
from vmckpt.forecast.model.rounds import (
    BATCH_BYTES,
    HELD_S,
    HELD_SPREAD_S,
    SwitchoverHold,
    play_precopy,
    wire,
)
from vmckpt.options.reading import downtime_ms

pytestmark = pytest.mark.unit

GIB_PAGES = 1 << 18
# 400 MB/s, 2 us a zero page, 0.2 s around, 30 ms for the switch.
LINK = LinkModel(PageCosts(1e-5, 2e-6, 0.0, look_s=2e-6), 0.2, 0.03, 0.05, 0.01, moves=10)


def uniform(rate_pages_per_s: float, set_pages: float, total_pages: int = GIB_PAGES) -> DirtyCurve:
    """A guest that dirties pages of a set at random: U(t) = set (1 - e^(-rate t / set))."""
    times = [0.05 * 2**n for n in range(11)]
    pages = [set_pages * -math.expm1(-rate_pages_per_s * t / set_pages) for t in times]
    return DirtyCurve.measured(
        [[(t, p)] * 10 for t, p in zip(times, pages, strict=True)], total_pages
    )


def guest(rate_pages_per_s: float, set_pages: float, **more: float) -> Guest:
    facts = {"zero_share": 0.5, "ratio": 0.5, "dirtied_zero_share": 0.0, "dirtied_ratio": 0.5}
    curve = uniform(rate_pages_per_s, set_pages)
    return Guest(GIB_PAGES, curve=curve, **facts | more)  # type: ignore[arg-type]


GUESTS = st.builds(
    guest,
    st.floats(1, 1e6),
    st.floats(100, GIB_PAGES),
    zero_share=st.floats(0, 1),
    dirtied_zero_share=st.floats(0, 1),
)
LIMITS = st.builds(
    MigrationLimits,
    st.floats(0.001, 10),
    st.one_of(st.just(0.0), st.floats(1e6, 1e10)),
    st.integers(1, 8),
    st.floats(0.01, 0.99),
    st.builds(SwitchoverHold, st.floats(0.0, 1.0), st.floats(0.0, 1e4)),
)


@given(GUESTS, LIMITS, st.sampled_from(TransferMode))
def test_a_forecast_keeps_its_promises(
    guest: Guest, limits: MigrationLimits, mode: TransferMode
) -> None:
    found = forecast(mode, guest, LINK, limits)
    for band in (found.total_s, found.downtime_s, found.sent_bytes, found.slowdown):
        assert list(band) == sorted(band)
        assert band.p10 >= 0
    if found.ends:
        filled = guest.total_pages - guest.zero_pages
        part = guest.ratio if mode is TransferMode.ZSTD else 1.0
        assert found.sent_bytes.p10 >= 0.99 * 4096 * filled * part
        assert found.total_s.p50 >= LINK.fixed_s
        assert found.downtime_s.p50 <= found.total_s.p50
        assert 0 <= found.slowdown.p50 <= 1
    else:
        assert math.isinf(found.total_s.p50)
    assert from_json(found.to_json()) == found


@given(GUESTS, st.floats(0.001, 10))
def test_a_precopy_that_ends_keeps_to_its_downtime(guest: Guest, limit_s: float) -> None:
    found = forecast(TransferMode.PRECOPY, guest, LINK, MigrationLimits(limit_s))
    assert not found.ends or found.downtime_s.p50 <= limit_s + LINK.switch_s + 1e-9


@given(GUESTS, LIMITS)
def test_stopping_sends_least_and_post_copy_and_stopping_always_end(
    guest: Guest, limits: MigrationLimits
) -> None:
    stop, postcopy = (
        forecast(mode, guest, LINK, limits) for mode in (TransferMode.STOP, TransferMode.POSTCOPY)
    )
    assert stop.ends
    assert postcopy.ends
    assert stop.sent_bytes.p50 <= postcopy.sent_bytes.p50


def test_an_idle_guest_is_sent_once() -> None:
    found = forecast(TransferMode.PRECOPY, guest(0.001, 100), LINK, MigrationLimits(0.3))
    sending_s = GIB_PAGES / 2 * (1e-5 + 2e-6)
    assert found.total_s.p50 == pytest.approx(0.2 + sending_s + HELD_S + 0.03, rel=0.01)
    assert found.downtime_s.p50 == pytest.approx(0.03, rel=0.01)
    assert found.rounds == 2


def test_a_bandwidth_limit_holds_until_the_guest_stops() -> None:
    half = GIB_PAGES / 2
    layout = (Stretch(half, 0), Stretch(0, half))
    calm = replace(guest(0.001, 100), layout=layout)
    found = forecast(TransferMode.PRECOPY, calm, LINK, MigrationLimits(0.3, 50e6))
    # A window's bytes go at its beginning: zeroes are looked through in the rest of the last.
    filled_s, zeroes_s = half * 4104 / (39 * BATCH_BYTES / WINDOW_S), half * 2e-6
    expected_s = 0.23 + filled_s + zeroes_s + HELD_S
    assert expected_s - WINDOW_S <= found.total_s.p50 <= expected_s


def test_more_than_the_link_takes_never_ends_but_throttled_or_in_post_copy_it_does() -> None:
    hot = guest(200_000, GIB_PAGES / 2)  # 800 MB/s of distinct pages on a link of 400 MB/s
    precopy, throttled, hybrid = (
        forecast(mode, hot, LINK, MigrationLimits(0.05))
        for mode in (TransferMode.PRECOPY, TransferMode.AUTO_CONVERGE, TransferMode.HYBRID)
    )
    assert not precopy.ends
    assert throttled.ends
    assert throttled.slowdown.p50 > 0.2
    assert hybrid.ends
    assert hybrid.slow_s > 0.1


def test_auto_converge_does_not_end_where_it_may_slow_the_guest_too_little() -> None:
    hot = guest(200_000, GIB_PAGES / 2)
    free, little = (
        forecast(TransferMode.AUTO_CONVERGE, hot, LINK, MigrationLimits(0.05, most_throttle=most))
        for most in (0.99, 0.1)
    )
    assert free.ends
    assert free.slowdown.p50 > 0.1
    assert not little.ends


@given(GUESTS, LIMITS)
def test_a_guest_loses_no_more_than_auto_converge_may_take(
    guest: Guest, limits: MigrationLimits
) -> None:
    found = forecast(TransferMode.AUTO_CONVERGE, guest, LINK, limits)
    assert found.slowdown.p50 <= limits.most_throttle + 1e-9


SOME = st.sampled_from([0.0, 2e-6])
COSTS = st.builds(PageCosts, st.just(1e-5), SOME, SOME, SOME, SOME, st.just(0.0))


@settings(max_examples=40)
@given(GUESTS, LIMITS, st.sampled_from(TransferMode), COSTS, st.sampled_from([0.0, 0.5, 1.0]))
def test_pages_that_seem_to_cost_nothing_take_some_time(
    guest: Guest, limits: MigrationLimits, mode: TransferMode, costs: PageCosts, zero: float
) -> None:
    """As where all that a guest dirtied was zeroes, and these were found to cost nothing."""
    still = replace(guest, dirtied_zero_share=zero, zero_share=zero)
    found = forecast(mode, still, replace(LINK, costs=costs), limits)
    assert not found.ends or found.total_s.p50 > LINK.fixed_s


def test_throttling_slows_a_guest_only_beyond_what_it_leaves_unused() -> None:
    lazy = guest(200_000, GIB_PAGES / 2, busy=0.3)
    assert [lazy.speed(throttle) for throttle in (0.0, 0.7, 0.85)] == pytest.approx([1, 1, 0.5])
    hard, soft = (
        forecast(TransferMode.AUTO_CONVERGE, one, LINK, MigrationLimits(0.05))
        for one in (guest(200_000, GIB_PAGES / 2), lazy)
    )
    assert soft.total_s.p50 > 1.5 * hard.total_s.p50


class Burst:
    """10,000 pages a second for 9 s, and then nothing."""

    def between(self, from_s: float, to_s: float, quantile: float = 0.5) -> float:
        del quantile
        return 1e4 * (min(to_s, 9.0) - min(from_s, 9.0))


def test_throttling_that_a_guest_does_not_feel_changes_nothing_of_its_course() -> None:
    lazy = guest(1e4, GIB_PAGES / 2, busy=0.1, zero_share=0.99)
    slow = wire(LINK.costs, 30e6)
    plain = play_precopy(lazy, slow, 0.05, load=Burst())
    throttled = play_precopy(lazy, slow, 0.05, load=Burst(), most_throttle=0.8)
    assert throttled.throttle > 0.1
    assert (throttled.took_s, throttled.sent_bytes) == (plain.took_s, plain.sent_bytes)


def test_a_hot_working_set_that_fits_the_downtime_is_no_reason_not_to_end() -> None:
    """Rate times t says it never ends: 2 GB/s on a link of 400 MB/s. But it is 8 MB of pages."""
    hot = guest(500_000, 2_000)
    assert forecast(TransferMode.PRECOPY, hot, LINK, MigrationLimits(0.3)).ends
    assert not forecast(TransferMode.PRECOPY, hot, LINK, MigrationLimits(0.005)).ends


def test_unknowns_widen_a_band_each_by_itself() -> None:
    idle, limits = guest(0.001, 100), MigrationLimits(0.3)
    sure = replace(LINK, spread=0.0, switch_spread_s=0.0)
    around = replace(sure, fixed_spread_s=0.03)
    both = replace(around, switch_spread_s=0.04)
    for link, spreads_s in ((sure, ()), (around, (0.03,)), (both, (0.03, 0.04))):
        band = forecast(TransferMode.PRECOPY, idle, replace(link, switch_s=0.1), limits).total_s
        # When QEMU looks whether it may end no one knows beforehand.
        sending_s = band.p50 - link.fixed_s - 0.1
        expected_s = 1.28 * math.hypot(HELD_SPREAD_S, MODEL_SPREAD * sending_s, *spreads_s)
        assert band.p90 - band.p50 == pytest.approx(expected_s, rel=0.01)
        assert band.p50 - band.p10 == pytest.approx(expected_s, rel=0.01)


def made(mode: TransferMode, total_s: float, pause_s: float, slowdown: float = 0.0) -> Forecast:
    def around(value: float) -> Band:
        return Band(value * 0.9, value, value * 1.1)

    return Forecast(
        mode, math.isfinite(total_s), around(total_s), around(pause_s), around(1e9),
        around(slowdown), 3,
    )  # fmt: skip


FORECASTS = (
    made(TransferMode.PRECOPY, math.inf, math.inf),
    made(TransferMode.AUTO_CONVERGE, 60, 0.2, 0.5),
    made(TransferMode.HYBRID, 12, 0.1, 0.1),
    made(TransferMode.POSTCOPY, 11, 0.1, 0.1),
    made(TransferMode.STOP, 10, 10),
)


@pytest.mark.parametrize(
    ("wanted", "mode"),
    [
        (Intent(), TransferMode.AUTO_CONVERGE),
        (Intent(max_downtime_s=20), TransferMode.STOP),
        (Intent(max_downtime_s=0.3), TransferMode.AUTO_CONVERGE),
        (Intent(max_downtime_s=0.3, max_slowdown=0.2), TransferMode.HYBRID),
        (Intent(finish_within_s=30), TransferMode.HYBRID),
        (Intent(max_slowdown=0.05), TransferMode.STOP),
    ],
)
def test_the_way_that_keeps_the_intent_first_is_chosen(wanted: Intent, mode: TransferMode) -> None:
    choice = choose([judge(one, wanted) for one in FORECASTS], wanted)
    assert choice.mode is mode
    assert choice.reason.startswith(str(mode))


def test_an_intent_that_nothing_keeps_names_the_least_change() -> None:
    wanted = Intent(max_downtime_s=0.3, finish_within_s=50, never_risk_postcopy=True)
    choice = choose([judge(one, wanted) for one in FORECASTS], wanted)
    assert choice.mode is None
    # Auto-converge needs 66 s of the 50: less of a change than to risk post-copy.
    assert choice.change == "--finish-within 2m would be enough for auto-converge"
    unsure = replace(FORECASTS[1], total_s=Band(30, 45, math.inf))
    assert (
        choose([judge(unsure, Intent()), judge(FORECASTS[2], Intent())], Intent()).mode == "hybrid"
    )
    alone = [judge(FORECASTS[0], wanted)]
    assert "no method completes" in choose(alone, wanted).change
    assert choose([], wanted).mode is None


def test_a_change_that_saves_little_time_for_a_far_longer_downtime_is_not_recommended() -> None:
    def change(*forecasts: Forecast, wanted: Intent) -> str:
        return choose([judge(one, wanted) for one in forecasts], wanted).change

    hurry = Intent(finish_within_s=0.1)
    stop, precopy = made(TransferMode.STOP, 0.49, 0.45), made(TransferMode.PRECOPY, 0.59, 0.03)
    postcopy = made(TransferMode.POSTCOPY, 0.55, 0.01)
    told = (
        "--finish-within 650ms would be enough for precopy, with a downtime of 33.0 ms; stop, with "
        "495.0 ms, would need --finish-within 540ms"
    )
    assert change(stop, precopy, wanted=hurry) == told
    # Nor one that could cost the guest.
    assert change(stop, precopy, postcopy, wanted=hurry) == told
    assert change(precopy, postcopy, wanted=hurry).endswith("would be enough for postcopy")
    # Twice the time is no little more, nor is half the downtime far shorter.
    slow, rough = made(TransferMode.PRECOPY, 1.0, 0.03), made(TransferMode.PRECOPY, 0.6, 0.25)
    assert change(stop, slow, wanted=hurry) == "--finish-within 540ms would be enough for stop"
    assert change(stop, rough, wanted=hurry) == "--finish-within 540ms would be enough for stop"


def test_what_is_gone_of_the_time_counts_and_so_does_the_change_that_helps() -> None:
    auto, wanted = FORECASTS[1], Intent(finish_within_s=70)
    assert judge(auto, wanted).keeps
    assert judge(auto, replace(wanted, gone_s=4)).keeps
    late = choose([judge(auto, replace(wanted, gone_s=9))], wanted)
    assert late.mode is None
    # 66 s, and the 9 that are gone until it begins the next time.
    assert late.change == "--finish-within 2m would be enough for auto-converge"
    short = choose([judge(FORECASTS[3], Intent(finish_within_s=10, gone_s=10))], wanted)
    assert short.change == "--finish-within 22.1s would be enough for postcopy"
    assert Intent(finish_within_s=10, gone_s=12).left_s == -2
    assert not Intent(gone_s=12).is_given


def test_intents_are_read_and_nonsense_is_told() -> None:
    found = intent(200, "10m", None, "20%", never_risk_postcopy=True)
    assert found == Intent(0.2, 600.0, 0.2, True)
    assert not intent(None, None, None, None, never_risk_postcopy=False).is_given
    for words in (
        (None, "1m", "02:00", None),
        (None, None, "25:00", None),
        (None, None, "2", None),
        (None, None, None, "20"),
        (None, None, None, "120%"),
    ):
        with pytest.raises(UsageError):
            intent(*words, never_risk_postcopy=False)
    for text in ("200", "0s", "3h"):
        with pytest.raises(UsageError):
            downtime_ms(text)


@pytest.mark.parametrize(
    ("rates", "calm"),
    [
        ([5, 1, 1], False),
        ([5, 5, 5, 5, 5], True),
        ([9, 9, 2, 9, 2], True),
        ([9, 9, 2, 9, 9], False),
        ([0, 0, 0, 0, 0], True),
    ],
)
def test_calm_is_little_for_this_guest(rates: list[float], calm: bool) -> None:
    assert is_calm(rates) is calm


def test_a_time_of_day_is_the_next_one() -> None:
    now = datetime(2026, 3, 1, 1, 30, tzinfo=timezone(timedelta(hours=1)))
    assert seconds_until("02:00", now) == 1800
    assert seconds_until("01:30", now) == 86400
    assert seconds_until("01:00", now) == 86400 - 1800


def bursty(turned: int, *, moves_now: bool = True) -> Guest:
    """It works for one second of four; so many quarters of a second earlier than at the end."""
    spans = [*[100] * 12, *[15000] * 4] * 2
    rates = [*spans[turned:], *spans[:turned]]
    rows = tuple(tuple(accumulate(rates[first:])) for first in range(len(rates)))
    ends_s = tuple(0.25 * n for n in range(1, len(rates) + 1))
    plain = guest(15_000.0, 60_000.0)
    return replace(
        plain,
        course=DirtyProfile.seen(ends_s, rows, [()] * len(rows), plain.curve),
        moves_now=moves_now,
    )


def test_a_guest_with_a_rhythm_is_forecast_from_the_moment_at_which_it_moves() -> None:
    limits = MigrationLimits(0.05, 1e9)
    # At the beginning of its rest, and just before it works.
    calm, before_work = (forecast(TransferMode.PRECOPY, bursty(n), LINK, limits) for n in (0, 9))
    assert calm.total_s.p50 < 0.9 * before_work.total_s.p50
    # One that moves some time later is met at any moment, which the band knew in any case.
    later = [
        forecast(TransferMode.PRECOPY, bursty(n, moves_now=False), LINK, limits) for n in (0, 9)
    ]
    assert calm.total_s.p50 <= min(one.total_s.p50 for one in later)
    assert before_work.total_s.p50 > max(one.total_s.p50 for one in later)
    assert calm.total_s.p90 >= later[0].total_s.p50
