"""The services' control protocol: one word in, one line of JSON out, over a Unix socket."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from vmckpt.errors import HostDownError, StorageError
from vmckpt.foreign import parse
from vmckpt.hosts.host import Host
from vmckpt.replicate.request import ServiceFiles
from vmckpt.replicate.status import ReplicaStatus

Answer = Callable[[str], Awaitable[ReplicaStatus]]
# `stop` and `failover` answer only when they are done.
TIMEOUT_S = 60.0
# A service reports its status at once, unless it is stuck.
STATUS_TIMEOUT_S = 3.0
# For a standby whose primary will not come; a standby that has a primary ignores it.
DISMISS = "dismiss"
# For a primary whose standby certainly has no guest: it needs neither a term nor the arbiter.
GO_ALONE = "go alone"
# The same where only the operator says so: not once the arbiter has shown that another took the
# term. The primary then ends as replaced.
GO_ALONE_UNLESS_TAKEN = "go alone unless taken"
# For a standby whose primary is certainly dead: it needs neither a term nor the arbiter.
TAKE_ALONE = "take alone"
# How long answers in progress may take when a service ends.
LAST_LINES_S = 2.0


@asynccontextmanager
async def answering(path: Path, answer: Answer) -> AsyncIterator[None]:
    """Answer requests at `path` for the block, including those received before its end."""
    unanswered = set[asyncio.Event]()

    async def visit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while word := (await reader.readline()).decode().strip():
                unanswered.add(heard := asyncio.Event())
                try:
                    writer.write(json.dumps((await answer(word)).to_json()).encode() + b"\n")
                    await writer.drain()
                finally:
                    unanswered.discard(heard)
                    heard.set()
        except OSError:
            return  # the client is gone
        finally:
            writer.close()

    path.unlink(missing_ok=True)
    server = await asyncio.start_unix_server(visit, path)
    try:
        yield
    finally:
        server.close()
        path.unlink(missing_ok=True)
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_LINES_S):
                for heard in tuple(unanswered):
                    await heard.wait()


async def write_last_status(host: Host, files: ServiceFiles, status: ReplicaStatus) -> None:
    """Record how a service ended, even on a full disk. Raises StorageError."""
    text = json.dumps(status.to_json())
    try:
        await host.write_text(files.status, text)
    except StorageError:
        await host.remove(files.room)
        await host.write_text(files.status, text)


async def ask(
    host: Host, files: ServiceFiles, word: str, timeout_s: float = TIMEOUT_S
) -> ReplicaStatus:
    """Send `word` to the service; returns its status after it has acted.

    Raises HostDownError if there is no service, or it is silent or sends an invalid answer.
    """
    reader, writer = await asyncio.open_connection(sock=await host.connect(files.control))
    try:
        async with asyncio.timeout(timeout_s):
            writer.write(f"{word}\n".encode())
            line = await reader.readline()
        if line:
            return ReplicaStatus.from_json(parse(line))
        why = "it ended before it answered"
    except ValueError as exc:  # including a line without an end
        why = f"its answer is malformed: {exc}"
    except (OSError, TimeoutError) as exc:
        why = str(exc) or f"no answer within {timeout_s:g} s"
    finally:
        writer.close()
    raise HostDownError(
        f"the replication's service on {host.name} does not answer '{word}'",
        why=why,
        remedy=f"see {files.log} there, and `vmckpt replicate status`",
    )
