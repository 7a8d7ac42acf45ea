"""Steps: undone newest first until the commit, afterwards only forward; whatever interrupts."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest

from vmckpt.errors import OperationFailedError, OutcomeUnknownError, VmLostError
from vmckpt.sequence.steps import Step, UndoFailure, all_of, both, finish, run_steps, to_the_end

T = TypeVar("T")
NAMES = ("a", "b", "commit", "d", "e")
COMMIT = NAMES.index("commit")


def failed() -> OperationFailedError:
    return OperationFailedError("it failed", why="tested", remedy="none")


def unknown() -> OutcomeUnknownError:
    return OutcomeUnknownError("unknown", why="tested", remedy="none")


def lost() -> VmLostError:
    return VmLostError("lost", why="tested", remedy="none")


@dataclass
class Play:
    """Five steps, the third of which commits, and a log of what was called.

    A moment is "started b", "do b" or "undo b". `errors` are raised at theirs; `gate` is a moment
    that says `reached` and goes on when `opened`.
    """

    errors: dict[str, Exception] = field(default_factory=dict)
    gate: str = ""
    log: list[str] = field(default_factory=list)
    undo_failures: list[UndoFailure] = field(default_factory=list)
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    opened: asyncio.Event = field(default_factory=asyncio.Event)

    def steps(self) -> list[Step]:
        return [
            Step(
                name,
                lambda name=name: self._moment(f"do {name}"),  # type: ignore[misc]
                lambda name=name: self._moment(f"undo {name}"),  # type: ignore[misc]
                commits=name == "commit",
            )
            for name in NAMES
        ]

    async def _started(self, step: Step) -> None:
        await self._moment(f"started {step.name}")

    async def _moment(self, moment: str) -> None:
        self.log.append(moment)
        if moment == self.gate:
            self.reached.set()
            await self.opened.wait()
            self.log.append(f"{moment} went on")
        if moment in self.errors:
            raise self.errors[moment]

    def run(self) -> Coroutine[Any, Any, None]:
        return run_steps(self.steps(), started=self._started, undo_failed=self.undo_failures.append)

    async def cancel_at_gate(self, times: int) -> None:
        """Run; cancel `times` times at the gate, then open it. Raises what the run raises."""
        task = asyncio.ensure_future(self.run())
        await self.reached.wait()
        for _ in range(times):
            task.cancel()
            # Let it take notice: the second Ctrl-C comes later than the first.
            await turns(3)
        self.opened.set()
        await task

    @property
    def done(self) -> list[str]:
        return [moment[3:] for moment in self.log if moment in {f"do {name}" for name in NAMES}]

    @property
    def undone(self) -> list[str]:
        return [moment[5:] for moment in self.log if moment in {f"undo {name}" for name in NAMES}]


async def turns(number: int) -> None:
    """Give way to other tasks."""
    for _ in range(number):
        await asyncio.sleep(0)


def newest_first(last: str) -> list[str]:
    return list(reversed(NAMES[: NAMES.index(last) + 1]))


def test_all_steps_run_in_order_each_journalled_before_it_acts() -> None:
    play = Play()
    asyncio.run(play.run())
    assert play.log == [moment for name in NAMES for moment in (f"started {name}", f"do {name}")]


@pytest.mark.parametrize("name", NAMES[: COMMIT + 1])
@pytest.mark.parametrize("moment", ["started", "do"])
def test_an_error_before_the_commit_undoes_every_started_step(moment: str, name: str) -> None:
    error = failed()
    play = Play({f"{moment} {name}": error})
    with pytest.raises(OperationFailedError) as caught:
        asyncio.run(play.run())
    assert caught.value is error
    # The step that failed too: it may be half done.
    assert play.undone == newest_first(name)


@pytest.mark.parametrize("name", NAMES[COMMIT + 1 :])
@pytest.mark.parametrize("moment", ["started", "do"])
def test_an_error_after_the_commit_undoes_nothing(moment: str, name: str) -> None:
    play = Play({f"{moment} {name}": failed()})
    with pytest.raises(OperationFailedError):
        asyncio.run(play.run())
    assert play.undone == []


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ending", [unknown(), lost()])
def test_an_unknown_outcome_and_a_settled_loss_undo_nothing(
    name: str, ending: OutcomeUnknownError | VmLostError
) -> None:
    play = Play({f"do {name}": ending})
    with pytest.raises(type(ending)):
        asyncio.run(play.run())
    assert play.undone == []
    assert play.done == list(NAMES[: NAMES.index(name) + 1])


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("gate", ["started a", "do a", "started b", "do b", "started commit"])
def test_a_cancellation_before_the_commit_undoes_every_started_step(gate: str, times: int) -> None:
    play = Play(gate=gate)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(play.cancel_at_gate(times))
    assert play.undone == newest_first(gate.split()[1])
    assert f"{gate} went on" not in play.log


@pytest.mark.parametrize("times", [1, 2])
def test_a_committing_step_is_not_cancelled_and_what_follows_runs(times: int) -> None:
    play = Play(gate="do commit")
    asyncio.run(play.cancel_at_gate(times))
    assert "do commit went on" in play.log
    assert play.done == list(NAMES)
    assert play.undone == []


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("gate", ["started d", "do d", "started e", "do e"])
def test_a_cancellation_after_the_commit_comes_too_late(gate: str, times: int) -> None:
    play = Play(gate=gate)
    asyncio.run(play.cancel_at_gate(times))
    assert f"{gate} went on" in play.log
    assert play.done == list(NAMES)
    assert play.undone == []


def test_a_committing_step_that_fails_while_cancelled_is_undone_and_says_why() -> None:
    play = Play({"do commit": failed()}, gate="do commit")
    with pytest.raises(OperationFailedError):
        asyncio.run(play.cancel_at_gate(1))
    assert play.undone == ["commit", "b", "a"]


@pytest.mark.parametrize("times", [1, 2])
def test_a_cancellation_while_undoing_does_not_stop_the_undoing(times: int) -> None:
    play = Play({"do b": failed()}, gate="undo b")
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(play.cancel_at_gate(times))
    assert "undo b went on" in play.log
    assert play.undone == ["b", "a"]


def test_an_undo_that_fails_is_told_and_the_older_ones_run() -> None:
    error, undo_error = failed(), RuntimeError("the undo failed")
    play = Play({"do commit": error, "undo b": undo_error})
    with pytest.raises(OperationFailedError) as caught:
        asyncio.run(play.run())
    assert caught.value is error
    assert play.undone == ["commit", "b", "a"]
    assert play.undo_failures == [UndoFailure("b", undo_error)]


@pytest.mark.parametrize("ending", [unknown(), lost()], ids=["unknown", "lost"])
def test_an_undo_that_finds_another_ending_stops_the_undoing(
    ending: OutcomeUnknownError | VmLostError,
) -> None:
    play = Play({"do commit": failed(), "undo b": ending})
    with pytest.raises(type(ending)):
        asyncio.run(play.run())
    assert play.undone == ["commit", "b"]
    assert play.undo_failures == []


def test_steps_without_undo_or_commit_are_steps_too() -> None:
    log: list[str] = []

    async def act(name: str) -> None:
        log.append(name)

    async def started(step: Step) -> None:
        log.append(f"started {step.name}")

    steps = [Step("a", lambda: act("a")), Step("b", lambda: act("b"))]
    asyncio.run(run_steps(steps, started=started, undo_failed=lambda _: None))
    assert log == ["started a", "a", "started b", "b"]


class Work:
    """Something that takes until it is let go."""

    def __init__(self) -> None:
        self.begun, self.let_go = asyncio.Event(), asyncio.Event()
        self.ended = False

    async def work(self, error: Exception | None = None) -> str:
        self.begun.set()
        await self.let_go.wait()
        self.ended = True
        if error:
            raise error
        return "done"


async def interrupted(work: Work, task: "asyncio.Task[T]", times: int) -> T:
    await work.begun.wait()
    for _ in range(times):
        task.cancel()
        await turns(3)
        assert not work.ended
    work.let_go.set()
    return await task


@pytest.mark.parametrize("times", [1, 2, 3])
def test_finish_ends_its_work_and_then_lets_the_cancellation_through(times: int) -> None:
    async def play() -> None:
        work = Work()
        task = asyncio.create_task(finish(work.work()))
        with pytest.raises(asyncio.CancelledError):
            await interrupted(work, task, times)
        assert work.ended

    asyncio.run(play())


def test_finish_lets_an_error_of_its_work_come_first() -> None:
    async def play() -> None:
        work = Work()
        task = asyncio.create_task(finish(work.work(failed())))
        with pytest.raises(OperationFailedError):
            await interrupted(work, task, 1)

    asyncio.run(play())


@pytest.mark.parametrize("times", [0, 1, 2])
def test_to_the_end_gives_the_result_whatever_came(times: int) -> None:
    async def play() -> str:
        work = Work()
        return await interrupted(work, asyncio.create_task(to_the_end(work.work())), times)

    assert asyncio.run(play()) == "done"


def test_finish_without_interruption_is_its_work() -> None:
    async def play() -> str:
        work = Work()
        return await interrupted(work, asyncio.create_task(finish(work.work())), 0)

    assert asyncio.run(play()) == "done"


def test_both_give_their_results() -> None:
    async def give(value: int) -> int:
        await asyncio.sleep(0)
        return value

    assert asyncio.run(both(give(1), give(2))) == (1, 2)


def test_when_one_fails_the_other_has_ended_first() -> None:
    ended = []

    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError("first")

    async def linger() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("lingered")

    with pytest.raises(ValueError, match="first"):
        asyncio.run(both(fail(), linger()))
    with pytest.raises(ValueError, match="first"):
        asyncio.run(both(linger(), fail()))
    assert ended == ["lingered", "lingered"]


def test_what_one_does_about_a_cancellation_is_not_cut_short() -> None:
    """By another one, however deep it is and however often the caller is cancelled."""
    ended = []

    async def tidy_up(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await turns(5)
            ended.append(name)

    async def fail() -> None:
        await turns(2)
        raise failed()

    async def nested(times: int) -> None:
        work = both(both(tidy_up("a"), tidy_up("b")), fail() if not times else tidy_up("c"))
        task = asyncio.create_task(work)
        await turns(4)
        for _ in range(times):
            task.cancel()
            await turns(2)
        await task

    with pytest.raises(OperationFailedError):
        asyncio.run(nested(0))
    assert ended == ["a", "b"]
    for times in (1, 2, 3):
        ended.clear()
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(nested(times))
        assert sorted(ended) == ["a", "b", "c"]


def test_all_of_nothing_is_nothing() -> None:
    assert asyncio.run(all_of([])) == []


def test_a_time_out_after_a_cancellation_that_came_too_late_is_one() -> None:
    async def play() -> None:
        work = Work()

        async def caller() -> None:
            await to_the_end(work.work())
            async with asyncio.timeout(0.01):
                await asyncio.Event().wait()

        with pytest.raises(TimeoutError):
            await interrupted(work, asyncio.create_task(caller()), 2)

    asyncio.run(play())
