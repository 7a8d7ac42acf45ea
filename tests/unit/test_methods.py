"""Which ways are left by what was asked for, and what closes them."""

import pytest

from vmckpt.forecast.methods import against, modes, options_of, warnings
from vmckpt.forecast.model.choose import Intent
from vmckpt.forecast.model.forecast import POSTCOPIES, TransferMode
from vmckpt.options.migration import Method, MigrationOptions
from vmckpt.options.policy import Act, Policy, PolicyRule
from vmckpt.preflight.finding import OK, WARN, Finding
from vmckpt.preflight.migration import dirty_log
from vmckpt.preflight.migration.method import postcopy_risk
from vmckpt.qemu.replies import QemuVersion

pytestmark = pytest.mark.unit

OLD = QemuVersion(7, 2, 22)
THROTTLES = Policy((PolicyRule(3, Act.THROTTLE, 10, most_percent=40),))


@pytest.mark.parametrize(
    ("asked", "left"),
    [
        (MigrationOptions(), set(TransferMode)),
        (MigrationOptions(method=Method.PRECOPY), {TransferMode.PRECOPY}),
        (MigrationOptions(auto_converge=True), {TransferMode.AUTO_CONVERGE}),
        (MigrationOptions(method=Method.PRECOPY, auto_converge=True), {TransferMode.AUTO_CONVERGE}),
        (MigrationOptions(channels=4), {TransferMode.MULTIFD}),
        (MigrationOptions(channels=4, compression="zstd"), {TransferMode.ZSTD}),
        (MigrationOptions(method=Method.HYBRID), {TransferMode.HYBRID}),
        (MigrationOptions(method=Method.POSTCOPY), {TransferMode.POSTCOPY}),
        (MigrationOptions(method=Method.STOP), {TransferMode.STOP}),
        (
            MigrationOptions(policy=THROTTLES),
            {TransferMode.PRECOPY, TransferMode.MULTIFD, TransferMode.ZSTD},
        ),
        (
            MigrationOptions(policy=THROTTLES, observe_only=True),
            {
                TransferMode.PRECOPY,
                TransferMode.AUTO_CONVERGE,
                TransferMode.MULTIFD,
                TransferMode.ZSTD,
            },
        ),
    ],
)
def test_what_is_asked_for_narrows_the_ways_and_goes_on_each(
    asked: MigrationOptions, left: set[TransferMode]
) -> None:
    assert set(modes(asked)) == left
    for mode in modes(asked):
        meant = options_of(mode, asked, Intent())
        assert meant.auto_converge is (mode is TransferMode.AUTO_CONVERGE)
        assert meant.compression == ("zstd" if mode is TransferMode.ZSTD else None)
        assert meant.channels == (
            2 if mode is TransferMode.MULTIFD and not asked.channels else asked.channels
        )
        assert meant.policy == asked.policy


def dirty_log_of(mode: TransferMode, asked: MigrationOptions) -> list[Finding]:
    """What preflight says of a QEMU 7.2 under TCG on that way."""
    found = dirty_log.loss_of("tcg", OLD, 0)
    assert found is not None
    return list(dirty_log.checks(found, options_of(mode, asked, Intent())))


def test_where_auto_comes_to_stop_a_wish_opens_no_other_way() -> None:
    open_ways = [
        mode
        for mode in TransferMode
        if not against(MigrationOptions(), dirty_log_of(mode, MigrationOptions()))
    ]
    assert open_ways == [TransferMode.STOP]
    assert "loses dirty pages" in against(
        MigrationOptions(), dirty_log_of(TransferMode.MULTIFD, MigrationOptions())
    )
    # By its name a pre-copy may be had all the same, as without a constraint.
    named = MigrationOptions(method=Method.PRECOPY)
    assert against(named, dirty_log_of(TransferMode.PRECOPY, named)) == ""
    named = MigrationOptions(method=Method.HYBRID)
    assert "destroys the guest" in against(named, dirty_log_of(TransferMode.HYBRID, named))


def test_post_copy_that_shall_not_be_risked_is_judged_not_closed() -> None:
    wish = Intent(never_risk_postcopy=True)
    for mode in TransferMode:
        meant = options_of(mode, MigrationOptions(), wish)
        assert against(MigrationOptions(), list(postcopy_risk(meant))) == ""
        assert meant.never_risk_postcopy is (mode not in POSTCOPIES)
    # A pre-copy that could come to it is none that the constraint could be given up for.
    policy = MigrationOptions(policy=Policy((PolicyRule(3, Act.POSTCOPY),)))
    risk = list(postcopy_risk(options_of(TransferMode.PRECOPY, policy, wish)))
    assert "[postcopy-risk]" in against(policy, risk)
    promised = options_of(
        TransferMode.PRECOPY, policy, Intent(max_downtime_s=0.2, never_risk_postcopy=True)
    )
    assert list(postcopy_risk(promised)) == []


def test_what_open_ways_warn_of_is_told_once() -> None:
    clear = Finding("tls", WARN, "in clear")
    risk = Finding("postcopy-risk", WARN, "a source that dies takes the guest with it")
    fine = Finding("ports", OK, "free")
    found = warnings(
        {
            TransferMode.PRECOPY: [clear, fine],
            TransferMode.HYBRID: [clear, risk],
            TransferMode.STOP: [clear],
        }
    )
    assert found == (
        "[tls] in clear",
        "hybrid: [postcopy-risk] a source that dies takes the guest with it",
    )
    assert warnings({}) == ()
