"""The part of one VM in a group operation: the protocol of its service with the group's head.

A cut (vmckpt/group/README.md):

    member:  prepared -> set -> [held, stops] stopped -> [captured, runs; let go] captured
             -> stored -> committed
    head:    set (all are prepared) -> cut (all are set; those of one machine in turn)
             -> release (all have stopped) -> store (all have captured) -> commit (all have stored)

A restore:

    member:  ready -> switched (its old guest is paused) -> running
    head:    switch -> run -> done

A member that receives `void` instead, or nothing in time, undoes its part, whatever the others do.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import (
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from vmckpt.checkpoint.group.line import MOST_LINE_BYTES, Line, given_up
from vmckpt.epoch.capture import InPause
from vmckpt.errors import OperationFailedError, VmckptError
from vmckpt.hosts.processes.kernel import BOOT_ID
from vmckpt.hosts.processes.scheduling import in_real_time, own_processors, session_high_priority
from vmckpt.sequence.steps import both, finish

T = TypeVar("T")
VOID, FAILED = "void", "failed"
# Time limit for all other members together, between two time-critical words of the head.
TOGETHER_S = 10.0
# The head connects once the services of all members have started.
HEAD_S = 30.0
# How often a waiting member copies changed memory, to keep its pause short.
KEEP_UP_S = 0.05
# The longest pause before the cut; beyond it the service counts as stuck.
STUCK_S = 5.0


class Output(Protocol):
    """The guest's output, held from the cut on: `epoch.output.BriefHold`, `StaysPaused`."""

    @property
    def pauses_guest(self) -> bool:
        """Whether it is held by a guest that stays paused until it may leave."""

    def begin(self) -> list[Coroutine[Any, Any, Any]]:
        """Commands that begin to hold output."""

    async def release(self) -> None:
        """Release held output. Raises CommandRefusedError if it was released already."""

    async def release_all(self) -> None:
        """Release held output, if any."""


class HoldTimes(NamedTuple):
    """The guest's pause, and how long its output was held.

    Stopping began at `stopping_unix_s`; the guest was paused by `stopped_unix_s`.
    """

    stopping_unix_s: float
    stopped_unix_s: float
    runs_unix_s: float
    held_s: float


class MemberHost(NamedTuple):
    """A member's host: members on one machine share its processors.

    `stays_paused`: its guest stays paused until all others are paused, too.
    """

    machine: str
    processors: int
    stays_paused: bool


class OutputHold(NamedTuple):
    """For `Capture.epoch` of a member of a group.

    `begin`: commands that begin to hold the guest's output; `stopped`: to be called when the guest
    is paused; `may_run`: to be awaited before it is resumed; `runs`: to be called when it was.
    """

    begin: InPause
    stopped: Callable[[], None]
    may_run: Callable[[], Awaitable[object]] | None
    runs: Callable[[], None]


class Alone:
    """A VM outside any group: it does not wait for others, and its output is not held."""

    is_grouped = False

    def high_priority(self) -> AbstractContextManager[None]:
        """As `Member.high_priority`."""
        return nullcontext()

    def pausing(self, _tell_guard: Callable[[str], None]) -> AbstractContextManager[None]:
        """As `Member.pausing`."""
        return nullcontext()

    def send(self, _word: str, **_more: Any) -> None:
        """As `Member.say`."""

    async def all_prepared(self, _keep_up: Callable[[], Awaitable[None]]) -> None:
        """As `Member.all_prepared`."""

    async def cut(
        self,
        _output: Callable[[float], Output],
        _tell_guard: Callable[[str], None],
        capture: Callable[[OutputHold | None], Awaitable[T]],
    ) -> T:
        """As `Member.cut`."""
        return await capture(None)

    async def all_stored(self, _checkpoint_id: str) -> None:
        """As `Member.all_stored`."""

    async def all_ready(self) -> None:
        """As `Member.all_ready`."""

    async def all_switched(self) -> None:
        """As `Member.all_switched`."""

    async def all_running(self) -> None:
        """As `Member.all_running`."""


ALONE = Alone()


