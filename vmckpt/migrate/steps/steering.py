"""Decisions during a transfer, by its options: post-copy, timeouts, aborts."""

from enum import Enum
from typing import NamedTuple

from vmckpt.errors import OperationFailedError, TimedOutError
from vmckpt.forecast.model.convergence import Passes, Rounds, has_stalled
from vmckpt.forecast.model.pilot import Pilot, PolicyDecision
from vmckpt.options.migration import Method, MigrationOptions, OnTimeout
from vmckpt.units import format_duration, format_rate, format_size

# No byte for this long while QEMU says "active": QEMU never notices a silent link by itself.
SILENCE_S = 15.0
# Before the second round QEMU has not sent all pages once, and post-copy would have to send all.
FIRST_POSTCOPY_ROUND = 2


class TransferFigures(NamedTuple):
    """A transfer at one moment. The dirty rate is meaningless before round 2."""

    round: int
    remaining_bytes: int
    transferred_bytes: int
    throughput_bytes_per_s: float
    dirty_rate_bytes_per_s: float


class SteeringOrder(Enum):
    """What to do now; the value is the code of the note that reports it."""

    START_POSTCOPY = "postcopy"
    STOP_GUEST = "time-up"


class Steering:
    """The decisions of one transfer. Each order is given once."""

    def __init__(self, options: MigrationOptions) -> None:
        self._options = options
        self._rounds, self._passes = Rounds(), Passes()
        self._time_is_up = self._requested_postcopy = False
        self._silent_since_s, self._last_sent = 0.0, -1

    @property
    def rounds(self) -> int:
        """Rounds that have begun."""
        return len(self._rounds.left_bytes)

    def see(self, figures: TransferFigures, *, held: bool = False) -> None:
        """Record what each round had left to send, and whether the switchover was held back
        then.
        """
        self._rounds.see(figures.round, figures.remaining_bytes, held=held)

    def steer(
        self, figures: TransferFigures, elapsed_s: float, *, fitting_bytes: float = 0.0
    ) -> tuple[SteeringOrder, str] | None:
        """What to do now, and why. Raises TimedOutError after the time limit without another
        option.

        Call it while the guest runs on the source. With `fitting_bytes` or less left, pre-copy is
        about to end.
        """
        options = self._options
        self._passes.see(figures.round, elapsed_s)
        if not self._time_is_up and (given := self._over(elapsed_s)):
            self._time_is_up = True
            if options.on_timeout is OnTimeout.ABORT:
                raise _timed_out(given, figures, self.rounds)
            if options.on_timeout is OnTimeout.PAUSE:
                return (
                    SteeringOrder.STOP_GUEST,
                    f"{given} are over: stopping the VM to send the rest",
                )
        if self._requested_postcopy or figures.round < FIRST_POSTCOPY_ROUND:
            return None
        reason = self._why_postcopy()
        ends = options.method is Method.HYBRID and figures.remaining_bytes <= fitting_bytes
        if reason is None or (ends and not self._time_is_up):
            return None
        self._requested_postcopy = True
        return SteeringOrder.START_POSTCOPY, f"switching to post-copy: {reason}"

    def _over(self, elapsed_s: float) -> str:
        """The expired time limit, in words."""
        limit_s, limit = self._options.timeout_s, self._options.timeout_passes
        if limit_s is not None and elapsed_s > limit_s:
            return format_duration(limit_s)
        gone = self._passes.gone(elapsed_s)
        if limit is not None and gone is not None and gone > limit:
            once = format_duration(elapsed_s / gone)
            return f"{format_duration(elapsed_s)} ({limit:g} times the {once} of sending it once)"
        return ""

    def _why_postcopy(self) -> str | None:
        options = self._options
        if options.method is Method.POSTCOPY:
            return "all pages were sent once"
        if options.method is Method.HYBRID and has_stalled(self._rounds.counting):
            return "the last rounds gained nothing: pre-copy will not end"
        if self._time_is_up and options.on_timeout is OnTimeout.POSTCOPY:
            return "the time is up"
        return None

    def check_silence(self, transferred_bytes: int, now_s: float, *, expected: bool) -> None:
        """Raises OperationFailedError if no byte has moved for too long, unless `expected`."""
        if transferred_bytes != self._last_sent or expected:
            self._silent_since_s, self._last_sent = now_s, transferred_bytes
        elif now_s - self._silent_since_s > SILENCE_S:
            raise OperationFailedError(
                "the migration makes no progress",
                why=f"no byte has moved for {SILENCE_S:g} s, and QEMU never notices by itself",
                remedy="check the network between the hosts and the destination's load",
            )

    def listen_anew(self, now_s: float) -> None:
        """Restart the measurement of silence."""
        self._silent_since_s, self._last_sent = now_s, -1


def pilot(options: MigrationOptions) -> Pilot | None:
    """The active policy, if any."""
    policy = options.steers
    return None if policy is None else Pilot(policy, options.max_downtime_ms)


def given_up(decision: PolicyDecision) -> OperationFailedError:
    """The error of a migration that its policy aborts."""
    return OperationFailedError(
        "the policy aborted the migration",
        why=decision.why,
        remedy="allow more downtime, bandwidth or time, or another policy",
    )


def _timed_out(given: str, figures: TransferFigures, rounds: int) -> TimedOutError:
    link = format_rate(figures.throughput_bytes_per_s)
    if rounds < FIRST_POSTCOPY_ROUND:
        sent, left = format_size(figures.transferred_bytes), format_size(figures.remaining_bytes)
        why = f"{sent} went at {link}, {left} were still left"
    else:
        dirty = format_rate(figures.dirty_rate_bytes_per_s)
        why = f"after {rounds} rounds the guest dirties {dirty}, the link takes {link}"
    return TimedOutError(
        f"the migration did not end within {given}",
        why=why,
        remedy="allow more time, downtime or bandwidth, or use --method hybrid",
    )
