"""A directory on another machine, lent over a socket."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vmckpt.store.backends.lent import LentBackend, lend
from vmckpt.store.backends.local import LocalBackend


@contextmanager
def lent(path: Path, *, append_only: bool = False) -> Iterator[LentBackend]:
    """The near side of it; `append_only`: of one that is lent to be added to."""
    near, far = socket.socketpair()
    backend = LocalBackend(path, append_only=append_only)
    thread = threading.Thread(target=lend, args=(backend, far), kwargs={"append_only": append_only})
    thread.start()
    try:
        yield LentBackend(near, "there:store")
    finally:
        near.close()
        thread.join(30)
        far.close()
        backend.close()