class Member:
    """One VM's part in a group; its output may be held for at most `most_s`."""

    is_grouped = True

    def __init__(self, line: Line, most_s: float, here: MemberHost) -> None:
        self._line, self.most_s, self._here = line, most_s, here
        self.held: HoldTimes | None = None

    def send(self, word: str, **more: Any) -> None:
        """Send a word to the head."""
        self._line.send(word, **more)

    async def receive(self, word: str, within_s: float | None = None) -> Mapping[str, Any]:
        """Wait for the head's word. Raises OperationFailedError if the head aborts or is gone."""
        try:
            message = await self._line.receive(within_s)
        except TimeoutError as exc:
            raise given_up(f"no '{word}' was received within {within_s or 0:.3g} s") from exc
        if message.word == word:
            return message.more
        raise given_up(str(message.more.get("why", message.word)))

    def high_priority(self) -> AbstractContextManager[None]:
        """Run at high priority, while this guest or those of others are paused."""
        return session_high_priority()

    @contextmanager
    def pausing(self, tell_guard: Callable[[str], None], most_s: float = STUCK_S) -> Iterator[None]:
        """A pause of its own, before the cut, at high priority.

        If this process gets stuck, the guard resumes the guest and this raises
        OperationFailedError.
        """
        with self.high_priority():
            until_s = _boottime_s() + most_s
            tell_guard(f"free {until_s}")
            try:
                yield
            finally:
                tell_guard("free inf")
        if _boottime_s() >= until_s:
            raise given_up(f"a pause of its guest took longer than {most_s:g} s")

    async def all_prepared(self, keep_up: Callable[[], Awaitable[None]]) -> None:
        """Wait for all others, without a time limit, calling `keep_up` regularly."""
        self.send("prepared", **self._here._asdict())
        waiting = asyncio.ensure_future(self.receive("set"))
        try:
            while not (await asyncio.wait({waiting}, timeout=KEEP_UP_S))[0]:
                await keep_up()
            waiting.result()
        finally:
            waiting.cancel()
            await asyncio.wait({waiting})

    async def cut(
        self,
        output: Callable[[float], Output],
        tell_guard: Callable[[str], None],
        capture: Callable[[OutputHold | None], Awaitable[T]],
    ) -> T:
        """Take part in the group's cut; returns the result of `capture`.

        `capture` pauses the guest, and resumes it. Output is held, for at most `most_s`, until all
        other guests are paused too, so that nothing sent after this cut is received before theirs.
        Data received after a cut is not part of it, so output need not wait until others have
        captured. This method does wait for that, because its further work would take processors
        from them.
        """
        with in_real_time():  # others wait for its words
            return await self._cut(output(self.most_s), tell_guard, capture)

    async def _cut(
        self,
        output: Output,
        tell_guard: Callable[[str], None],
        capture: Callable[[OutputHold | None], Awaitable[T]],
    ) -> T:
        self.send("set")
        await self.receive("cut", TOGETHER_S)
        now_s = asyncio.get_running_loop().time
        began_s, stopping_unix_s = now_s(), time.time()
        stopped_unix_s = runs_unix_s = held_s = paused_s = 0.0
        tell_guard(f"free {_boottime_s() + self.most_s}")
        released = asyncio.Event()

        def stopped() -> None:
            nonlocal stopped_unix_s
            stopped_unix_s = time.time()
            self.send("stopped")

        def runs() -> None:
            nonlocal runs_unix_s, paused_s
            runs_unix_s, paused_s = time.time(), now_s() - began_s

        async def captured() -> T:
            may_run = released.wait if output.pauses_guest else None
            return await capture(OutputHold(output.begin, stopped, may_run, runs))

        async def let_go() -> float:
            nonlocal held_s
            try:
                await self.receive("release", self.most_s)
            finally:  # also if there is none: the guest must run
                released.set()
            heard_s = now_s()
            await output.release()
            held_s = now_s() - began_s
            return heard_s

        try:
            found, heard_s = await both(captured(), let_go())
        except BaseException:
            with suppress(VmckptError):
                await finish(output.release_all())
            raise
        self.held = HoldTimes(stopping_unix_s, stopped_unix_s, runs_unix_s, held_s)
        tell_guard("free inf")
        if heard_s - began_s >= self.most_s:
            raise given_up(f"its output could be held for {self.most_s:g} s only")
        if paused_s >= self.most_s:  # its guard has resumed it, perhaps before all was captured
            raise given_up(f"its guest could be paused for {self.most_s:g} s only")
        self.send("captured")
        await self.receive("store", TOGETHER_S)
        return found

    async def all_stored(self, checkpoint_id: str) -> Mapping[str, Any]:
        """All is done but the commit: wait for all others; returns the description of the group."""
        self.send("stored", id=checkpoint_id, held=self.held and self.held._asdict())
        return dict((await self.receive("commit"))["group"])

    async def all_ready(self) -> None:
        """The guest could run here, and the old one is ready to pause: wait for all others."""
        self.send("ready")
        await self.receive("switch")

    async def all_switched(self) -> None:
        """The old guest is paused: wait until all are."""
        self.send("switched")
        await self.receive("run", TOGETHER_S)

    async def all_running(self) -> None:
        """The guest runs: wait until all do. Raises OperationFailedError: it must not continue.

        If the head has died, the guest continues: the head had ordered all members to run.
        """
        self.send("running")
        try:
            message = await self._line.receive(TOGETHER_S)
        except (TimeoutError, OperationFailedError):
            return
        if message.word == VOID:
            raise given_up(str(message.more.get("why", "")))


def _boottime_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@asynccontextmanager
async def joined(ear: Path, most_s: float, *, stays_paused: bool) -> AsyncIterator[Member]:
    """A member for the block; the head connects to the socket `ear`.

    `stays_paused`: see `MemberHost`. Raises OperationFailedError if it does not connect.
    """
    came: asyncio.Future[Line] = asyncio.get_running_loop().create_future()

    def visit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if came.done():
            writer.close()
        else:
            came.set_result(Line(reader, writer, "the group's head"))

    part = ear.with_suffix(".part")
    server = await asyncio.start_unix_server(visit, part, limit=MOST_LINE_BYTES)
    part.rename(ear)  # renamed once it listens
    try:
        async with asyncio.timeout(HEAD_S):
            line = await came
    except TimeoutError as exc:
        raise given_up(f"its head did not connect within {HEAD_S:g} s") from exc
    finally:
        server.close()
        ear.unlink(missing_ok=True)
    async with line.beating():
        here = MemberHost(BOOT_ID.read_text().strip(), own_processors(), stays_paused)
        yield Member(line, most_s, here)
