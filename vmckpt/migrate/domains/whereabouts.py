"""Where a domain is in the middle of a migration, by what both ends say, and what follows."""

from enum import Enum
from typing import NamedTuple

from vmckpt.vm.domains.flags import PausedReason, RunningReason, State


class Place(Enum):
    """What one end says of the domain; SILENT: nothing, LOCKED: not what becomes of it."""

    RUNNING = "runs"
    PAUSED = "is paused"
    WAITING = "waits for a migration"
    POSTCOPY = "is in post-copy"
    POSTCOPY_FAILED = "is in a post-copy whose connection broke"
    OFF = "is off"
    ABSENT = "is not there"
    SILENT = "gives no answer"
    LOCKED = "is locked by libvirtd, which is at work on it or waits for its QEMU"


class View(NamedTuple):
    """Both ends at one moment. `job`: the source's libvirtd works on it."""

    source: Place
    target: Place
    job: bool = False


class Move(Enum):
    """What is to be done, or who has the guest."""

    WAIT = "wait"
    SOURCE_OWNS = "the source has it"
    TARGET_OWNS = "the target has it"
    BROKEN_POSTCOPY = "its memory is on both, and the connection broke"
    LOST = "it runs nowhere"
    UNKNOWN = "it cannot be said"


def place(state: State, reason: int) -> Place:
    """What a libvirtd's answer means. Pure."""
    match state:
        case State.RUNNING | State.BLOCKED if reason == RunningReason.POSTCOPY:
            return Place.POSTCOPY
        case State.RUNNING | State.BLOCKED if reason == RunningReason.POSTCOPY_FAILED:
            return Place.POSTCOPY_FAILED
        # A target's QEMU is started before it waits: it has nothing yet.
        case State.PAUSED if reason in (PausedReason.MIGRATION, PausedReason.STARTING_UP):
            return Place.WAITING
        case State.PAUSED if reason == PausedReason.POSTCOPY:
            return Place.POSTCOPY
        case State.PAUSED if reason == PausedReason.POSTCOPY_FAILED:
            return Place.POSTCOPY_FAILED
        case State.PAUSED | State.PMSUSPENDED:
            return Place.PAUSED
        case State.RUNNING | State.BLOCKED | State.SHUTDOWN:
            return Place.RUNNING
        case _:
            return Place.OFF


_HAS_IT = frozenset({Place.RUNNING, Place.PAUSED})
_HAS_NOTHING = frozenset({Place.OFF, Place.ABSENT})
IN_POSTCOPY = frozenset({Place.POSTCOPY, Place.POSTCOPY_FAILED})


def decide(view: View) -> Move:
    """The next move; libvirt itself sees to it that the guest runs only once. Pure.

    WAIT may last for ever: the caller has a time limit, after which it counts as UNKNOWN.
    """
    ends = (view.source, view.target)
    if view.job or IN_POSTCOPY & set(ends):
        return _under_way(view)
    if view.source in _HAS_IT and view.target in _HAS_IT:
        return Move.UNKNOWN
    if view.target in _HAS_IT:
        # libvirt lets it run there only when the source has sent all and stands still for good.
        return Move.TARGET_OWNS
    if view.source in _HAS_IT:
        # libvirt lets the source go on only when the target cannot run it any more, or never heard
        # that it may.
        return Move.SOURCE_OWNS
    if view.source in _HAS_NOTHING and view.target in _HAS_NOTHING:
        return Move.LOST
    return Move.WAIT  # a silent end may come back; a waiting one is on its way to something else


def decide_off(view: View, *, known_to_target: bool) -> Move:
    """Who has a domain that is off, by where it is defined. Pure.

    libvirt defines it at the target before it forgets it at the source. WAIT as in `decide`.
    """
    ends = (view.source, view.target)
    if Place.SILENT in ends or Place.LOCKED in ends:
        return Move.WAIT
    if view.source is Place.ABSENT:
        return Move.UNKNOWN if view.target is Place.ABSENT else Move.TARGET_OWNS
    if view.source is not Place.OFF or view.target is Place.ABSENT:
        return Move.SOURCE_OWNS  # if it runs, somebody has started it
    if view.target is not Place.OFF:
        return Move.TARGET_OWNS
    return Move.SOURCE_OWNS if known_to_target else Move.TARGET_OWNS


def decide_left(view: View, *, moved: bool) -> Move:
    """Who has a domain whose migration has ended, `moved` or not, and left something behind. Pure.

    Meanwhile somebody may have moved it, by virsh too. WAIT: it cannot be told now.
    """
    if Place.SILENT in view[:2]:
        return Move.WAIT
    if not moved:
        theirs = decide(view) in (Move.TARGET_OWNS, Move.UNKNOWN)
        return Move.TARGET_OWNS if theirs or view.source is Place.ABSENT else Move.SOURCE_OWNS
    if view.target is Place.ABSENT:
        return Move.SOURCE_OWNS
    if view.job or view.source is Place.LOCKED:
        return Move.WAIT
    if view.source in _HAS_IT | IN_POSTCOPY:
        # Unless it runs there too: libvirtd may not have seen yet that it has gone.
        return Move.SOURCE_OWNS if view.target is Place.OFF else Move.WAIT
    return Move.TARGET_OWNS


def is_orphan(view: View) -> bool:
    """Whether the target waits for memory of a source that has ended. Pure.

    It goes on if it has got everything, which its libvirtd then says at once.
    """
    return view.source in _HAS_NOTHING and view.target is Place.POSTCOPY


def _under_way(view: View) -> Move:
    if view.source is view.target is Place.POSTCOPY_FAILED:
        return Move.BROKEN_POSTCOPY
    if view.source in _HAS_NOTHING and not is_orphan(view):
        return Move.LOST  # with the pages that the target has not got
    if view.source in IN_POSTCOPY and view.target in _HAS_NOTHING:
        return Move.LOST  # the guest ran there
    # While one end alone says that it failed, the two QEMUs may still be connected.
    return Move.WAIT
