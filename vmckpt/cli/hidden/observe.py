"""vmckpt observe: what another vmckpt runs on the host of a VM whose dirty rate it measures."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vmckpt.cli.output import run

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

    from vmckpt.forecast.measure.dirty_rate import DirtyRate

RamBytes = Annotated[int, typer.Argument(help="Size of the guest's memory, in bytes.")]
ForSeconds = Annotated[float, typer.Argument(help="Duration of the measurement, in seconds.")]
LockFile = Annotated[Path, typer.Argument(help="Lock file; tracking ends once it is taken.")]


def observe(
    pid: Annotated[int, typer.Argument(help="Process id of QEMU.")],
    ram_file: Annotated[Path, typer.Argument(help="File of the guest's memory.")],
    ram_bytes: RamBytes,
    for_s: ForSeconds,
    lock: LockFile,
) -> None:
    """Track the pages that a QEMU of this machine dirties (internal)."""
    from vmckpt.forecast.measure.dirty_rate import track
    from vmckpt.memory.private.guest_ram import GuestRam

    answer(track(pid, GuestRam(ram_file), ram_bytes, for_s, until_taken(lock)))


def until_taken(lock: Path) -> Callable[[], Awaitable[bool]]:
    """Whether the lock is free."""
    from vmckpt.hosts.lock import read_owner

    async def is_free() -> bool:
        return read_owner(lock) is None

    return is_free


def answer(tracking: "Coroutine[Any, Any, DirtyRate | None]") -> None:
    """Track, and print the result or the error as JSON."""
    import json

    try:
        found = run(tracking)
        print(json.dumps({"found": found.to_json() if found else None}))
    except OSError as exc:
        print(json.dumps({"errno": exc.errno, "why": exc.strerror or str(exc)}))
