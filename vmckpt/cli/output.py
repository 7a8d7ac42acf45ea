"""Results on stdout, as text or as one JSON object; errors as what / why / what to do."""

import asyncio
import json
import signal
import sys
from collections.abc import Coroutine
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
    """Run `work`; Ctrl-C and SIGTERM cancel it, and it says itself what that came to."""

    async def supervised() -> T:
        task = asyncio.ensure_future(work)
        loop = asyncio.get_running_loop()

        def cancel() -> None:
            task.cancel()
            warn("asked to stop: going back, unless it is too late for that")

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, cancel)
        return await task

    try:
        return asyncio.run(supervised())
    except asyncio.CancelledError:
        raise typer.Abort from None


def warn(text: str) -> None:
    """Tell the operator something on stderr; whoever has gone is told nothing."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)
