"""How much a command shows on stderr beside warnings and errors."""

from enum import Enum


class Verbosity(Enum):
    """`PLAIN`: progress and notes as lines, also on a terminal, between lines of a trace."""

    QUIET = "no progress, no notes"
    USUAL = "progress and notes"
    PLAIN = "lines"


_now = Verbosity.USUAL


def set_verbosity(verbosity: Verbosity) -> None:
    """From here on."""
    global _now  # noqa: PLW0603 - one for the process
    _now = verbosity


def is_quiet() -> bool:
    """Whether progress and notes are left out."""
    return _now is Verbosity.QUIET


def is_plain() -> bool:
    """Whether a live display would be interrupted by other lines."""
    return _now is Verbosity.PLAIN
