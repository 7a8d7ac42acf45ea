"""What the planner offers of each way, and that what it names when nothing keeps a constraint
helps.
"""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vmckpt.cli.options.arguments import intent as read
from vmckpt.forecast.limits import limits_ms
from vmckpt.forecast.measure.dirty_rate import DirtyRate
from vmckpt.forecast.methods import options_of
from vmckpt.forecast.model.choose import Intent, Offer, choose
from vmckpt.forecast.model.dirtying import DirtyCurve
from vmckpt.forecast.model.forecast import TransferMode
from vmckpt.forecast.model.link import LinkModel, PageCosts
from vmckpt.forecast.planner import (
    MethodCandidate,
    bandwidth_notes,
    offer_of,
    within_bandwidth,
)
from vmckpt.memory.content import Content
from vmckpt.options.migration import Method, MigrationOptions
from vmckpt.options.policy import Act
from vmckpt.options.reading import downtime_ms as parse_ms

pytestmark = pytest.mark.unit

GIB = 1 << 30
# 400 MB/s, 2 us a zero page, 0.2 s around, 30 ms for the switch.
LINK = LinkModel(PageCosts(1e-5, 2e-6, 0.0, look_s=2e-6), 0.2, 0.03, 0.05, 0.01, moves=10)
WAYS = st.sampled_from(TransferMode)


def measured(
    rate_pages_per_s: float, set_pages: float, *, ram_bytes: int = GIB, ratio: float = 0.5
) -> DirtyRate:
    """A guest, half of it zero, that dirties pages of a set at random."""
    times = [0.05 * 2**n for n in range(11)]
    pages = [set_pages * -math.expm1(-rate_pages_per_s * t / set_pages) for t in times]
    curve = DirtyCurve.measured(
        [[(t, p)] * 10 for t, p in zip(times, pages, strict=True)], ram_bytes // 4096
    )
    return DirtyRate(
        "page-tracking", "", 8.0, ram_bytes, curve, (), 0,
        ram=Content(0.5, 0.5, 0.0, ratio), dirtied=Content(0.0, 1.0, 0.0, ratio),
    )  # fmt: skip


def road(
    mode: TransferMode, wish: Intent, asked: MigrationOptions | None = None, link: LinkModel = LINK
) -> MethodCandidate:
    asked = asked or MigrationOptions()
    limits = limits_ms(mode, asked, wish, link)
    return MethodCandidate(mode, options_of(mode, asked, wish), link, downtimes_ms=limits)


def offered(
    mode: TransferMode, seen: DirtyRate, wish: Intent, link: LinkModel = LINK
) -> tuple[Offer, MigrationOptions]:
    return offer_of(road(mode, wish, link=link), link, seen, intent=wish)


def with_change(wish: Intent, words: str) -> Intent:
    """The constraint as it is when someone types what was named."""
    for word in words.split(" and "):
        option, _, value = word.removeprefix("no ").partition(" ")
        said = None if word.startswith("no ") else value
        downtime, within, slowdown = (said if option == name else None for name in (
            "--max-downtime", "--finish-within", "--max-slowdown",
        ))  # fmt: skip
        downtime_ms = parse_ms(downtime) if downtime else None
        asked = read(downtime_ms, within, None, slowdown, never_risk_postcopy=False)
        match option:
            case "--max-downtime":
                wish = replace(wish, max_downtime_s=asked.max_downtime_s)
            case "--finish-within":
                wish = replace(wish, finish_within_s=asked.finish_within_s)
            case "--max-slowdown":
                wish = replace(wish, max_slowdown=asked.max_slowdown)
            case "--never-risk-postcopy":
                wish = replace(wish, never_risk_postcopy=False)
            case _:
                pytest.fail(f"nothing that can be asked for: {word}")
    return wish


