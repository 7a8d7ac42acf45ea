"""Decides the next step to keep a VM protected, from what was observed. No I/O, no clock."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import time
from enum import Enum
from typing import NamedTuple

from vmckpt.errors import UsageError


class DailyWindow(NamedTuple):
    """A part of each day, in local time; it may span midnight."""

    begins: time
    ends: time

    @classmethod
    def parse(cls, text: str) -> "DailyWindow":
        """Parse 22:00-06:00. Raises UsageError."""
        try:
            begins, ends = (time.fromisoformat(part) for part in text.split("-"))
        except ValueError:
            begins = ends = time()
        if begins == ends:
            raise UsageError(
                f"'{text}' is not a daily window",
                why="a window is two different times of day",
                remedy="write e.g. --window 22:00-06:00",
            )
        return cls(begins, ends)

    def has(self, now: time) -> bool:
        """Whether it includes this time; its start belongs to it, its end does not."""
        if self.begins < self.ends:
            return self.begins <= now < self.ends
        return now >= self.begins or now < self.ends


class KeepingMove(Enum):
    """What is due."""

    PROTECT = "unprotected, and is to be protected"
    STOP = "protected, and the window is over"
    FREE = "off, since the services of both sides died with their hosts: let it be started again"
    WAIT = "nothing can be done"
    GOOD = "all is as it should be"


@dataclass(frozen=True, slots=True)
class KeepingView:
    """`home`: the host that runs it; "": none does. `answering`: the roles of the replication's
    services that are alive. `up`: which hosts answer. `is_cut_down`: it is off at its only home,
    where its primary's service was killed, as was every other one that has not ended.
    """

    home: str
    answering: frozenset[str]
    up: frozenset[str]
    is_time: bool
    is_cut_down: bool = False


def decide(view: KeepingView, hosts: Sequence[str]) -> tuple[KeepingMove, str]:
    """The next move, and the host that should protect it, or why nothing can be done.

    `hosts`: those that may run the VM, preferred standbys first.
    """
    if view.answering:
        # A standby without its primary is about to take over: leave it alone.
        is_to_stop = not view.is_time and "primary" in view.answering
        return (KeepingMove.STOP if is_to_stop else KeepingMove.GOOD), ""
    if view.is_cut_down and view.up.issuperset(hosts):
        return KeepingMove.FREE, ""
    if not view.is_time:
        return KeepingMove.GOOD, ""
    if not view.home:
        return KeepingMove.WAIT, "it runs on no host that answers"
    others = [host for host in hosts if host != view.home]
    for host in others:
        if host in view.up:
            return KeepingMove.PROTECT, host
    return KeepingMove.WAIT, f"{', '.join(others) or 'no other host'} does not answer"
