"""Events of an operation, as they happen: the interface to displays and records."""

from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple


class PhaseBegan(NamedTuple):
    """A step of the operation has begun; `at_s` counts from the operation's start."""

    at_s: float
    phase: str


class Progress(NamedTuple):
    """The state of a migration at one moment.

    Rates are zero, `expected_downtime_ms` and `eta_s` are None while unknown. `normal_pages` and
    `zero_pages` were sent so far.
    """

    at_s: float
    status: str
    round: int
    total_bytes: int
    remaining_bytes: int
    transferred_bytes: int
    throughput_bytes_per_s: float
    dirty_rate_bytes_per_s: float
    expected_downtime_ms: int | None
    throttle_percent: int
    postcopy_requests: int
    eta_s: float | None
    normal_pages: int = 0
    zero_pages: int = 0


class JobProgress(NamedTuple):
    """The state of a QEMU job (a snapshot) at one moment; `done` of `total` in QEMU's units."""

    at_s: float
    phase: str
    done: int
    total: int


class Note(NamedTuple):
    """Something that the operator should know: a warning, a decision, a recovery."""

    at_s: float
    code: str
    text: str


Event = PhaseBegan | Progress | JobProgress | Note
Emit = Callable[[Event], None]


def ignore_event(_: Event) -> None:
    """Discard the event: for operations without a listener."""


def unless_gone(emit: Emit) -> Emit:
    """Wrap `emit`: a listener that is gone (a closed terminal or pipe) does not stop the sender."""

    def tell(event: Event) -> None:
        with suppress(OSError):
            emit(event)

    return tell
