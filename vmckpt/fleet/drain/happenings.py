"""What a drain tells while it runs."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from vmckpt.events.types import Event
from vmckpt.fleet.drain.plan import DrainPlan


@dataclass(frozen=True, slots=True)
class Planned:
    """What will be done, from now on; told again where it has to be changed."""

    plan: DrainPlan


@dataclass(frozen=True, slots=True)
class Began:
    """A VM begins to move."""

    vm: str
    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Went:
    """An event of a VM's move."""

    vm: str
    event: Event


@dataclass(frozen=True, slots=True)
class Ended:
    """A VM's move is over; `why` it did not succeed, empty if it did."""

    vm: str
    where: str
    took_s: float
    why: str = ""


@dataclass(frozen=True, slots=True)
class Said:
    """Something that the operator should know."""

    text: str


Happening = Planned | Began | Went | Ended | Said
Show = Callable[[Happening], None]


def heard_or_not(show: Show) -> Show:
    """`show`, but a listener that has gone (a closed terminal or pipe) does not stop the drain."""

    def tell(happening: Happening) -> None:
        with suppress(OSError):
            show(happening)

    return tell
