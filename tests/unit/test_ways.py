"""Which ways are left by what was asked for, and what closes them."""

import pytest

from vmckpt.forecast.model.choose import Intent
from vmckpt.forecast.model.forecast import POSTCOPIES, Way
from vmckpt.forecast.ways import against, options_of, warnings, ways
from vmckpt.options.migration import Method, Options
from vmckpt.options.policy import Act, Policy, Rule
from vmckpt.preflight.finding import OK, WARN, Finding
from vmckpt.preflight.migration import dirty_log
from vmckpt.preflight.migration.method import postcopy_risk
from vmckpt.qemu.replies import QemuVersion

pytestmark = pytest.mark.unit

OLD = QemuVersion(7, 2, 22)
THROTTLES = Policy((Rule(3, Act.THROTTLE, 10, most_percent=40),))


@pytest.mark.parametrize(
    ("asked", "left"),
    [
        (Options(), set(Way)),
        (Options(method=Method.PRECOPY), {Way.PRECOPY}),
        (Options(auto_converge=True), {Way.AUTO_CONVERGE}),
        (Options(method=Method.PRECOPY, auto_converge=True), {Way.AUTO_CONVERGE}),
        (Options(channels=4), {Way.MULTIFD}),
        (Options(channels=4, compression="zstd"), {Way.ZSTD}),
        (Options(method=Method.HYBRID), {Way.HYBRID}),
        (Options(method=Method.POSTCOPY), {Way.POSTCOPY}),
        (Options(method=Method.STOP), {Way.STOP}),
        (Options(policy=THROTTLES), {Way.PRECOPY, Way.MULTIFD, Way.ZSTD}),
        (
            Options(policy=THROTTLES, observe_only=True),
            {Way.PRECOPY, Way.AUTO_CONVERGE, Way.MULTIFD, Way.ZSTD},
        ),
    ],
)
def test_what_is_asked_for_narrows_the_ways_and_goes_on_each(
    asked: Options, left: set[Way]
) -> None:
    assert set(ways(asked)) == left
    for way in ways(asked):
        meant = options_of(way, asked, Intent())
        assert meant.auto_converge is (way is Way.AUTO_CONVERGE)
        assert meant.compression == ("zstd" if way is Way.ZSTD else None)
        assert meant.channels == (
            2 if way is Way.MULTIFD and not asked.channels else asked.channels
        )
        assert meant.policy == asked.policy


def dirty_log_of(way: Way, asked: Options) -> list[Finding]:
    """What preflight says of a QEMU 7.2 under TCG on that way."""
    found = dirty_log.loss_of("tcg", OLD, 0)
    assert found is not None
    return list(dirty_log.checks(found, options_of(way, asked, Intent())))


def test_where_auto_comes_to_stop_a_wish_opens_no_other_way() -> None:
    open_ways = [way for way in Way if not against(Options(), dirty_log_of(way, Options()))]
    assert open_ways == [Way.STOP]
    assert "loses dirty pages" in against(Options(), dirty_log_of(Way.MULTIFD, Options()))
    # By its name a pre-copy may be had all the same, as without a wish.
    named = Options(method=Method.PRECOPY)
    assert against(named, dirty_log_of(Way.PRECOPY, named)) == ""
    named = Options(method=Method.HYBRID)
    assert "destroys the guest" in against(named, dirty_log_of(Way.HYBRID, named))


def test_post_copy_that_shall_not_be_risked_is_judged_not_closed() -> None:
    wish = Intent(never_risk_postcopy=True)
    for way in Way:
        meant = options_of(way, Options(), wish)
        assert against(Options(), list(postcopy_risk(meant))) == ""
        assert meant.never_risk_postcopy is (way not in POSTCOPIES)
    # A pre-copy that could come to it is none that the wish could be given up for.
    policy = Options(policy=Policy((Rule(3, Act.POSTCOPY),)))
    risk = list(postcopy_risk(options_of(Way.PRECOPY, policy, wish)))
    assert "[postcopy-risk]" in against(policy, risk)
    promised = options_of(Way.PRECOPY, policy, Intent(max_pause_s=0.2, never_risk_postcopy=True))
    assert list(postcopy_risk(promised)) == []


def test_what_open_ways_warn_of_is_told_once() -> None:
    clear = Finding("tls", WARN, "in clear")
    risk = Finding("postcopy-risk", WARN, "a source that dies takes the guest with it")
    fine = Finding("ports", OK, "free")
    found = warnings({Way.PRECOPY: [clear, fine], Way.HYBRID: [clear, risk], Way.STOP: [clear]})
    assert found == (
        "[tls] in clear",
        "hybrid: [postcopy-risk] a source that dies takes the guest with it",
    )
    assert warnings({}) == ()
