"""What keeps a VM protected is to do next, from what it sees. No I/O, no clock."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import time
from enum import Enum
from typing import NamedTuple

from vmckpt.errors import UsageError


class DailyWindow(NamedTuple):
    """A part of each day, by local time; it may go over midnight."""

    begins: time
    ends: time

    @classmethod
    def parse(cls, text: str) -> "DailyWindow":
        """Of 22:00-06:00. Raises UsageError."""
        try:
            begins, ends = (time.fromisoformat(part) for part in text.split("-"))
        except ValueError:
            begins = ends = time()
        if begins == ends:
            raise UsageError(
                f"'{text}' is no part of a day",
                why="it is two times of day, and the first is not the second",
                remedy="write e.g. --window 22:00-06:00",
            )
        return cls(begins, ends)

    def has(self, now: time) -> bool:
        """Whether it is now; its begin belongs to it, its end does not."""
        if self.begins < self.ends:
            return self.begins <= now < self.ends
        return now >= self.begins or now < self.ends


class KeepingMove(Enum):
    """What is due."""

    PROTECT = "unprotected, and is to be protected"
    STOP = "protected, and the window is over"
    WAIT = "nothing can be done"
    GOOD = "all is as it should be"


@dataclass(frozen=True, slots=True)
class KeepingView:
    """`home`: the host that it runs on; "": none does. `answering`: the roles of the services of a
    replication that live. `up`: which hosts answer.
    """

    home: str
    answering: frozenset[str]
    up: frozenset[str]
    is_time: bool


def decide(view: KeepingView, hosts: Sequence[str]) -> tuple[KeepingMove, str]:
    """The next move, and the host that is to protect it, or why nothing can be done.

    `hosts`: which may run the VM, the ones to be preferred as its standby first.
    """
    if view.answering:
        # A standby without its primary is about to take over: it is left alone.
        is_to_stop = not view.is_time and "primary" in view.answering
        return (KeepingMove.STOP if is_to_stop else KeepingMove.GOOD), ""
    if not view.is_time:
        return KeepingMove.GOOD, ""
    if not view.home:
        return KeepingMove.WAIT, "it runs on no host that answers"
    others = [host for host in hosts if host != view.home]
    for host in others:
        if host in view.up:
            return KeepingMove.PROTECT, host
    return KeepingMove.WAIT, f"{', '.join(others) or 'no other host'} does not answer"
