"""Decides the primary's next move, and which output it may release. No I/O."""

import math
from dataclasses import dataclass
from enum import Enum


class ReplicaStanding(Enum):
    """Whether a replica may take over, according to the arbiter."""

    SOLO = "no replica may take over: the standby is stale"
    IN_SYNC = "a replica may take over"
    UNSETTLED = "a write that changes this is unanswered: either may be true"


class PrimaryMove(Enum):
    """What is due. The first that applies, in this order."""

    STAND_DOWN = "a higher term was granted: this guest never runs again"
    STOP_GUEST = "the lease is about to end: no vCPU runs and no output leaves until it is renewed"
    RECORD_SOLO = "the standby is silent: record that it is stale, then continue without it"
    RENEW = "ask for the lease to be renewed"
    SERVE = "nothing is due"


@dataclass(frozen=True, slots=True)
class PrimaryView:
    """The input of the primary's decisions; times by `clock.boottime_s`.

    `highest_term`: the highest seen anywhere, with the arbiter or on the wire. `held_until_s`: when
    the lease ends. `unanswered_since_s`: since when the oldest epoch that was sent has waited for
    its acknowledgement; None: none waits. `acknowledged`: the last epoch that the standby has.
    """

    term: int
    highest_term: int
    held_until_s: float = -math.inf
    renew_from_s: float = -math.inf
    standing: ReplicaStanding = ReplicaStanding.SOLO
    unanswered_since_s: float | None = None
    acknowledged: int = -1


def decide(view: PrimaryView, *, now_s: float, margin_s: float, patience_s: float) -> PrimaryMove:
    """The next move.

    `margin_s`: how long stopping the guest may take, clock reading included. `patience_s`: how long
    the standby may leave an epoch unanswered before it is given up.
    """
    if view.highest_term > view.term:
        return PrimaryMove.STAND_DOWN
    if not _holds(view, now_s + margin_s):
        return PrimaryMove.STOP_GUEST
    if view.standing is not ReplicaStanding.SOLO and _is_silent(view, now_s, patience_s):
        return PrimaryMove.RECORD_SOLO
    return PrimaryMove.RENEW if now_s >= view.renew_from_s else PrimaryMove.SERVE


def may_run(view: PrimaryView, *, now_s: float, margin_s: float) -> bool:
    """Whether the guest's vCPUs may run from now for `margin_s`."""
    return view.highest_term <= view.term and _holds(view, now_s + margin_s)


def may_release(view: PrimaryView, epoch: int, *, now_s: float, margin_s: float) -> bool:
    """Whether the output that the guest produced before the end of `epoch` may leave now.

    Only what a replica that may take over has seen, or when certainly no replica may.
    """
    covered = epoch <= view.acknowledged or view.standing is ReplicaStanding.SOLO
    return covered and may_run(view, now_s=now_s, margin_s=margin_s)


def _holds(view: PrimaryView, until_s: float) -> bool:
    return until_s < view.held_until_s


def _is_silent(view: PrimaryView, now_s: float, patience_s: float) -> bool:
    return view.unanswered_since_s is not None and now_s - view.unanswered_since_s > patience_s
