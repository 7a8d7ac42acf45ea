"""Sizes, rates and durations: parsing and formatting."""

import re
from datetime import UTC, datetime

from vmckpt.errors import UsageError

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

_SIZE_UNITS = {
    "": 1,
    "b": 1,
    "k": KIB,
    "kib": KIB,
    "kb": 1000,
    "m": MIB,
    "mib": MIB,
    "mb": 1000**2,
    "g": GIB,
    "gib": GIB,
    "gb": 1000**3,
    "t": TIB,
    "tib": TIB,
    "tb": 1000**4,
}
_DURATION_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
# The longest time from now that still has a date.
MOST_DURATION_S = 36525 * 86400.0
# More digits than this are a typo, not a size.
_DIGITS = r"([0-9]{1,15}(?:\.[0-9]{1,9})?)"
_NUMBER = re.compile(rf"\s*{_DIGITS}\s*([A-Za-z]*)\s*")
_DURATION_PART = rf"\s*{_DIGITS}\s*(us|ms|s|m|h|d)\s*"
_DURATION = re.compile(f"(?:{_DURATION_PART})+")


def parse_size_bytes(text: str) -> int:
    """Bytes in `text`: a number and a unit.

    K, M, G, T and KiB, MiB, … are powers of 1024; kB, MB, … powers of 1000; without a unit: bytes.
    Raises UsageError.
    """
    match = _NUMBER.fullmatch(text)
    unit = _SIZE_UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise UsageError(
            f"'{text}' is not a size",
            why="a size is a number and a unit",
            remedy="write e.g. 512M, 4GiB, 100MB",
        )
    whole, _, fraction = match[1].partition(".")
    scale: int = 10 ** len(fraction)
    return int(whole) * unit + int(fraction or 0) * unit // scale


def whole_number(text: str, most: int) -> int | None:
    """The whole number from 0 to `most` that `text` is; None: it is not one, however long it is."""
    number = int(text) if re.fullmatch("[0-9]{1,15}", text) else None
    return None if number is None or number > most else number


def parse_rate_bytes_per_s(text: str) -> int:
    """Bytes per second in `text`: a size, optionally followed by /s. Raises UsageError."""
    return parse_size_bytes(text.removesuffix("/s"))


def parse_duration_s(text: str) -> float:
    """Seconds in `text`: a number and us, ms, s, m, h or d; several may follow (1m30s).

    Raises UsageError.
    """
    if not _DURATION.fullmatch(text):
        bare = text.replace(".", "", 1).isdecimal()
        raise UsageError(
            f"'{text}' is not a duration",
            why="its unit is missing" if bare else "a duration is a number and a unit",
            remedy=f"write e.g. {text}ms or {text}s" if bare else "write e.g. 300ms, 5m, 1h30m",
        )
    parts = re.findall(_DURATION_PART, text)
    found = sum(float(number) * _DURATION_UNITS_S[unit] for number, unit in parts)
    if found > MOST_DURATION_S:
        raise UsageError(
            f"'{text}' is too long", why="the maximum is 100 years", remedy="write e.g. 30d"
        )
    return found


def format_size(size_bytes: float) -> str:
    """`size_bytes` with three digits and a power-of-1024 unit: 512 B, 1.50 MiB, 12.3 GiB."""
    value, unit = float(size_bytes), "B"
    for bigger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, bigger
    if unit == "B":
        return f"{value:.0f} B"
    return f"{value:.{2 if abs(value) < 10 else 1 if abs(value) < 100 else 0}f} {unit}"


def format_rate(rate_bytes_per_s: float) -> str:
    """A size per second."""
    return f"{format_size(rate_bytes_per_s)}/s"


def format_duration(duration_s: float) -> str:
    """Format `duration_s` for people: 850 us, 12.3 ms, 4.20 s, 1m30s, 2h05m."""
    if duration_s < 1e-3:
        return f"{duration_s * 1e6:.0f} us"
    if duration_s < 1:
        return f"{duration_s * 1e3:.1f} ms"
    if duration_s < 60:
        return f"{duration_s:.2f} s"
    minutes, seconds = divmod(round(duration_s), 60)
    if minutes < 60:
        return f"{minutes}m{seconds:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m"


def format_age(age_s: float) -> str:
    """A duration in whole seconds at most: 5 s, 1m30s, 2h05m."""
    return f"{age_s:.0f} s" if age_s < 59.5 else format_duration(age_s)


def format_time(unix_s: float) -> str:
    """A moment in the local time zone, as "2026-11-27 00:17:21"; "?" for one beyond any calendar.

    Times from guests, hosts and files may be invalid.
    """
    try:
        return f"{datetime.fromtimestamp(unix_s, UTC).astimezone():%Y-%m-%d %H:%M:%S}"
    except (OverflowError, OSError, ValueError):
        return "?"


def counted(number: int, noun: str) -> str:
    """`1 VM`, `2 VMs`, `2 processes`."""
    ending = "es" if noun.endswith("s") else "s"
    return f"{number} {noun}{'' if number == 1 else ending}"
