"""How services are spoken with: one word in, one line of JSON out, over a Unix socket."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from vmckpt.errors import HostDownError, StorageError
from vmckpt.foreign import NUMBER, Shape, parse, require
from vmckpt.hosts.host import Host
from vmckpt.replicate.paths import FIRST, SECOND
from vmckpt.replicate.request import ServiceFiles

Answer = Callable[[str], Awaitable[dict[str, Any]]]
# `stop` and `failover` answer when they are done.
TIMEOUT_S = 60.0
# How it is, it says at once, unless it stands still.
STATUS_TIMEOUT_S = 3.0
# Said to a standby whose primary does not come any more; one that has it takes no notice.
DISMISS = "dismiss"
# Said to a primary whose standby certainly has no guest: it needs no term, nor the arbiter.
GO_ALONE = "go alone"
# Said to a standby whose primary is certainly dead: it needs no term, nor the arbiter.
TAKE_ALONE = "take alone"
_OBJECT: Shape = {}
_NUMBERS = (
    "acknowledged_epoch", "dirty_pages", "disk_bytes", "disk_bytes_not_sent", "epoch", "epoch_ms",
    "epochs", "epochs_per_s", "heard_ms_ago", "lag_ms", "lease_s", "link_bytes_per_s",
    "output_latency_p50_ms", "output_latency_p99_ms", "pause_p50_ms", "pause_p99_ms",
    "pause_worst_ms", "raw_bytes",
    "received_bytes", "rpo_now_ms", "safe_after_p50_ms", "sent_bytes", "slowed_percent", "term",
    "took_over_ms", "written_bytes_per_s",
)  # fmt: skip
_TEXTS = (
    "arbiter", "primary", "qemu_id", "run", "second_path_lacks", "standby", "tracker", "vm", "why",
)  # fmt: skip
# What every status has, and of what type all else is that is read of one. A service of another
# version of vmckpt says less: what is missing is not known, and None.
STATUS: Shape = {
    "role": str,
    "state": str,
    **{f"{name}??": NUMBER for name in _NUMBERS},
    **{f"{name}??": str for name in _TEXTS},
    **{f"{name}??": bool for name in ("epoch_is_auto", "may_run", "output_commit")},
    "paths??": {},
    "path_addresses??": {f"{path}??": (str,) for path in (FIRST, SECOND)},
    "path_heard_ms_ago??": {f"{path}??": NUMBER for path in (FIRST, SECOND)},
}
# How long answers that are under way at a service's end may take.
LAST_WORDS_S = 2.0


@asynccontextmanager
async def answering(path: Path, answer: Answer) -> AsyncIterator[None]:
    """Answer whoever asks at `path`, for the block; who has asked by its end still hears."""
    unanswered = set[asyncio.Event]()

    async def visit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while word := (await reader.readline()).decode().strip():
                unanswered.add(heard := asyncio.Event())
                try:
                    writer.write(json.dumps(await answer(word)).encode() + b"\n")
                    await writer.drain()
                finally:
                    unanswered.discard(heard)
                    heard.set()
        except OSError:
            return  # whoever asked has gone
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
            async with asyncio.timeout(LAST_WORDS_S):
                for heard in tuple(unanswered):
                    await heard.wait()


async def write_last_word(host: Host, files: ServiceFiles, status: Mapping[str, Any]) -> None:
    """Write down how a service ended, on a full disk too. Raises StorageError."""
    text = json.dumps(status)
    try:
        await host.write_text(files.status, text)
    except StorageError:
        await host.remove(files.room)
        await host.write_text(files.status, text)


async def ask(
    host: Host,
    files: ServiceFiles,
    word: str,
    timeout_s: float = TIMEOUT_S,
    *,
    shape: Shape = _OBJECT,
) -> dict[str, Any]:
    """What the service says to `word`, which is of that `shape`.

    Raises HostDownError when there is none, it is silent, or says what makes no sense.
    """
    reader, writer = await asyncio.open_connection(sock=await host.connect(files.control))
    try:
        async with asyncio.timeout(timeout_s):
            writer.write(f"{word}\n".encode())
            line = await reader.readline()
        if line:
            said: dict[str, Any] = parse(line)
            require(shape, said)
            return said
        why = "it ended before it answered"
    except ValueError as exc:  # a line that does not end is one too
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