SEEN = st.builds(measured, st.floats(1, 1e6), st.floats(100, GIB // 4096))
WISHES = st.builds(
    Intent,
    st.none() | st.floats(0.01, 2.0),
    st.none() | st.floats(0.5, 10.0),
    st.none() | st.floats(0.0, 0.5),
    st.booleans(),
)
# Its switch may take much longer than it mostly does.
LATE = replace(LINK, switch_spread_s=0.12)


@settings(max_examples=300, deadline=None)
@given(WAYS, SEEN, WISHES, st.sampled_from([LINK, LATE]))
def test_what_is_named_helps_when_it_is_asked_for(
    mode: TransferMode, seen: DirtyRate, wish: Intent, link: LinkModel
) -> None:
    offer, _ = offered(mode, seen, wish, link)
    choice = choose([offer], wish)
    if choice.mode is not None or math.isinf(offer.forecast.total_s.p90):
        return
    words, _, named = choice.change.rpartition(" would be enough for ")
    assert named == mode
    again, _ = offered(mode, seen, with_change(wish, words), link)
    assert again.keeps, (choice.change, again.misses)


def test_a_shorter_limit_is_tried_where_the_longest_breaks_the_wish() -> None:
    seen, wish = measured(50_000, 100_000), Intent(max_downtime_s=0.45)
    assert limits_ms(TransferMode.PRECOPY, MigrationOptions(), wish, LATE)[:3] == (300, 330, 200)
    offer, meant = offered(TransferMode.PRECOPY, seen, wish, LATE)
    assert offer.keeps
    # By and by it may be allowed as much as was promised.
    assert (meant.max_downtime_ms, meant.most_downtime_ms) == (200, 330)


def test_a_long_downtime_that_is_allowed_is_not_tried_first() -> None:
    options = MigrationOptions(max_downtime_ms=5000, allowed_downtime_ms=5000)
    tried = limits_ms(TransferMode.PRECOPY, options, Intent(max_downtime_s=5.0), LINK)
    assert tried[0] == 300 < tried[1] <= 5000


def test_no_pause_is_named_that_cannot_be_asked_for() -> None:
    slow, wish = replace(LINK, costs=PageCosts(1e-2, 2e-6, 0.0)), Intent(max_downtime_s=1.0)
    offer, _ = offered(TransferMode.STOP, measured(1, 100, ram_bytes=4 * GIB), wish, slow)
    assert [miss.needed for miss in offer.misses] == ["no --max-downtime"]


def test_a_slowdown_is_at_most_all() -> None:
    wish = Intent(max_slowdown=0.1)
    offer, _ = offered(TransferMode.AUTO_CONVERGE, measured(1e6, GIB // 4096), wish)
    assert offer.forecast.slowdown.p90 <= 1.0
    offer, _ = offered(TransferMode.POSTCOPY, measured(1e6, GIB // 4096), Intent(max_slowdown=1.0))
    assert offer.keeps


def test_auto_converge_that_is_held_to_too_little_names_what_it_needs() -> None:
    # More than the link takes: slowed by a tenth it does not end.
    seen, wish = measured(200_000, 131_072), Intent(max_slowdown=0.1)
    choice = choose([offered(TransferMode.AUTO_CONVERGE, seen, wish)[0]], wish)
    assert choice.change == "--max-slowdown 60% would be enough for auto-converge"
    offer, meant = offered(TransferMode.AUTO_CONVERGE, seen, Intent(max_slowdown=0.6))
    assert offer.keeps
    assert meant.most_throttle_percent == 60


def test_post_copy_is_offered_as_a_change_of_mind() -> None:
    # More than the link takes: nothing else ends in time.
    seen = measured(200_000, 131_072)
    wish = Intent(
        max_downtime_s=1.5, finish_within_s=12.0, max_slowdown=0.5, never_risk_postcopy=True
    )
    choice = choose(
        [offered(mode, seen, wish)[0] for mode in (TransferMode.PRECOPY, TransferMode.HYBRID)], wish
    )
    assert choice.change == "no --never-risk-postcopy would be enough for hybrid"


def test_several_channels_are_closed_where_they_break_the_bandwidth() -> None:
    asked, seen = MigrationOptions(bandwidth_bytes_per_s=20_000_000), measured(1, 100)
    for mode in TransferMode:
        found = within_bandwidth(road(mode, Intent(), asked), seen, asked)
        assert bool(found.closed) is (mode in (TransferMode.MULTIFD, TransferMode.ZSTD)), mode
        assert (found.link is None) is bool(found.closed)
    closed = within_bandwidth(road(TransferMode.MULTIFD, Intent(), asked), seen, asked).closed
    assert closed == "over several channels QEMU would send 27.6 MiB/s, not 19.1 MiB/s"
    # What they send beyond is the less, the more they may, and the smaller it is.
    fast = MigrationOptions(bandwidth_bytes_per_s=500_000_000)
    assert not within_bandwidth(road(TransferMode.MULTIFD, Intent(), fast), seen, fast).closed
    small = measured(1, 100, ratio=0.05)
    assert not within_bandwidth(road(TransferMode.ZSTD, Intent(), asked), small, asked).closed
    free = MigrationOptions()
    assert not within_bandwidth(road(TransferMode.MULTIFD, Intent(), free), seen, free).closed


def test_what_was_asked_for_stays_open_and_is_told_beforehand() -> None:
    asked, seen = MigrationOptions(bandwidth_bytes_per_s=20_000_000, channels=8), measured(1, 100)
    found = within_bandwidth(road(TransferMode.MULTIFD, Intent(), asked), seen, asked)
    assert not found.closed
    # Eight channels have more in hand than two.
    assert list(bandwidth_notes(found, seen)) == [
        "QEMU will send 50.1 MiB/s, it holds 19.1 MiB/s no better here"
    ]
    plain = MigrationOptions(bandwidth_bytes_per_s=100_000_000)
    assert list(bandwidth_notes(road(TransferMode.PRECOPY, Intent(), plain), seen)) == []
    # One channel holds all but the smallest.
    tiny = MigrationOptions(bandwidth_bytes_per_s=1_000_000)
    assert list(bandwidth_notes(road(TransferMode.PRECOPY, Intent(), tiny), seen)) == [
        "QEMU will send 1.25 MiB/s, it holds 977 KiB/s no better here"
    ]
    (note,) = bandwidth_notes(road(TransferMode.HYBRID, Intent(), plain), seen)
    assert note.startswith("the bandwidth limit holds until post-copy begins")
    assert list(bandwidth_notes(road(TransferMode.HYBRID, Intent()), seen)) == []


def test_only_a_pre_copy_is_helped_and_slowed_by_one_rule_alone() -> None:
    seen, wish = measured(1, 100), Intent(max_downtime_s=1.0, max_slowdown=0.3)
    acts = {}
    for mode in TransferMode:
        _, meant = offered(mode, seen, wish)
        acts[mode] = [rule.act for rule in meant.policy.rules] if meant.policy else []
        assert meant.steers == (meant.policy if meant.method is Method.PRECOPY else None)
    both = [Act.THROTTLE, Act.RAISE_DOWNTIME]
    assert acts == {
        TransferMode.PRECOPY: both, TransferMode.MULTIFD: both, TransferMode.ZSTD: both,
        TransferMode.AUTO_CONVERGE: both[1:],
        TransferMode.HYBRID: [], TransferMode.POSTCOPY: [], TransferMode.STOP: [],
    }  # fmt: skip
