"""Announce removals to other processes: `doomed/TIME-RANDOM`, one name per line.

An object named there may be removed at any moment while the file exists. The files of a killed
command stay for a day; those of gc name only what no checkpoint needs.

Where a lock can be lost, checkpoints are removed in this order: a removal announces itself, checks
for pins, then removes; a pin is written first and then checks here. At least one of the two sees
the other.
"""

import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress

from vmckpt.errors import OperationFailedError, RefusedError
from vmckpt.store.backends.backend import Backend, MissingError
from vmckpt.store.files.pins import require_unpinned
from vmckpt.store.opened import Opened

DOOMED = "doomed"
STALE_S = 86_400.0


@contextmanager
def published(backend: Backend, names: Iterable[str]) -> Iterator[str]:
    """Announce the names during the block; yields the object. Raises StorageError."""
    mine = f"{DOOMED}/{int(time.time())}-{secrets.token_hex(8)}"
    writer = backend.write(mine)
    try:
        writer.write("".join(f"{name}\n" for name in names).encode())
        writer.publish()
    finally:
        writer.discard()
    try:
        yield mine
    except (RefusedError, OperationFailedError):
        backend.remove(mine)
        raise
    backend.remove(mine)


def remove_checkpoints(
    opened: Opened, checkpoint_ids: Iterable[str], require: Callable[[], None]
) -> Iterator[str]:
    """Remove checkpoints that the caller has locked; yields each one removed.

    `require` raises if a lock was lost. Raises RefusedError: one is pinned, none was removed;
    StorageError, OperationFailedError.
    """
    ids, backend = list(checkpoint_ids), opened.backend
    reply = (
        nullcontext()
        if backend.locks_last or not ids
        else published(backend, map(opened.files.checkpoint_name, ids))
    )
    with reply:
        require_unpinned(opened, ids)
        for one in ids:
            require()  # otherwise it may have been pinned or read meanwhile
            backend.remove(opened.files.checkpoint_name(one))
            yield one


def names(backend: Backend, but: str = "") -> set[str]:
    """All objects that others than the file `but` may remove at any moment. Raises StorageError."""
    found = set[str]()
    for name in backend.names(DOOMED):
        if f"{DOOMED}/{name}" == but:
            continue
        with suppress(MissingError):  # that gc has ended
            found.update(backend.read(f"{DOOMED}/{name}").decode("ascii", "replace").splitlines())
    return found


def stale(backend: Backend, now_unix_s: float) -> list[str]:
    """The files that killed commands left."""
    found = []
    for name in backend.names(DOOMED):
        since, _, _ = name.partition("-")
        if not since.isdecimal() or abs(now_unix_s - int(since)) > STALE_S:
            found.append(f"{DOOMED}/{name}")
    return found
