"""The host's side: the worker process of a job, and its recovery."""

import asyncio
import gc
import os
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

from vmckpt.deadlines import poll
from vmckpt.errors import CancelledByUserError, OperationFailedError, VmckptError
from vmckpt.events.trace import Detail, trace, untrace
from vmckpt.hosts.processes.deadman import armed
from vmckpt.hosts.processes.process import PROCESS, identify
from vmckpt.jobs.files import JobFiles, forget_old
from vmckpt.jobs.kind import Job, JobKind
from vmckpt.state.documents import save_to

# Allows for a lost connection between starting the process and writing the order.
ORDER_S, ORDER_POLL_S = 60.0, 0.005
COMMAND = "job"


def command(own: Sequence[str], kind: str, directory: Path) -> list[str]:
    """The command line that runs a job; `own` is the host's own vmckpt."""
    return [*own, COMMAND, kind, str(directory)]


def recovery(own: Sequence[str], kind: str, directory: Path) -> list[str]:
    """The command line that recovers it."""
    return [*command(own, kind, directory), "--recover"]


async def serve(
    kind: JobKind[Any, Any],
    directory: Path,
    own_command: Sequence[str],
    detail: Detail = Detail.NOTHING,
) -> None:
    """Run the job in this directory, and trace it. Errors become its outcome.

    Raises NotFoundError: no order arrived, or the directory was removed.
    """
    gc.freeze()  # keep garbage collections short while a guest is paused
    files = JobFiles(directory)
    await poll(
        lambda: files.order.exists() or not directory.exists(),
        every_s=ORDER_POLL_S,
        within_s=ORDER_S,
    )
    job = kind.job(files)
    with ExitStack() as stack:
        async with kind.worker(job) as worker, _concluded(kind, job):
            job.reserve()
            stack.enter_context(job.telling())
            stack.enter_context(_traced(files, detail))
            if me := identify(os.getpid()):
                await save_to(job.host, files.process, PROCESS, me)
            if files.revoked.exists() or not files.order.exists():  # withdrawn
                raise _cancelled(kind, job)
            forget_old(job.host.state_dir, kind.name, kind.kept_s, time.time())
            on_death = recovery(own_command, kind.name, directory)
            stack.enter_context(armed(on_death, files.recovery_log))
            job.succeed(await worker.work())


async def recover(kind: JobKind[Any, Any], directory: Path) -> None:
    """Recover a job whose process died; the outcome says whether it was finished or undone.

    If it died after its outcome was written, only what the order holds outside is released.
    """
    job = kind.job(JobFiles(directory))
    async with kind.worker(job) as worker, _concluded(kind, job):
        job.resume()
        if job.outcome is not None and job.outcome.is_over:
            return
        with job.telling():
            result = await worker.recover()
        if result is None and (job.outcome is None or job.outcome.result is None):
            raise OperationFailedError(
                f"the {kind.what} of '{job.vm}' was interrupted",
                why=f"its process on {job.host.name} was killed",
                remedy="try again; `vmckpt vm list` shows the VM's state",
            )
        job.succeed(result)


@contextmanager
def _traced(files: JobFiles, detail: Detail) -> Iterator[None]:
    """Trace to the job's file during the block. Raises OSError."""
    if not detail:
        yield
        return
    with files.trace.open("ab", buffering=0) as lines:

        def tell(line: str) -> None:
            with suppress(OSError):
                lines.write(f"{line}\n".encode())

        trace(detail, tell)
        try:
            yield
        finally:
            untrace()


@asynccontextmanager
async def _concluded(kind: JobKind[Any, Any], job: Job[Any, Any]) -> AsyncIterator[None]:
    """Record an error or cancellation of the block as the outcome; bugs are also raised."""
    try:
        yield
    except asyncio.CancelledError:
        job.fail(_cancelled(kind, job))
    except Exception as exc:
        job.fail(exc)
        if not isinstance(exc, VmckptError | OSError):
            raise


def _cancelled(kind: JobKind[Any, Any], job: Job[Any, Any]) -> CancelledByUserError:
    return CancelledByUserError(
        f"the {kind.what} of '{job.vm}' was cancelled", why="asked to stop", remedy="try again"
    )
