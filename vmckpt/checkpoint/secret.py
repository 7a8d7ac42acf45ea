"""What opens an encrypted store, on its way to the processes that need it on a host.

They have no way to the operator's key: they are given the store's secret, in a file in memory
(tmpfs), its owner's alone, and never on a disk or a command line. A service reads and removes its
file at once. While pages of a guest's memory are still to come there is one beside that memory,
which is as secret, so that whoever goes on after a killed pager can.
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from vmckpt.errors import OperationFailedError, RefusedError
from vmckpt.hosts.host import Host
from vmckpt.sequence.steps import finish
from vmckpt.vm.paths import IN_MEMORY

_PREFIX = "vmckpt-key-"
# A service takes its secret as it begins, on the busiest host within this.
_TAKEN_WITHIN_S = 600.0


@asynccontextmanager
async def written_on(host: Host, run: str, secret: bytes | None) -> AsyncIterator[Path | None]:
    """For the block the secret is in a file in the host's memory; None: there is none to be told.

    Raises RefusedError: the host has no such memory.
    """
    if secret is None:
        yield None
        return
    mounts = await host.read_text(Path("/proc/mounts")) or ""
    if not any(line.split()[1:3] == [str(IN_MEMORY), "tmpfs"] for line in mounts.splitlines()):
        raise RefusedError(
            f"{host.name} cannot be told what opens the encrypted store",
            why=f"{IN_MEMORY} is not in memory there (tmpfs)",
            remedy="mount a tmpfs there, or use a store that is not encrypted",
        )
    path = IN_MEMORY / f"{_PREFIX}{run}"
    try:
        await host.write_text(path, secret.hex())
        yield path
    finally:
        await finish(host.remove(path))


def taken_from(path: str | None) -> bytes | None:
    """The secret that was left for this process; its file is gone. Raises OperationFailedError."""
    if path is None:
        return None
    try:
        secret = bytes.fromhex(Path(path).read_text())
        Path(path).unlink()
    except (OSError, ValueError) as exc:
        raise OperationFailedError(
            "what opens the encrypted store is not there",
            why=f"{path}: {exc}",
            remedy="ask again",
        ) from exc
    return secret


def keep(path: Path, secret: bytes) -> None:
    """Leave it for processes to come. Raises OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(secret.hex())


def forget_old_secrets(now_unix_s: float) -> None:
    """Remove what killed operators have left for services that never began."""
    for path in IN_MEMORY.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another's, or just gone
            if path.stat().st_mtime < now_unix_s - _TAKEN_WITHIN_S:
                path.unlink()
