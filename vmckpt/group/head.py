"""The head of a group: leads all members through a cut or a restore, step by step.

It uses no clock: all members reach a step before any gets the next one. A member that fails, is
silent or late aborts it for all. Members protect themselves against a dead head
(`checkpoint/group/member.py`).
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NotRequired, TypedDict

from vmckpt.checkpoint.group.line import Line, given_up
from vmckpt.checkpoint.group.member import FAILED, TOGETHER_S, VOID
from vmckpt.codec import convert
from vmckpt.foreign import MalformedError
from vmckpt.group.turns import MemberSite, turns
from vmckpt.hosts.processes.scheduling import in_real_time
from vmckpt.hosts.remote.values import unpack_error
from vmckpt.sequence.steps import all_of

# A member that got its order in time has this long to report the result.
ANSWER_S = 10.0


class _MemberFailed(TypedDict):
    error: list[str]


class _MemberPrepared(TypedDict):
    machine: str
    processors: int
    stays_paused: NotRequired[bool]


class _MemberHeld(TypedDict):
    stopping_unix_s: float
    stopped_unix_s: float
    runs_unix_s: float
    held_s: float


class _MemberStored(TypedDict):
    id: str
    held: _MemberHeld


class _MemberTaken(TypedDict):
    pause_ms: float


class _MemberCommitted(TypedDict):
    result: _MemberTaken


class _MemberRestored(TypedDict):
    host: str
    warnings: list[str]


class _MemberSettled(TypedDict):
    result: _MemberRestored


# The fields that accompany a word, as far as they are read.
_MORE: Mapping[str, type] = {
    FAILED: _MemberFailed,
    "prepared": _MemberPrepared,
    "stored": _MemberStored,
    "committed": _MemberCommitted,
    "settled": _MemberSettled,
}


class GroupHead:
    """The connections to all members, by VM."""

    def __init__(self, lines: Mapping[str, Line]) -> None:
        self._lines = lines

    async def expect_all(
        self, word: str, within_s: float | None = None
    ) -> dict[str, Mapping[str, Any]]:
        """What each member sends with `word`. Raises the first one's error; OperationFailedError if
        one is gone, silent, or late.
        """
        works = [self._hear(vm, word, within_s) for vm in self._lines]
        return dict(zip(self._lines, await all_of(works), strict=True))

    def send_all(self, word: str, **more: Any) -> None:
        """Send a word to all of them at once."""
        for line in self._lines.values():
            line.send(word, **more)

    async def ask_all(self, word: str, within_s: float) -> dict[str, float]:
        """Send a word to all, and await it from each: how long each took. Raises as above."""
        now_s = asyncio.get_running_loop().time
        said_s = now_s()
        self.send_all(word)

        async def answered(vm: str) -> float:
            await self._hear(vm, word, within_s)
            return now_s() - said_s

        took_s = await all_of(answered(vm) for vm in self._lines)
        return dict(zip(self._lines, took_s, strict=True))

    async def in_turns(
        self, rows: Sequence[Sequence[str]], word: str, answer: str, within_s: float
    ) -> None:
        """Send to each when the previous one in its row has answered. All of it `within_s`.

        Raises as above.
        """
        now_s = asyncio.get_running_loop().time
        due_s = now_s() + within_s

        async def one_by_one(row: Sequence[str]) -> None:
            for vm in row:
                self._lines[vm].send(word)
                await self._hear(vm, answer, due_s - now_s(), of_s=within_s)

        await all_of(one_by_one(row) for row in rows)

    def give_up(self, why: str) -> None:
        """Have each undo what it can."""
        self.send_all(VOID, why=why)

    async def _hear(
        self, vm: str, word: str, within_s: float | None, *, of_s: float | None = None
    ) -> Mapping[str, Any]:
        """`within_s` is what others have left of `of_s`."""
        try:
            message = await self._lines[vm].receive(within_s)
        except TimeoutError as exc:
            limit_s = of_s or within_s or 0
            raise given_up(f"'{vm}' was not '{word}' within {limit_s:.3g} s") from exc
        try:
            convert(_MORE.get(message.word, object), message.more)
        except MalformedError as exc:
            raise given_up(f"'{vm}' said '{message.word}', and {exc}") from exc
        if message.word == FAILED:
            raise unpack_error(message.more["error"])
        if message.word != word:
            raise given_up(f"'{vm}' said '{message.word}' and not '{word}'")
        return message.more


async def cut(head: GroupHead, most_held_s: float, tell: Callable[[str], None]) -> dict[str, Any]:
    """Lead all members through one consistent cut; returns what each has stored, uncommitted.

    Output that a member sends after its own cut leaves its host only after the cuts of all: each
    holds its output, and releases it when all guests are paused. A member that released it earlier,
    because the order came too late, reports that, and the cut fails. Cuts need not be simultaneous:
    members on one machine with few processors take turns.
    """
    prepared = await head.expect_all("prepared")
    tell("all are ready")
    answers_s = await head.ask_all("set", TOGETHER_S)
    sites = {
        vm: MemberSite(
            message["machine"],
            message["processors"],
            answers_s[vm],
            message.get("stays_paused", False),
        )
        for vm, message in prepared.items()
    }
    with in_real_time():
        await head.in_turns(turns(sites, most_held_s), "cut", "stopped", most_held_s)
        head.send_all("release")
    await head.expect_all("captured", ANSWER_S)
    head.send_all("store")
    tell("all guests were paused: storing")
    return dict(await head.expect_all("stored"))


async def _allowed() -> None:
    """Nothing is against it."""


async def restore(
    head: GroupHead,
    tell: Callable[[str], None],
    require: Callable[[], Awaitable[None]] = _allowed,
) -> dict[str, Any]:
    """Lead all members through a restore; returns their results once their guests run.

    No restored guest runs before all old ones are paused: their output would come from a discarded
    future. `require` raises what is against it once all members are ready, and hold their VMs.
    """
    await head.expect_all("ready")
    await require()
    tell("all can continue")
    head.send_all("switch")
    await head.expect_all("switched", TOGETHER_S)
    head.send_all("run")
    await head.expect_all("running", TOGETHER_S)
    head.send_all("done")
    return {vm: message["result"] for vm, message in (await head.expect_all("settled")).items()}
