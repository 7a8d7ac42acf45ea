"""The events that a drain reports while it runs."""

from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from vmckpt.events.types import Event
from vmckpt.fleet.drain.plan import DrainPlan


class Planned(NamedTuple):
    """What will be done from now on; reported again after each change."""

    plan: DrainPlan


class Began(NamedTuple):
    """A VM begins to move."""

    vm: str
    source: str
    destination: str


class Progressed(NamedTuple):
    """An event of a VM's move."""

    vm: str
    event: Event


class Ended(NamedTuple):
    """A VM's migration has ended. `why`: the reason for a failure, empty after a success."""

    vm: str
    where: str
    took_s: float
    why: str = ""


class Noted(NamedTuple):
    """Something that the operator should know."""

    text: str


DrainEvent = Planned | Began | Progressed | Ended | Noted
Show = Callable[[DrainEvent], None]


def unless_gone(show: Show) -> Show:
    """`show`, but a listener that has gone (a closed terminal or pipe) does not stop the drain."""

    def tell(event: DrainEvent) -> None:
        with suppress(OSError):
            show(event)

    return tell
