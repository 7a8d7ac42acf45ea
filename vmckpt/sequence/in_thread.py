"""Blocking calls in threads that end with the process, however long the calls take.

At exit Python waits for asyncio's own threads: a call that never returns would block it.
"""

import asyncio
import errno
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

# Retry interval.
AGAIN_S = 0.02
T = TypeVar("T")


class NoThreadError(OSError):
    """The kernel refuses to start a thread at the moment: the work has not begun."""


class StoppedError(Exception):
    """Raised in the thread: the work was cancelled."""


async def in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread; returns or raises what it does.

    A cancellation leaves it running and discards its result.

    Raises NoThreadError.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return  # cancelled meanwhile
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = work()
        except BaseException as exc:  # noqa: BLE001 - any error is raised in the awaiting task
            error = exc
        with suppress(RuntimeError):  # the event loop has ended meanwhile
            loop.call_soon_threadsafe(settle, result, error)

    try:
        threading.Thread(target=run, name="blocking-call", daemon=True).start()
    except RuntimeError as exc:
        raise NoThreadError(errno.EAGAIN, f"{os.strerror(errno.EAGAIN)}: {exc}") from exc
    return await done


async def in_thread_at_last(work: Callable[[], T]) -> T:
    """As `in_thread`, retried until the kernel starts a thread: for work that must be done."""
    while True:
        try:
            return await in_thread(work)
        except NoThreadError:
            await asyncio.sleep(AGAIN_S)


async def until_cancelled(work: Callable[[Callable[[], None]], T]) -> T:
    """As `in_thread`, but a cancellation stops the work and waits for its end.

    `work` regularly calls the function that it receives, which then raises StoppedError.
    """
    stop = threading.Event()

    def still_wanted() -> None:
        if stop.is_set():
            raise StoppedError

    task = asyncio.ensure_future(in_thread(lambda: work(still_wanted)))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        stop.set()
        await _outlast(task)
        raise


async def _outlast(task: "asyncio.Future[T]") -> None:
    while not task.done():
        with suppress(asyncio.CancelledError):  # the pending cancellation is raised at the end
            await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # cancelled: the result does not matter
