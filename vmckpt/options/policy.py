"""What to do about a pre-copy that makes no progress, as data."""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self


class Act(StrEnum):
    """The possible actions.

    Allow a longer downtime, slow the guest's processors, switch to post-copy, stop the guest for
    the rest, give up.
    """

    RAISE_DOWNTIME = "raise-downtime"
    THROTTLE = "throttle"
    POSTCOPY = "postcopy"
    PAUSE = "pause"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class PolicyRule:
    """After this many stalled rounds in a row (0: regardless of rounds), `act`.

    Not before `passes` times the duration of sending all of memory once: a deadline that grows with
    the guest's size and a slower link. Raising allows `by_percent` more downtime each time, up to
    `most_ms`; throttling takes `by_percent` more of the processors' time, up to `most_percent`.
    Other actions happen once.
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

    A round has stalled if it leaves `stall_percent` of the best before it, or more. A rule for
    stalls waits for a round that leaves at most `near_best_percent` of the best, for up to twice
    its number of stalls.
    """

    rules: tuple[PolicyRule, ...]
    stall_percent: int = 96
    near_best_percent: int = 104

    @property
    def may_postcopy(self) -> bool:
        """Whether it may switch to post-copy."""
        return any(rule.act is Act.POSTCOPY for rule in self.rules)

    @property
    def may_throttle(self) -> bool:
        """Whether it may slow the guest."""
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
