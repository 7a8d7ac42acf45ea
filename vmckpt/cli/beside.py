"""An event loop beside calls that block: connections to hosts live on it meanwhile."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


_loop: asyncio.AbstractEventLoop | None = None


@contextmanager
def beside() -> Iterator[Callable[[Coroutine[Any, Any, T]], T]]:
    """For the block a loop runs in a thread; what this gives has it run something to its end.

    For commands that ask hosts nothing otherwise: a connection belongs to one loop. Blocks within
    such a block share its loop.
    """
    global _loop  # noqa: PLW0603 - one for the process, as in loop.py
    loop = _loop or asyncio.new_event_loop()

    def call(work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    if _loop is not None:
        yield call
        return
    thread = threading.Thread(target=loop.run_forever, name="beside", daemon=True)
    thread.start()
    _loop = loop
    try:
        yield call
    finally:
        from vmckpt.hosts.inventory.inventory import close_connections

        _loop = None
        asyncio.run_coroutine_threadsafe(close_connections(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
