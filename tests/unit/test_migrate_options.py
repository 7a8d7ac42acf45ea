"""What is typed after `vmckpt migrate` becomes options, or an error that names the way out."""

import inspect
from pathlib import Path

import pytest

from vmckpt.cli.migrate import migrate
from vmckpt.cli.migrate_asked import Asked
from vmckpt.cli.migrate_options import (
    CompressWord,
    DisksWord,
    MethodWord,
    TimeoutWord,
    TlsWord,
)
from vmckpt.errors import UsageError
from vmckpt.options.migration import AtTarget, Disks, Method, OnTimeout, Options, Tls
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


def test_the_command_says_nothing_by_itself() -> None:
    given = inspect.signature(migrate).parameters
    asked = Asked(**{name: given[name].default for name in Asked._fields})
    assert asked.options() == Options()


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


DOMAIN = "<domain type='kvm'><name>web</name><os><type>hvm</type></os></domain>"


def test_what_virsh_has_besides_is_taken_too(tmp_path: Path) -> None:
    xml, persistent = tmp_path / "web.xml", tmp_path / "kept.xml"
    xml.write_text(DOMAIN)
    persistent.write_text(DOMAIN.replace("kvm", "qemu"))
    asked = NOTHING._replace(
        auto_converge_initial=30,
        auto_converge_increment=15,
        compress=CompressWord.xbzrle,
        xbzrle_cache="256MiB",
        postcopy_bandwidth="10MiB/s",
        abort_on_error=True,
        synchronous_writes=True,
        tls_destination="b.example",
        dname="web2",
        xml=xml,
        persistent_xml=persistent,
        graphicsuri="vnc://b",
    )
    assert asked.options() == Options(
        throttle_initial_percent=30,
        throttle_increment_percent=15,
        compression="xbzrle",
        xbzrle_cache_bytes=256 * MIB,
        postcopy_bandwidth_bytes_per_s=10 * MIB,
        abort_on_error=True,
        synchronous_writes=True,
        tls_name="b.example",
        at_target=AtTarget("web2", DOMAIN, DOMAIN.replace("kvm", "qemu"), "vnc://b"),
    )
    asked = NOTHING._replace(compress=CompressWord.zlib, compress_level=9, zerocopy=True)
    assert asked.options() == Options(compression="zlib", compression_level=9, zero_copy=True)
    assert NOTHING._replace(offline=True).options() == Options(offline=True)


@pytest.mark.parametrize(
    ("asked", "option"),
    [
        (NOTHING._replace(compress=CompressWord.xbzrle), "--compress xbzrle"),
        (NOTHING._replace(auto_converge_initial=30), "--auto-converge-initial"),
        (NOTHING._replace(zerocopy=True), "--zerocopy"),
        (NOTHING._replace(offline=True), "--offline"),
        (NOTHING._replace(auto_converge=True, parallel=2), "--parallel beside --auto-converge"),
        (
            NOTHING._replace(compress=CompressWord.zstd, parallel=2, method=MethodWord.stop),
            "--compress zstd beside --method stop",
        ),
        (
            NOTHING._replace(auto_converge=True, method=MethodWord.hybrid),
            "--auto-converge beside --method hybrid",
        ),
    ],
)
def test_what_no_forecast_is_of_goes_with_no_wish(asked: Asked, option: str) -> None:
    with pytest.raises(UsageError, match=f"{option} does not go with"):
        asked.require_forecast(promises_pause=False)


@pytest.mark.parametrize(
    "asked",
    [
        NOTHING._replace(compress=CompressWord.zstd, parallel=4),
        NOTHING._replace(auto_converge=True, method=MethodWord.precopy),
        NOTHING._replace(parallel=3, method=MethodWord.precopy),
        NOTHING._replace(method=MethodWord.hybrid),
    ],
)
def test_what_is_forecast_goes_with_wishes(asked: Asked) -> None:
    asked.require_forecast(promises_pause=True)


@pytest.mark.parametrize("then", [TimeoutWord.pause, TimeoutWord.postcopy])
def test_a_promised_pause_is_not_broken_when_the_time_is_up(then: TimeoutWord) -> None:
    asked = NOTHING._replace(timeout="5m", on_timeout=then)
    asked.require_forecast(promises_pause=False)
    with pytest.raises(UsageError, match=f"--on-timeout {then.value} does not go with --max-pause"):
        asked.require_forecast(promises_pause=True)
    NOTHING._replace(timeout="5m").require_forecast(promises_pause=True)


def test_xml_that_is_no_domain_is_refused_at_once(tmp_path: Path) -> None:
    file = tmp_path / "net.xml"
    file.write_text("<network/>")
    with pytest.raises(UsageError, match="XML cannot be read"):
        NOTHING._replace(xml=file).options()
    file.write_bytes(DOMAIN.replace("web", "w\xe9b").encode("latin-1"))
    with pytest.raises(UsageError, match="cannot read"):
        NOTHING._replace(xml=file).options()


def test_a_record_has_no_xml() -> None:
    told = AtTarget("web2", "<secret/>", None, None).told()
    assert told == {"name": "web2", "xml": True, "persistent_xml": False, "graphics_uri": None}


@pytest.mark.parametrize(
    ("asked", "part"),
    [
        (NOTHING._replace(method=MethodWord.precopy, auto_converge_initial=5), "--auto-converge"),
        (NOTHING._replace(xbzrle_cache="64MiB"), "--compress xbzrle"),
        (NOTHING._replace(compress=CompressWord.xbzrle, xbzrle_cache="65M"), "--xbzrle-cache 256"),
        (NOTHING._replace(compress=CompressWord.xbzrle, xbzrle_cache="1k"), "--xbzrle-cache 256"),
        (NOTHING._replace(compress=CompressWord.zlib, compress_level=10), "name one of these"),
        (NOTHING._replace(compress_level=1), "name one of these"),
        (NOTHING._replace(offline=True, method=MethodWord.stop), "leave it out"),
        (NOTHING._replace(offline=True, parallel=2), "leave it out"),
        (NOTHING._replace(offline=True, max_downtime="1s"), "leave it out"),
        (NOTHING._replace(offline=True, auto_converge_increment=5), "leave it out"),
        (NOTHING._replace(offline=True, wait_for_calm="1m"), "leave it out"),
        (NOTHING._replace(offline=True, persistent_xml=Path("/x.xml")), "use --xml"),
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
