"""The command `job`, with work that does what STATE/plan.json says: what any job may go through.

    {"work": [STEP, ...], "release": [STEP, ...], "recovery": [STEP, ...]}

`release` is for after the work, once the outcome was written; a recovery does not do it.

A step is "note TEXT", "trace COMMAND", "step TEXT" (as a checkpoint tells its steps), "tell" or
"tell finally" (the kind's example result), "refuse", "break" (as a bug does), "freeze", "die",
"fill" (the file system), "wait" (for good, STATE/waiting says so) or "done" (return the result). A
cancelled one takes a moment, and says STATE/undone.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from tests.job_examples import EXAMPLES
from vmckpt.cli.hidden.job import kind_of
from vmckpt.cli.loop import run
from vmckpt.errors import RefusedError
from vmckpt.events.trace import Detail, trace_command
from vmckpt.events.types import Note
from vmckpt.jobs import serve
from vmckpt.jobs.kind import Job, JobKind, JobWorker
from vmckpt.sequence.steps import finish


def command(state: Path) -> list[str]:
    """What a host's own vmckpt is then."""
    return [sys.executable, "-m", "tests.job_program", str(state)]


def _scripted(kind: JobKind[Any, Any], state: Path, recovers: bool) -> JobKind[Any, Any]:
    plan = json.loads((state / "plan.json").read_text())

    @asynccontextmanager
    async def worker(job: Job[Any, Any]) -> AsyncIterator[JobWorker[Any]]:
        async def recover() -> Any:
            (state / "recovered").touch()
            return await _play(kind, job, state, plan["recovery"])

        try:
            yield JobWorker(partial(_play, kind, job, state, plan["work"]), recover)
        finally:
            if not recovers:
                await _play(kind, job, state, plan["release"])
            with (state / "released").open("a") as file:
                file.write("x")

    return kind._replace(worker=worker)


async def _play(kind: JobKind[Any, Any], job: Job[Any, Any], state: Path, steps: list[str]) -> Any:
    result = EXAMPLES[kind.name].result
    for step in steps:
        match step.split():
            case ["note" | "step" as code, text]:
                job.emit(Note(0.0, code, text))
            case ["trace", name]:
                trace_command(job.vm, name)
            case ["tell", *finally_]:
                job.tell(result, is_final=bool(finally_))
            case ["refuse"]:
                raise RefusedError("it is refused", why="so says the plan", remedy="-")
            case ["break"]:
                raise KeyError("a bug")
            case ["freeze"]:
                os.kill(os.getpid(), signal.SIGSTOP)
            case ["die"]:
                os.kill(os.getpid(), signal.SIGKILL)
            case ["fill"]:
                _fill(state / "filler")
            case ["wait"]:
                await _wait(state)
            case ["done"]:
                return result
    return None


def _fill(path: Path) -> None:
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


async def _wait(state: Path) -> None:
    (state / "waiting").touch()
    try:
        await asyncio.sleep(600)
    except asyncio.CancelledError:
        await finish(_undo(state))
        raise


async def _undo(state: Path) -> None:
    await asyncio.sleep(0.3)
    (state / "undone").touch()


def main(state: Path, name: str, directory: Path, recovers: bool) -> None:
    """Do or recover the job."""
    kind = _scripted(kind_of(name), state, recovers)
    if recovers:
        run(serve.recover(kind, directory))
    else:
        detail = Detail.NAMES if "-v" in sys.argv else Detail.NOTHING
        run(serve.serve(kind, directory, command(state), detail))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[3], Path(sys.argv[4]), "--recover" in sys.argv)
