"""Decides whether the standby takes over, and what prevents it. No I/O."""

import math
from dataclasses import dataclass
from enum import Enum

from vmckpt.lease.record import LeaseRecord
from vmckpt.lease.rule import Claimant, Holding, SeenRecord, is_entitled, wait_s


class StandbyMove(Enum):
    """What is due."""

    FOLLOW = "the primary is heard, or no term has been granted yet: continue receiving"
    STALE = "this replica is not in sync: it must not take over, whatever the primary does"
    STAND_DOWN = "another took a higher term: this replica is no longer of use"
    CLAIM = "the primary is silent on every path: take its term, so that it cannot continue alone"
    FENCE = "the term is held, but the primary may still act: have it killed, with proof"
    WAIT = "the primary may still act, and its lease may not have ended"
    TAKE = "the primary can no longer act: ask the arbiter for the next term"
    RENEW = "the term is held, but its lease has ended: renew it before anything runs"
    PROMOTE = "the term is held and the replica complete: the guest may run here"


class Fencing(Enum):
    """What can be done about a silent primary."""

    NONE = "no agent, or it was tried and gave no proof"
    READY = "an agent that has not been tried yet"
    UNDER_WAY = "an agent at work"


@dataclass(frozen=True, slots=True)
class StandbyView:
    """The input of the standby's decisions; times by `clock.boottime_s`.

    `me`: name and replica, as the arbiter knows them. `complete`: the replica is a complete epoch,
    not part of one. `follows_term`: the term of the primary from which it comes. `heard_s`: when
    the primary was last heard, by path. `dead`: the holder that a fencing agent has proved dead.
    `term` and `held_until_s`: the term that this standby took (0: none) and until when it holds it.
    `replaced`: the record that this term replaced.
    """

    me: Claimant
    complete: bool
    follows_term: int
    heard_s: tuple[float, ...]
    seen: SeenRecord | None = None
    fencing: Fencing = Fencing.NONE
    dead: Holding | None = None
    term: int = 0
    held_until_s: float = -math.inf
    replaced: SeenRecord | None = None


def decide(view: StandbyView, *, now_s: float, margin_s: float, silence_s: float) -> StandbyMove:
    """The next move.

    `margin_s`: how long starting the guest may take. `silence_s`: a path without traffic for this
    long is silent. A primary that is heard but has not renewed its lease has stopped its guest, so
    its term is taken anyway.
    """
    if view.seen is None:
        return StandbyMove.FOLLOW
    record = view.seen.now.record
    if view.term:
        return _with_term(view, record.term, now_s, margin_s)
    if not (view.complete and is_left_to(record, view.me, view.follows_term)):
        return StandbyMove.STAND_DOWN if record.term > view.follows_term else StandbyMove.STALE
    if wait_s(view.seen, now_s=now_s, dead=view.dead) == 0.0:
        return StandbyMove.TAKE
    if any(now_s - heard_s <= silence_s for heard_s in view.heard_s):
        return StandbyMove.FOLLOW
    return StandbyMove.CLAIM if view.fencing is Fencing.READY else StandbyMove.WAIT


def is_left_to(record: LeaseRecord, me: Claimant, follows_term: int) -> bool:
    """Whether this standby may take the next term: its replica has all released output.

    After a later term than its primary's that is so only if the arbiter lists it as in sync,
    regardless of who released that term.
    """
    is_of_its_primary = record.in_sync == me.replica or record.term == follows_term
    return is_of_its_primary and is_entitled(record, me)


def _with_term(view: StandbyView, highest_term: int, now_s: float, margin_s: float) -> StandbyMove:
    if highest_term > view.term:
        return StandbyMove.STAND_DOWN
    if view.replaced is not None and wait_s(view.replaced, now_s=now_s, dead=view.dead) > 0.0:
        return StandbyMove.FENCE if view.fencing is Fencing.READY else StandbyMove.WAIT
    return StandbyMove.PROMOTE if now_s + margin_s < view.held_until_s else StandbyMove.RENEW
