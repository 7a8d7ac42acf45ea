"""What is typed after `vmckpt migrate` becomes options, or an error that names the way out."""

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
    ],
)
def test_options_at_odds_are_refused(asked: Asked, part: str) -> None:
    with pytest.raises(UsageError) as caught:
        asked.options()
    assert part in caught.value.remedy
