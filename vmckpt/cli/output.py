"""Results on stdout, as text or as one JSON object; errors as what / why / what to do."""

import asyncio
import json
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Annotated, Any, TypeVar

import typer

from vmckpt.errors import VmckptError

T = TypeVar("T")

Json = Annotated[
    bool, typer.Option("--json", help="One JSON object on stdout; progress on stderr.")
]


def show(result: dict[str, Any], text: str, *, as_json: bool) -> None:
    """Print the result one way or the other."""
    print(json.dumps(result) if as_json else text)


def print_error(error: VmckptError, *, as_json: bool) -> int:
    """Print an error and return its exit code."""
    if as_json:
        words = {"kind": error.kind, "what": error.what, "why": error.why, "remedy": error.remedy}
        print(json.dumps({"error": words | {"exit_code": error.exit_code}}))
    warn(f"error: {error.what}\n  why: {error.why}\n  do:  {error.remedy}")
    return error.exit_code


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
        raise typer.Abort from None


_runner: asyncio.Runner | None = None
_at_end: list[Callable[[], Coroutine[Any, Any, None]]] = []
_ASKED_TO_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


async def _supervised(work: Coroutine[Any, Any, T]) -> T:
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()

    def cancel() -> None:
        task.cancel()
        warn("asked to stop: going back, unless it is too late for that")

    for number in _ASKED_TO_STOP:
        loop.add_signal_handler(number, cancel)
    try:
        return await task
    finally:
        for number in _ASKED_TO_STOP:
            loop.remove_signal_handler(number)


def at_end(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Have `work` done when the command has run, once, while hosts can still be asked."""
    if work not in _at_end:
        _at_end.append(work)


def end_running() -> None:
    """The command has run: connections to hosts are closed, and so is the event loop."""
    global _runner  # noqa: PLW0603 - as above
    if _runner is not None:
        from vmckpt.hosts.inventory import close_connections

        while _at_end:
            _runner.run(_at_end.pop()())
        _runner.run(close_connections())
        _runner.close()
        _runner = None


def warn(text: str) -> None:
    """Tell the operator something on stderr; whoever has gone is told nothing."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)
