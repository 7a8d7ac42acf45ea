"""Parsing option values. All functions raise UsageError.

Commands import this for their help, too: parsers are imported only when something is parsed.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from vmckpt.errors import UsageError

if TYPE_CHECKING:
    from vmckpt.options.policy import Policy

# The largest downtime-limit that QEMU accepts: with it the VM is stopped at the first check.
UNLIMITED_DOWNTIME_MS = 2_000_000
_LEAST_CACHE_BYTES = 4096


def rate_bytes_per_s(text: str) -> int:
    """A bandwidth; empty text means no limit."""
    from vmckpt.units import parse_rate_bytes_per_s

    return parse_rate_bytes_per_s(text) if text else 0


def downtime_ms(text: str) -> int:
    """How long QEMU may stop a guest, at least 1 ms."""
    from vmckpt.units import parse_duration_s

    downtime_s = parse_duration_s(text)
    if downtime_s <= 0:
        raise UsageError(
            f"--max-downtime {text} is too short",
            why="a migration always has some downtime",
            remedy="write e.g. --max-downtime 300ms",
        )
    downtime = max(1, round(downtime_s * 1e3))
    if downtime > UNLIMITED_DOWNTIME_MS:
        raise UsageError(
            f"--max-downtime {text} is too long",
            why=f"QEMU takes at most {UNLIMITED_DOWNTIME_MS // 1000} s",
            remedy="leave it out, or use --method stop: it pauses the VM for as long as it takes",
        )
    return downtime


def timeout_s(text: str) -> float | None:
    """A time limit; None: it is given in passes (5x)."""
    from vmckpt.units import parse_duration_s

    return None if text.endswith("x") else parse_duration_s(text)


def timeout_passes(text: str) -> float | None:
    """A time limit in multiples of the time that sending all of memory once takes."""
    if not text.endswith("x"):
        return None
    number = text.removesuffix("x")
    if not number.replace(".", "", 1).isdecimal() or float(number) <= 1:
        raise UsageError(
            f"--timeout {text} cannot be kept",
            why="sending memory once is 1x, and what was dirtied meanwhile comes on top",
            remedy="write e.g. --timeout 5x",
        )
    return float(number)


def cache_bytes(text: str) -> int:
    """The size of XBZRLE's cache."""
    from vmckpt.units import parse_size_bytes

    size = parse_size_bytes(text)
    if size < _LEAST_CACHE_BYTES or size & (size - 1):
        raise UsageError(
            f"--xbzrle-cache {text} is not a valid cache size",
            why="QEMU requires a power of two of at least one page",
            remedy="write e.g. --xbzrle-cache 256MiB",
        )
    return size


def domain_xml(file: Path) -> str:
    """The text of a file that describes a domain."""
    from vmckpt.vm.domains.definition.description import parse_domain

    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as exc:
        raise UsageError(
            f"cannot read {file}", why=str(exc), remedy="name a file of a domain's XML"
        ) from exc
    parse_domain(text)
    return text


def policy(file: Path) -> "Policy":
    """The policy in a file."""
    from vmckpt.options.policy_file import read_policy

    return read_policy(file)
