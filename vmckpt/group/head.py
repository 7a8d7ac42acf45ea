"""Who leads a group through a cut or a restore: all members are told the same, step by step.

It decides nothing by a clock of its own: every member is at one step before any is told the next.
Any that fails, falls silent or is late ends it for all. Members guard themselves against a head
that has died (`checkpoint/group_member.py`).
"""

from collections.abc import Callable, Mapping
from typing import Any

from vmckpt.checkpoint.group_line import Line, given_up
from vmckpt.checkpoint.group_member import FAILED, TOGETHER_S, VOID
from vmckpt.hosts.remote.values import unpack_error
from vmckpt.sequence.steps import all_of

# A member that was told in time has so long to say what came of it.
ANSWER_S = 10.0


class Head:
    """The lines to all members, by VM."""

    def __init__(self, lines: Mapping[str, Line]) -> None:
        self._lines = lines

    async def all_say(
        self, word: str, within_s: float | None = None
    ) -> dict[str, Mapping[str, Any]]:
        """What each says with `word`. Raises the first one's error; OperationFailedError when one
        is gone, silent, or late.
        """
        works = [self._hear(vm, word, within_s) for vm in self._lines]
        return dict(zip(self._lines, await all_of(works), strict=True))

    def tell_all(self, word: str, **more: Any) -> None:
        """Tell all of them at once."""
        for line in self._lines.values():
            line.say(word, **more)

    def give_up(self, why: str) -> None:
        """Each undoes what it can."""
        self.tell_all(VOID, why=why)

    async def _hear(self, vm: str, word: str, within_s: float | None) -> Mapping[str, Any]:
        try:
            said = await self._lines[vm].hear(within_s)
        except TimeoutError as exc:
            raise given_up(f"'{vm}' was not '{word}' within {within_s or 0:.3g} s") from exc
        if said.word == FAILED:
            raise unpack_error(said.more["error"])
        if said.word != word:
            raise given_up(f"'{vm}' said '{said.word}' and not '{word}'")
        return said.more


async def cut(head: Head, most_held_s: float, tell: Callable[[str], None]) -> dict[str, Any]:
    """Lead all through one consistent cut; what each has stored, but not committed.

    Nothing that a member has sent after its own moment leaves its host before all have had theirs:
    each holds its output from its moment on, and is told to let go when all guests stand still.
    Whoever let go earlier, because it was told too late, says so, and the cut does not count.
    """
    await head.all_say("prepared")
    tell("all are ready")
    head.tell_all("set")
    await head.all_say("set", TOGETHER_S)
    head.tell_all("cut")
    await head.all_say("stopped", most_held_s)
    head.tell_all("release")
    await head.all_say("captured", ANSWER_S)
    head.tell_all("store")
    tell("the moment was had: storing")
    return dict(await head.all_say("stored"))


async def restore(head: Head, tell: Callable[[str], None]) -> dict[str, Any]:
    """Lead all through a restore; what each says when its guest runs and knows what it can.

    No restored guest runs before all old ones stand still: what those still send would be from a
    future that is not to be.
    """
    await head.all_say("ready")
    tell("all can go on")
    head.tell_all("switch")
    await head.all_say("switched", TOGETHER_S)
    head.tell_all("run")
    await head.all_say("running", TOGETHER_S)
    head.tell_all("done")
    return {vm: said["result"] for vm, said in (await head.all_say("settled")).items()}
