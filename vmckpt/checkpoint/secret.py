"""Hand the secret of an encrypted store to the processes on a host that need it.

They cannot reach the operator's key. They get the store's secret in a file in memory (tmpfs), in a
directory that only its owner may enter, and never on a disk or a command line. A service reads and
removes its file at once. While a guest's memory is being loaded a copy lies beside that memory,
which is as secret, so that a killed pager's successor can continue.
"""

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from vmckpt.errors import HostDownError, OperationFailedError, RefusedError
from vmckpt.hosts.host import Host
from vmckpt.sequence.steps import finish
from vmckpt.state.durable import replace
from vmckpt.vm.paths import IN_MEMORY

_PREFIX, _FILE = "vmckpt-key-", "secret"
# Even on the busiest host a service reads its secret within this time of its start.
_TAKEN_WITHIN_S = 600.0


@asynccontextmanager
async def written_on(host: Host, run: str, secret: bytes | None) -> AsyncIterator[Path | None]:
    """Keep the secret in a file in the host's memory during the block; None: no secret.

    Raises RefusedError if the host has no such memory.
    """
    if secret is None:
        yield None
        return
    mounts = await host.read_text(Path("/proc/mounts")) or ""
    if not any(line.split()[1:3] == [str(IN_MEMORY), "tmpfs"] for line in mounts.splitlines()):
        raise RefusedError(
            f"{host.name} cannot be given the key of the encrypted store",
            why=f"{IN_MEMORY} is not in memory there (tmpfs)",
            remedy="mount a tmpfs there, or use a store that is not encrypted",
        )
    directory = IN_MEMORY / f"{_PREFIX}{run}"
    # Its parent is world-writable: a directory of another user is refused, and left alone.
    await host.make_private_dir(directory)
    try:
        await host.write_text(directory / _FILE, secret.hex())
        yield directory / _FILE
    finally:
        with suppress(HostDownError):  # a later job there removes it
            await finish(host.remove(directory))


def taken_from(path: Path | None) -> bytes | None:
    """Read and remove the secret left for this process. Raises OperationFailedError."""
    if path is None:
        return None
    try:
        secret = bytes.fromhex(path.read_text())
        forget(path)
    except (OSError, ValueError) as exc:
        raise OperationFailedError(
            "the key of the encrypted store is missing",
            why=f"{path}: {exc}",
            remedy="try again",
        ) from exc
    return secret


def keep(path: Path, secret: bytes) -> None:
    """Keep the secret for later processes, in a private directory. Raises OSError."""
    replace(path, secret.hex())


def forget(path: Path) -> None:
    """Remove a secret left for a service, if it exists. Raises OSError."""
    path.unlink(missing_ok=True)
    with suppress(OSError):  # gone already
        if path.parent.name.startswith(_PREFIX):
            path.parent.rmdir()


def forget_old_secrets(now_unix_s: float) -> None:
    """Remove secrets that killed operators left for services that never started."""
    for path in IN_MEMORY.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another user's, or just removed
            found = path.lstat()
            if found.st_uid == os.geteuid() and found.st_mtime < now_unix_s - _TAKEN_WITHIN_S:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:  # by an older vmckpt
                    path.unlink()
