"""What is about to be removed, for others to see: `doomed/TIME-RANDOM`, a name in each line.

An object that is named there may go at any moment until the file itself goes. Files of a command
that was killed stay for a day; those of gc name only what no checkpoint needs.

Checkpoints are removed so where a lock can be lost: a removal announces itself, looks for pins,
then removes; a pin is written first and then looks here. One of the two sees the other.
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
    """The names are there for all to see, for the block, in this object. Raises StorageError."""
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
    """Remove checkpoints that the caller has locked; each once it is gone.

    `require` raises when a lock was lost. Raises RefusedError: one is pinned, none was removed;
    StorageError, OperationFailedError.
    """
    ids, backend = list(checkpoint_ids), opened.backend
    said = (
        nullcontext()
        if backend.locks_last or not ids
        else published(backend, map(opened.files.checkpoint_name, ids))
    )
    with said:
        require_unpinned(opened, ids)
        for one in ids:
            require()  # or it may have been pinned meanwhile, or be read
            backend.remove(opened.files.checkpoint_name(one))
            yield one


def names(backend: Backend, but: str = "") -> set[str]:
    """All objects that may go at any moment, by others than the file `but`. StorageError."""
    found = set[str]()
    for name in backend.names(DOOMED):
        if f"{DOOMED}/{name}" == but:
            continue
        with suppress(MissingError):  # that gc has ended
            found.update(backend.read(f"{DOOMED}/{name}").decode("ascii", "replace").splitlines())
    return found


def stale(backend: Backend, now_unix_s: float) -> list[str]:
    """The files that killed commands have left."""
    found = []
    for name in backend.names(DOOMED):
        since, _, _ = name.partition("-")
        if not since.isdecimal() or abs(now_unix_s - int(since)) > STALE_S:
            found.append(f"{DOOMED}/{name}")
    return found
