"""What to do about a pre-copy that gains nothing, as data."""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self


class Act(StrEnum):
    """What can be done.

    Allow a longer standstill, slow the guest's processors, go over to post-copy, stop the guest for
    the rest, give up.
    """

    RAISE_DOWNTIME = "raise-downtime"
    THROTTLE = "throttle"
    POSTCOPY = "postcopy"
    PAUSE = "pause"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class PolicyRule:
    """After so many stalled rounds in a row (0: whatever the rounds do), `act`.

    Not before `passes` times as long as sending all of memory once took: a deadline that grows with
    the guest's size and with the link's slowness. To raise is to allow `by_percent` more each time,
    up to `most_ms`; to throttle, to take `by_percent` more of the processors' time, up to
    `most_percent`. Other acts come once.
    """

    stalls: int
    act: Act
    by_percent: int = 0
    most_ms: int = 0
    most_percent: int = 0
    passes: int = 0


@dataclass(frozen=True, slots=True)
class Policy:
    """Rules, tried in order at each round.

    A round has stalled that leaves `stall_percent` of the best before it, or more. A rule for
    stalls waits for a round that leaves at most `near_best_percent` of the best, until twice its
    stalls.
    """

    rules: tuple[PolicyRule, ...]
    stall_percent: int = 96
    near_best_percent: int = 104

    @property
    def may_postcopy(self) -> bool:
        """Whether it could come to post-copy."""
        return any(rule.act is Act.POSTCOPY for rule in self.rules)

    @property
    def may_throttle(self) -> bool:
        """Whether it could come to a slower guest."""
        return any(rule.act is Act.THROTTLE for rule in self.rules)

    def within(self, most_ms: int | None, most_percent: int | None) -> Self:
        """The same policy within constraints on pause and slowdown.

        None: no constraint. Rules without effect within them are left out; so are rules after which
        the pause, or the wait for pages, is unknown.
        """
        rules = []
        for rule in self.rules:
            if rule.act is Act.RAISE_DOWNTIME and most_ms is not None:
                kept = replace(rule, most_ms=min(rule.most_ms, most_ms))
                rules += [kept] if kept.most_ms else []
            elif rule.act is Act.THROTTLE and most_percent is not None:
                kept = replace(rule, most_percent=min(rule.most_percent, most_percent))
                rules += [kept] if kept.most_percent else []
            elif rule.act not in (Act.PAUSE, Act.POSTCOPY) or most_ms is None:
                rules.append(rule)
        return replace(self, rules=tuple(rules))
