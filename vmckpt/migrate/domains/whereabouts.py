"""Decide from both ends' reports where a domain is in a migration, and what to do."""

from enum import Enum
from typing import NamedTuple

from vmckpt.vm.domains.flags import DomainState, PausedReason, RunningReason


class EndState(Enum):
    """What one end reports. SILENT: nothing; LOCKED: not what is happening to the domain."""

    RUNNING = "runs"
    PAUSED = "is paused"
    WAITING = "waits for a migration"
    POSTCOPY = "is in post-copy"
    POSTCOPY_FAILED = "is in a post-copy whose connection broke"
    OFF = "is off"
    ABSENT = "is not there"
    SILENT = "does not answer"
    LOCKED = "is locked by libvirtd, which is at work on it or waits for its QEMU"


class DomainView(NamedTuple):
    """Both ends at one moment. `job`: the source's libvirtd works on it."""

    source: EndState
    destination: EndState
    job: bool = False


class DomainMove(Enum):
    """What to do next, or who has the guest."""

    WAIT = "wait"
    SOURCE_OWNS = "the source has it"
    DESTINATION_OWNS = "the destination has it"
    BROKEN_POSTCOPY = "its memory is on both, and the connection broke"
    LOST = "it runs nowhere"
    UNKNOWN = "it cannot be said"


def end_state(state: DomainState, reason: int) -> EndState:
    """The meaning of a libvirtd's answer. Pure."""
    match state:
        case DomainState.RUNNING | DomainState.BLOCKED if reason == RunningReason.POSTCOPY:
            return EndState.POSTCOPY
        case DomainState.RUNNING | DomainState.BLOCKED if reason == RunningReason.POSTCOPY_FAILED:
            return EndState.POSTCOPY_FAILED
        # A destination's QEMU is started before it waits: it has nothing yet.
        case DomainState.PAUSED if reason in (PausedReason.MIGRATION, PausedReason.STARTING_UP):
            return EndState.WAITING
        case DomainState.PAUSED if reason == PausedReason.POSTCOPY:
            return EndState.POSTCOPY
        case DomainState.PAUSED if reason == PausedReason.POSTCOPY_FAILED:
            return EndState.POSTCOPY_FAILED
        case DomainState.PAUSED | DomainState.PMSUSPENDED:
            return EndState.PAUSED
        case DomainState.RUNNING | DomainState.BLOCKED | DomainState.SHUTDOWN:
            return EndState.RUNNING
        case _:
            return EndState.OFF


_HAS_IT = frozenset({EndState.RUNNING, EndState.PAUSED})
_HAS_NOTHING = frozenset({EndState.OFF, EndState.ABSENT})
IN_POSTCOPY = frozenset({EndState.POSTCOPY, EndState.POSTCOPY_FAILED})


def decide(view: DomainView) -> DomainMove:
    """The next move; libvirt itself ensures that the guest runs only once. Pure.

    WAIT may never end: after a time limit the caller treats it as UNKNOWN.
    """
    ends = (view.source, view.destination)
    if view.job or IN_POSTCOPY & set(ends):
        return _under_way(view)
    if view.source in _HAS_IT and view.destination in _HAS_IT:
        return DomainMove.UNKNOWN
    if view.destination in _HAS_IT:
        # libvirt runs it there only once the source has sent all and is stopped permanently.
        return DomainMove.DESTINATION_OWNS
    if view.source in _HAS_IT:
        # libvirt resumes the source only if the destination can no longer run it, or was never told
        # to.
        return DomainMove.SOURCE_OWNS
    if view.source in _HAS_NOTHING and view.destination in _HAS_NOTHING:
        return DomainMove.LOST
    return DomainMove.WAIT  # a silent end may return; a waiting one is in transition


def decide_off(view: DomainView, *, known_to_target: bool) -> DomainMove:
    """Who has a domain that is off, by where it is defined. Pure.

    libvirt defines it at the destination before it undefines it at the source. WAIT as in `decide`.
    """
    ends = (view.source, view.destination)
    if EndState.SILENT in ends or EndState.LOCKED in ends:
        return DomainMove.WAIT
    if view.source is EndState.ABSENT:
        return (
            DomainMove.UNKNOWN
            if view.destination is EndState.ABSENT
            else DomainMove.DESTINATION_OWNS
        )
    if view.source is not EndState.OFF or view.destination is EndState.ABSENT:
        return DomainMove.SOURCE_OWNS  # if it runs, it was started since
    if view.destination is not EndState.OFF:
        return DomainMove.DESTINATION_OWNS
    return DomainMove.SOURCE_OWNS if known_to_target else DomainMove.DESTINATION_OWNS


def decide_left(view: DomainView, *, moved: bool) -> DomainMove:
    """Where a domain is after a migration that left remains, `moved` or not. Pure.

    It may have been migrated again since, also by virsh. WAIT: unknown for now.
    """
    if EndState.SILENT in view[:2]:
        return DomainMove.WAIT
    if not moved:
        theirs = decide(view) in (DomainMove.DESTINATION_OWNS, DomainMove.UNKNOWN)
        return (
            DomainMove.DESTINATION_OWNS
            if theirs or view.source is EndState.ABSENT
            else DomainMove.SOURCE_OWNS
        )
    if view.destination is EndState.ABSENT:
        return DomainMove.SOURCE_OWNS
    if view.job or view.source is EndState.LOCKED:
        return DomainMove.WAIT
    if view.source in _HAS_IT | IN_POSTCOPY:
        # Unless it runs there too: libvirtd may not have noticed yet that it has gone.
        return DomainMove.SOURCE_OWNS if view.destination is EndState.OFF else DomainMove.WAIT
    return DomainMove.DESTINATION_OWNS


def is_orphan(view: DomainView) -> bool:
    """Whether the destination waits for memory of a source that has ended. Pure.

    It continues if it has everything, which its libvirtd then reports at once.
    """
    return view.source in _HAS_NOTHING and view.destination is EndState.POSTCOPY


def _under_way(view: DomainView) -> DomainMove:
    if view.source is view.destination is EndState.POSTCOPY_FAILED:
        return DomainMove.BROKEN_POSTCOPY
    if view.source in _HAS_NOTHING and not is_orphan(view):
        return DomainMove.LOST  # with the pages that the destination lacks
    if view.source in IN_POSTCOPY and view.destination in _HAS_NOTHING:
        return DomainMove.LOST  # the guest ran there
    # While only one end reports a failure, the two QEMUs may still be connected.
    return DomainMove.WAIT
