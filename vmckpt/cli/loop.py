"""What a command runs: one event loop, which signals end in good order.

It imports no typer, which costs as much as all that `vmckpt serve` needs.
"""

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from vmckpt.cli.stop_requests import StopRequestedError, signals
from vmckpt.ui.colour import coloured
from vmckpt.ui.shown import lines, one_line
from vmckpt.ui.verbosity import is_quiet

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run `work`; Ctrl-C and SIGTERM cancel it, and it says itself what that came to.

    All that a command runs shares one event loop, and so the connections to hosts.
    """
    global _runner  # noqa: PLW0603 - one for the process, made when it is needed
    if _runner is None:
        _runner = asyncio.Runner()
    try:
        return _runner.run(_supervised(work))
    except asyncio.CancelledError:
        from click.exceptions import Abort

        raise Abort from None


def run_until_interrupted(work: Coroutine[Any, Any, None]) -> None:
    """Run what has no other end than Ctrl-C or SIGTERM, and nothing to undo; on the same loop."""
    global _runner  # noqa: PLW0603 - as above
    if _runner is None:
        _runner = asyncio.Runner()
    with suppress(asyncio.CancelledError):
        _runner.run(_cancelled_by_signals(work))


_runner: asyncio.Runner | None = None
_at_end: list[Callable[[], Coroutine[Any, Any, None]]] = []


async def _supervised(work: Coroutine[Any, Any, T]) -> T:
    return await _cancelled_by_signals(
        work,
        lambda: warn("stopping: what was begun is undone, unless it is too late for that"),
    )


async def _cancelled_by_signals(
    work: Coroutine[Any, Any, T], on_signal: Callable[[], None] = lambda: None
) -> T:
    """Run `work` as a task that a signal cancels, and `on_signal` with it.

    Not left to asyncio, whose own handler wakes no loop when another thread gets the signal.
    """
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()

    def cancel() -> None:
        task.cancel()
        on_signal()

    before = {number: signal.getsignal(number) for number in signals()}
    for number in before:
        loop.add_signal_handler(number, cancel)
    try:
        return await task
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


def at_end(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Have `work` done when the command has run, once, while hosts can still be asked."""
    if work not in _at_end:
        _at_end.append(work)


def end_running() -> None:
    """The command has run: connections to hosts are closed, and so is the event loop.

    A signal cuts that short, without effect on the command's result.
    """
    global _runner
    runner, _runner = _runner, None
    if runner is not None:
        from vmckpt.hosts.inventory.inventory import close_connections

        with suppress(StopRequestedError):
            while _at_end:
                runner.run(_at_end.pop()())
            runner.run(close_connections())
            runner.close()


def note(text: str) -> None:
    """Print progress, or something good to know, on stderr; nothing with --quiet."""
    if not is_quiet():
        warn(text)


def warn(text: str) -> None:
    """Print a line on stderr, if it is still open."""
    warn_in_lines(one_line(text))


def warn_in_lines(text: str) -> None:
    """The same, of lines that are our own: what others wrote in them is one line each by then."""
    with suppress(OSError):
        print(coloured(lines(text), sys.stderr), file=sys.stderr, flush=True)
