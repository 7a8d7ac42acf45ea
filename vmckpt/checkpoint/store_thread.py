"""Run blocking store calls in a worker thread."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

from vmckpt.hosts.processes.scheduling import low_priority

T = TypeVar("T")


class StoreThread:
    """Runs blocking store calls in order, in one dedicated thread."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool

    async def __call__(self, call: Callable[[], T]) -> T:
        """Run `call` in the thread; returns its result."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)


@asynccontextmanager
async def store_thread(*, last: bool = False) -> AsyncIterator[StoreThread]:
    """The thread, for the block. `last`: run it at the lowest scheduling priority."""
    with ThreadPoolExecutor(1, "store", initializer=low_priority if last else None) as pool:
        yield StoreThread(pool)
