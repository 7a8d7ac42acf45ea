"""What is typed after `vmckpt migrate` becomes options, or an error that names the way out."""

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from vmckpt.cli.commands.migrate import migrate
from vmckpt.errors import UsageError
from vmckpt.options.declared import declarations, read
from vmckpt.options.migration import (
    AtTarget,
    Compression,
    Disks,
    Method,
    MigrationOptions,
    OnTimeout,
    Tls,
)
from vmckpt.options.sense import require_forecast, require_sense
from vmckpt.units import MIB

pytestmark = pytest.mark.unit
Given = Callable[[], MigrationOptions]


def asked(**words: Any) -> MigrationOptions:
    """What the command makes of these options."""
    return require_sense(read(MigrationOptions, words))


def test_what_is_not_said_is_as_options_are_by_themselves() -> None:
    assert asked() == MigrationOptions()


def test_the_command_says_nothing_by_itself() -> None:
    given = inspect.signature(migrate).parameters
    assert (
        asked(**{name: given[name].default for name, _ in declarations(MigrationOptions)})
        == MigrationOptions()
    )


def test_what_is_said_is_taken() -> None:
    found = asked(
        method=Method.HYBRID,
        max_downtime_ms="1s",
        bandwidth_bytes_per_s="8MiB/s",
        timeout_s="5m",
        on_timeout=OnTimeout.PAUSE,
        auto_converge=True,
        compression=Compression.ZSTD,
        channels=2,
        never_risk_postcopy=True,
        disks=Disks.COPY,
        tls=Tls.PSK,
    )
    assert found == MigrationOptions(
        method=Method.HYBRID,
        max_downtime_ms=1000,
        allowed_downtime_ms=1000,
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
    found = asked(
        throttle_initial_percent=30,
        throttle_increment_percent=15,
        compression=Compression.XBZRLE,
        xbzrle_cache_bytes="256MiB",
        postcopy_bandwidth_bytes_per_s="10MiB/s",
        abort_on_error=True,
        synchronous_writes=True,
        tls_name="b.example",
        name="web2",
        xml=xml,
        persistent_xml=persistent,
        graphics_uri="vnc://b",
    )
    assert found == MigrationOptions(
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
    found = asked(compression=Compression.ZLIB, compression_level=9, zero_copy=True)
    assert found == MigrationOptions(compression="zlib", compression_level=9, zero_copy=True)
    assert asked(offline=True) == MigrationOptions(offline=True)


@pytest.mark.parametrize(
    ("given", "option"),
    [
        (partial(asked, compression=Compression.XBZRLE), "--compress xbzrle"),
        (partial(asked, throttle_initial_percent=30), "--auto-converge-initial"),
        (partial(asked, zero_copy=True), "--zerocopy"),
        (partial(asked, offline=True), "--offline"),
        (partial(asked, auto_converge=True, channels=2), "--parallel beside --auto-converge"),
        (
            partial(asked, compression=Compression.ZSTD, channels=2, method=Method.STOP),
            "--compress zstd beside --method stop",
        ),
        (
            partial(asked, auto_converge=True, method=Method.HYBRID),
            "--auto-converge beside --method hybrid",
        ),
    ],
)
def test_what_no_forecast_is_of_goes_with_no_wish(given: Given, option: str) -> None:
    with pytest.raises(UsageError, match=f"{option} cannot be combined with"):
        require_forecast(given(), promises_downtime=False)


@pytest.mark.parametrize(
    "given",
    [
        partial(asked, compression=Compression.ZSTD, channels=4),
        partial(asked, auto_converge=True, method=Method.PRECOPY),
        partial(asked, channels=3, method=Method.PRECOPY),
        partial(asked, method=Method.HYBRID),
    ],
)
def test_what_is_forecast_goes_with_wishes(given: Given) -> None:
    require_forecast(given(), promises_downtime=True)


@pytest.mark.parametrize("then", [OnTimeout.PAUSE, OnTimeout.POSTCOPY])
def test_a_promised_pause_is_not_broken_when_the_time_is_up(then: OnTimeout) -> None:
    options = asked(timeout_s="5m", on_timeout=then)
    require_forecast(options, promises_downtime=False)
    with pytest.raises(
        UsageError, match=f"--on-timeout {then.value} cannot be combined with --max-downtime"
    ):
        require_forecast(options, promises_downtime=True)
    require_forecast(asked(timeout_s="5m"), promises_downtime=True)


def test_xml_that_is_no_domain_is_refused_at_once(tmp_path: Path) -> None:
    file = tmp_path / "net.xml"
    file.write_text("<network/>")
    with pytest.raises(UsageError, match="XML cannot be read"):
        asked(xml=file)
    file.write_bytes(DOMAIN.replace("web", "w\xe9b").encode("latin-1"))
    with pytest.raises(UsageError, match="cannot read"):
        asked(xml=file)


def test_a_record_has_no_xml() -> None:
    told = AtTarget("web2", "<secret/>", None, None).recorded()
    assert told == {"name": "web2", "xml": True, "persistent_xml": False, "graphics_uri": None}


@pytest.mark.parametrize(
    ("given", "part"),
    [
        (partial(asked, method=Method.PRECOPY, throttle_initial_percent=5), "--auto-converge"),
        (partial(asked, xbzrle_cache_bytes="64MiB"), "--compress xbzrle"),
        (
            partial(asked, compression=Compression.XBZRLE, xbzrle_cache_bytes="65M"),
            "256MiB",
        ),
        (
            partial(asked, compression=Compression.XBZRLE, xbzrle_cache_bytes="1k"),
            "256MiB",
        ),
        (partial(asked, compression=Compression.ZLIB, compression_level=10), "name one of these"),
        (partial(asked, compression_level=1), "name one of these"),
        (partial(asked, offline=True, method=Method.STOP), "leave it out"),
        (partial(asked, offline=True, channels=2), "leave it out"),
        (partial(asked, offline=True, max_downtime_ms="1s"), "leave it out"),
        (partial(asked, offline=True, throttle_increment_percent=5), "leave it out"),
        (partial(asked, on_timeout=OnTimeout.POSTCOPY), "--timeout 5m"),
        (partial(asked, max_downtime_ms="3000s"), "--method stop"),
        (partial(asked, max_downtime_ms="0ms"), "--max-downtime 300ms"),
        (partial(asked, timeout_s="1x"), "--timeout 5x"),
        (partial(asked, timeout_s="-3x"), "--timeout 5x"),
        (partial(asked, timeout_s="300"), "300ms"),
        (partial(asked, bandwidth_bytes_per_s="fast"), "100MB"),
        (partial(asked, observe_only=True), "--policy FILE"),
    ],
)
def test_options_at_odds_are_refused(given: Given, part: str) -> None:
    with pytest.raises(UsageError) as caught:
        given()
    assert part in caught.value.remedy


def test_a_vm_that_is_off_has_one_xml_and_no_calm(tmp_path: Path) -> None:
    file = tmp_path / "web.xml"
    file.write_text(DOMAIN)
    with pytest.raises(UsageError) as caught:
        asked(offline=True, persistent_xml=file)
    assert "use --xml" in caught.value.remedy
    usual = {name: of.default for name, of in inspect.signature(migrate).parameters.items()}
    words = {"vm": "web", "host": "b", "offline": True, "wait_for_calm": "1m"}
    with pytest.raises(UsageError) as caught:
        migrate(**usual | words)
    assert "leave it out" in caught.value.remedy


def test_a_time_limit_may_be_told_in_passes() -> None:
    found = asked(timeout_s="2.5x")
    assert (found.timeout_s, found.timeout_passes, found.has_timeout) == (None, 2.5, True)


def test_a_policy_that_slows_the_guest_goes_with_no_other_that_does(tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    file.write_text('[[when]]\nstalls = 2\ndo = "throttle"\nby_percent = 5\nmost_percent = 20\n')
    with pytest.raises(UsageError, match="--auto-converge cannot be combined with"):
        asked(policy=file, auto_converge=True)
    with pytest.raises(UsageError, match="--method hybrid"):
        asked(policy=file, method=Method.HYBRID)
    assert asked(policy=file).throttles_at_will
