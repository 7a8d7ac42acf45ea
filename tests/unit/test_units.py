"""Sizes, rates and durations: read as written, shown so that they can be read back."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmckpt.cli.options.arguments import TimeLimits
from vmckpt.errors import UsageError
from vmckpt.fleet.guard.health import parse_check
from vmckpt.options.migration import MigrationOptions
from vmckpt.qemu.replies import _port
from vmckpt.units import (
    GIB,
    KIB,
    MIB,
    TIB,
    format_duration,
    format_rate,
    format_size,
    format_time,
    parse_duration_s,
    parse_rate_bytes_per_s,
    parse_size_bytes,
    whole_number,
)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("512M", 512 * MIB),
        ("4GiB", 4 * GIB),
        ("4 gib", 4 * GIB),
        ("100MB", 100_000_000),
        ("1kB", 1000),
        ("1.5k", 1536),
        (" 2T ", 2 * TIB),
        ("7b", 7),
    ],
)
def test_sizes_are_read(text: str, size_bytes: int) -> None:
    assert parse_size_bytes(text) == size_bytes


@pytest.mark.parametrize(
    "text", ["", "M", "-1M", "1e3", "1 M M", "1,5G", "1.G", "12parsecs", "٣M", "9" * 400, "inf"]
)
def test_what_is_no_size_is_refused_and_quoted(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_size_bytes(text)
    assert f"'{text}'" in caught.value.what
    assert "GiB" in caught.value.remedy


def test_rates_take_a_size_a_second() -> None:
    assert parse_rate_bytes_per_s("1GiB/s") == parse_rate_bytes_per_s("1GiB") == GIB
    with pytest.raises(UsageError):
        parse_rate_bytes_per_s("1GiB/h")


@pytest.mark.parametrize(
    ("text", "duration_s"),
    [
        ("300ms", 0.3),
        ("5m", 300),
        ("1h30m", 5400),
        ("1m30s", 90),
        ("850us", 850e-6),
        ("2 d", 172_800),
        ("1.5s", 1.5),
        ("1m 30s", 90),
    ],
)
def test_durations_are_read(text: str, duration_s: float) -> None:
    assert parse_duration_s(text) == pytest.approx(duration_s)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "5",
        "m",
        "-5s",
        "5x",
        "1h30",
        "5 s x",
        "ms5",
        "9" * 400 + "s",
        "36526d",
        "5000000h",
        "9" * 15 + "d",
    ],
)
def test_what_is_no_duration_is_refused_and_quoted(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_duration_s(text)
    assert f"'{text}'" in caught.value.what


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1.5 * MIB, "1.50 MiB"),
        (12.34 * GIB, "12.3 GiB"),
        (500 * KIB, "500 KiB"),
        (5000 * TIB, "5000 TiB"),
    ],
)
def test_sizes_are_shown_with_three_digits(size_bytes: float, text: str) -> None:
    assert format_size(size_bytes) == text
    assert format_rate(size_bytes) == f"{text}/s"


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        (0, "0 us"),
        (850e-6, "850 us"),
        (0.0123, "12.3 ms"),
        (4.2, "4.20 s"),
        (90, "1m30s"),
        (3599.7, "1h00m"),
        (7500, "2h05m"),
    ],
)
def test_durations_are_shown_as_people_say_them(duration_s: float, text: str) -> None:
    assert format_duration(duration_s) == text


@given(st.integers(0, 1 << 60))
def test_a_shown_size_reads_back_within_its_digits(size_bytes: int) -> None:
    # Three digits, and truncation to a whole byte.
    assert parse_size_bytes(format_size(size_bytes)) == pytest.approx(size_bytes, rel=0.006, abs=1)


@given(st.floats(0, 1e7))
def test_a_shown_duration_reads_back_within_its_digits(duration_s: float) -> None:
    read_s = parse_duration_s(format_duration(duration_s))
    # Whole microseconds below a millisecond, tenths of milliseconds below a second.
    shown_s = 0.6e-6 if duration_s < 1e-3 else 0.06e-3
    assert read_s == pytest.approx(duration_s, rel=0.009, abs=shown_s)


@given(st.integers(0, 10**15 - 1), st.sampled_from(["", "K", "MiB", "GB", "T"]))
def test_whole_numbers_lose_nothing(number: int, unit: str) -> None:
    factor = parse_size_bytes(f"1{unit}")
    assert parse_size_bytes(f"{number}{unit}") == number * factor


@pytest.mark.parametrize("unix_s", [0, 1_795_000_000, 253e9])
def test_a_moment_is_told_in_the_local_time_zone(unix_s: float) -> None:
    assert format_time(unix_s) == f"{datetime.fromtimestamp(unix_s, UTC).astimezone():%F %T}"


@pytest.mark.parametrize("unix_s", [1 << 62, -(1 << 62), 10**400, 1e300])
def test_a_moment_that_no_calendar_has_ends_no_list(unix_s: float) -> None:
    assert format_time(unix_s) == "?"


@pytest.mark.parametrize(("text", "number"), [("0", 0), ("0080", 80), ("65535", 65535)])
def test_whole_numbers_are_read(text: str, number: int) -> None:
    assert whole_number(text, 65535) == number


@pytest.mark.parametrize("text", ["", "-1", "65536", "1.5", "²", "٣", "9" * 5000])
def test_what_is_no_such_number_is_none(text: str) -> None:
    """Python reads no number of more than 4,300 digits: "vmckpt has a bug"."""
    assert whole_number(text, 65535) is None
    assert _port([{"type": "inet", "port": text}]) is None
    for intent in ({"finish_by": f"{text}:00"}, {"max_slowdown": f"{text}%"}):
        with pytest.raises(UsageError):
            TimeLimits(**intent).intent(MigrationOptions())
    with pytest.raises(UsageError):
        parse_check(f"tcp:{text}", None)
