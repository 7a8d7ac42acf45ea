"""What a gc is about to remove, for writers to see: `doomed/TIME-RANDOM`, a name in each line.

An object that is named there may go at any moment until the file itself goes. Files of a gc that
was killed stay for a day; they name only what no checkpoint needs.
"""

import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from vmckpt.store.backends.backend import Backend, MissingError

DOOMED = "doomed"
STALE_S = 86_400.0


@contextmanager
def published(backend: Backend, names: Iterable[str]) -> Iterator[None]:
    """The names are there for all to see, for the block. Raises StorageError."""
    mine = f"{DOOMED}/{int(time.time())}-{secrets.token_hex(8)}"
    writer = backend.write(mine)
    try:
        writer.write("".join(f"{name}\n" for name in names).encode())
        writer.publish()
    finally:
        writer.discard()
    yield
    backend.remove(mine)


def names(backend: Backend) -> set[str]:
    """All objects that may go at any moment. Raises StorageError."""
    found = set[str]()
    for name in backend.names(DOOMED):
        with suppress(MissingError):  # that gc has ended
            found.update(backend.read(f"{DOOMED}/{name}").decode("ascii", "replace").splitlines())
    return found


def stale(backend: Backend, now_unix_s: float) -> list[str]:
    """The files that a killed gc has left."""
    found = []
    for name in backend.names(DOOMED):
        since, _, _ = name.partition("-")
        if not since.isdecimal() or abs(now_unix_s - int(since)) > STALE_S:
            found.append(f"{DOOMED}/{name}")
    return found
