"""Operations as lists of steps: undone newest first until the commit, then only forward."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from vmckpt.errors import OutcomeUnknownError, VmLostError

T = TypeVar("T")
U = TypeVar("U")
Action = Callable[[], Coroutine[Any, Any, None]]


class Step(NamedTuple):
    """One step. `undo` is idempotent: it may follow a half-finished `do`."""

    name: str
    do: Action
    undo: Action | None = None
    # Not cancellable; its normal return is the commit, its error means that nothing happened.
    commits: bool = False


class UndoFailure(NamedTuple):
    """An undo that raised; the others were still run."""

    step: str
    error: Exception


async def run_steps(
    steps: Sequence[Step],
    *,
    started: Callable[[Step], Awaitable[None]],
    undo_failed: Callable[[UndoFailure], None],
) -> None:
    """Run `steps` in order; `started` is awaited before each (to journal it).

    Until a committing step has returned, an error or a cancellation undoes every started step,
    newest first, and is raised again. From then on the steps only go forward, errors are raised as
    they are, and a cancellation comes too late and is dropped: a cancellation that is raised means
    that everything was undone. An undo may itself find that the operation ended otherwise and raise
    OutcomeUnknownError or VmLostError: then nothing older is undone. If a step raises one of these
    two, nothing is undone at all: the step has left things as they have to be.
    """
    undos: list[Step] = []
    for number, step in enumerate(steps):
        undos.append(step)
        try:
            await started(step)
            if not step.commits:
                await step.do()
                continue
            await to_the_end(step.do())
        except (OutcomeUnknownError, VmLostError):
            raise
        except BaseException:
            await finish(_undo(undos, undo_failed))
            raise
        await to_the_end(_forward(steps[number + 1 :], started))
        return


async def _forward(steps: Sequence[Step], started: Callable[[Step], Awaitable[None]]) -> None:
    for step in steps:
        await started(step)
        await step.do()


async def _undo(steps: Sequence[Step], undo_failed: Callable[[UndoFailure], None]) -> None:
    for step in reversed(steps):
        if step.undo is None:
            continue
        try:
            await step.undo()
        except (OutcomeUnknownError, VmLostError):
            raise
        except Exception as exc:  # noqa: BLE001 - the older steps must be undone whatever happens here
            undo_failed(UndoFailure(step.name, exc))


async def finish(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end even when the caller is cancelled, once or repeatedly.

    The cancellation is raised afterwards; an error of `work` takes precedence.
    """
    task = asyncio.ensure_future(work)
    late = await _outlast(task)
    result = task.result()
    if late:
        raise late[-1]
    return result


async def both(first: Coroutine[Any, Any, T], second: Coroutine[Any, Any, U]) -> tuple[T, U]:
    """Run two pieces of work concurrently; return both results.

    When one fails, the other is cancelled and awaited before the error is raised: neither runs
    concurrently with an undo.
    """
    tasks = asyncio.ensure_future(first), asyncio.ensure_future(second)
    one, two = await _together(tasks)
    return one, two


async def all_of(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run pieces of work concurrently; return their results in order; see `both`."""
    return list(await _together([asyncio.ensure_future(work) for work in works]))


async def _together(tasks: Sequence["asyncio.Future[Any]"]) -> list[Any]:
    if not tasks:
        return []
    stopped: asyncio.CancelledError | None = None
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    except asyncio.CancelledError as exc:
        stopped = exc
    # Cancel each once: its reaction must not be interrupted, and is awaited.
    pending = [task for task in tasks if not task.done()]
    for task in pending:
        task.cancel()
    for task in pending:
        await _outlast(task)
    errors = [task.exception() for task in tasks if not task.cancelled()]
    if stopped:
        raise stopped
    if failed := next(filter(None, errors), None):
        raise failed
    return [task.result() for task in tasks]


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end; cancellations that arrive meanwhile are too late and are dropped."""
    task = asyncio.ensure_future(work)
    late, caller = await _outlast(task), asyncio.current_task()
    for _ in late:
        # Otherwise a later time-out in the caller would be mistaken for the cancellation (Python
        # 3.11).
        if caller is not None:
            caller.uncancel()
    return task.result()


async def _outlast(task: "asyncio.Future[Any]") -> list[asyncio.CancelledError]:
    """Wait for `task` in any case; return the cancellations that arrived meanwhile."""
    late: list[asyncio.CancelledError] = []
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as exc:
            late.append(exc)
    return late
