"""What is typed after `vmckpt migrate` becomes options, or an error that names the way out."""

from pathlib import Path

import pytest

from vmckpt.cli.migrate_options import (
    Asked,
    CompressWord,
    DisksWord,
    MethodWord,
    TimeoutWord,
    TlsWord,
)
from vmckpt.errors import UsageError
from vmckpt.migrate.options import Disks, Method, OnTimeout, Options, Tls
from vmckpt.units import MIB

pytestmark = pytest.mark.unit
NOTHING = Asked(
    method=MethodWord.auto,
    max_downtime="300ms",
    bandwidth=None,
    timeout=None,
    on_timeout=TimeoutWord.abort,
    auto_converge=False,
    compress=CompressWord.none,
    parallel=None,
    never_risk_postcopy=False,
    disks=DisksWord.auto,
    tls=TlsWord.auto,
)


def test_what_is_not_said_is_as_options_are_by_themselves() -> None:
    assert NOTHING.options() == Options()


def test_what_is_said_is_taken() -> None:
    asked = Asked(
        method=MethodWord.hybrid,
        max_downtime="1s",
        bandwidth="8MiB/s",
        timeout="5m",
        on_timeout=TimeoutWord.pause,
        auto_converge=True,
        compress=CompressWord.zstd,
        parallel=2,
        never_risk_postcopy=True,
        disks=DisksWord.copy,
        tls=TlsWord.psk,
    )
    assert asked.options() == Options(
        method=Method.HYBRID,
        max_downtime_ms=1000,
        bandwidth_bytes_per_s=8 * MIB,
        timeout_s=300.0,
        on_timeout=OnTimeout.PAUSE,
        auto_converge=True,
        compression="zstd",
        channels=2,
        disks=Disks.COPY,
        tls=Tls.PSK,
        never_risk_postcopy=True,
    )


@pytest.mark.parametrize(
    ("asked", "part"),
    [
        (NOTHING._replace(on_timeout=TimeoutWord.postcopy), "--timeout 5m"),
        (NOTHING._replace(max_downtime="3000s"), "--method stop"),
        (NOTHING._replace(timeout="1x"), "--timeout 5x"),
        (NOTHING._replace(timeout="-3x"), "--timeout 5x"),
        (NOTHING._replace(timeout="300"), "300ms"),
        (NOTHING._replace(bandwidth="fast"), "100MB"),
        (NOTHING._replace(observe_only=True), "--policy FILE"),
    ],
)
def test_options_at_odds_are_refused(asked: Asked, part: str) -> None:
    with pytest.raises(UsageError) as caught:
        asked.options()
    assert part in caught.value.remedy


def test_a_time_limit_may_be_told_in_passes() -> None:
    asked = NOTHING._replace(timeout="2.5x").options()
    assert (asked.timeout_s, asked.timeout_passes, asked.has_timeout) == (None, 2.5, True)


def test_a_policy_that_slows_the_guest_goes_with_no_other_that_does(tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    file.write_text('[[when]]\nstalls = 2\ndo = "throttle"\nby_percent = 5\nmost_percent = 20\n')
    with pytest.raises(UsageError, match="--auto-converge does not go with"):
        NOTHING._replace(policy=file, auto_converge=True).options()
    with pytest.raises(UsageError, match="--method hybrid"):
        NOTHING._replace(policy=file, method=MethodWord.hybrid).options()
    assert NOTHING._replace(policy=file).options().throttles_at_will
