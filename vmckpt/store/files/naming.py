"""Names of checkpoints, unique per VM and store."""

import time
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from itertools import count
from typing import NamedTuple

from vmckpt.errors import RefusedError
from vmckpt.store.files.manifest import Manifest

MOST_LETTERS = 40
# The fewest digits that select an id, and the number shown in lists.
FEWEST_DIGITS, SHOWN_DIGITS = 4, 12
_ROOM_FOR_A_NUMBER = 2


class IfTaken(StrEnum):
    """What to do if another checkpoint of the VM has the requested name."""

    REFUSE = "refuse"
    REPLACE = "replace"
    NUMBER = "number"


class Called(NamedTuple):
    """The requested name of a checkpoint."""

    name: str
    if_taken: IfTaken = IfTaken.REFUSE


class Settled(NamedTuple):
    """The final name, and the checkpoints that it replaces."""

    name: str
    replaces: tuple[str, ...] = ()


def dated(of: str, made_for: str = "", at: time.struct_time | None = None) -> str:
    """The generated name of a checkpoint: VM, purpose, time."""
    words = time.strftime("%Y%m%d-%H%M%S", at or time.localtime())
    end = f"-{made_for}-{words}" if made_for else f"-{words}"
    return f"{of[: MOST_LETTERS - _ROOM_FOR_A_NUMBER - len(end)]}{end}"


def settle(called: Called, of_the_vm: Sequence[Manifest]) -> Settled:
    """Choose the final name among the VM's checkpoints. Raises RefusedError if it is in use."""
    named: dict[str, list[str]] = {}
    for one in of_the_vm:
        named.setdefault(str(one.facts.get("name")), []).append(one.id)
    if called.name not in named:
        return Settled(called.name)
    if called.if_taken is IfTaken.REPLACE:
        return Settled(called.name, tuple(named[called.name]))
    if called.if_taken is IfTaken.NUMBER:
        return Settled(_next(called.name, named))
    raise RefusedError(
        f"'{of_the_vm[0].vm}' has a checkpoint '{called.name}' already",
        why=f"{', '.join(one[:12] for one in named[called.name])} is called so in the same store",
        remedy="choose another name, or add --replace: the old one is removed when the new one is "
        "complete",
    )


def meant(text: str, names: Mapping[str, str | None]) -> list[str]:
    """The checkpoints that an operator may mean by `text`; `names` by id. Pure.

    An exact id, else all with that name, else all with that id prefix. From the number of digits
    that lists show, an id prefix also competes with names: clients that add checkpoints to a store
    choose their names.
    """
    named = [one for one, name in names.items() if name == text]
    begun = [one for one in names if len(text) >= FEWEST_DIGITS and one.startswith(text)]
    if text in names:
        return [text]
    return named if named and len(text) < SHOWN_DIGITS else list(dict.fromkeys([*named, *begun]))


def _next(name: str, taken: Collection[str]) -> str:
    ends = (f"-{number}" for number in count(2))
    names = (f"{name[: MOST_LETTERS - len(end)]}{end}" for end in ends)
    return next(one for one in names if one not in taken)
