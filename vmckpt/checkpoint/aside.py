"""A store's calls, which block, beside what waits for nothing."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

from vmckpt.hosts.processes.scheduling import come_last

T = TypeVar("T")


class StoreThread:
    """The store's calls, which block, in one thread of their own, in order."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool

    async def __call__(self, call: Callable[[], T]) -> T:
        """What `call` gives."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)


@asynccontextmanager
async def aside_calls(*, last: bool = False) -> AsyncIterator[StoreThread]:
    """The thread, for the block; `last`: all others come first on a busy processor."""
    with ThreadPoolExecutor(1, "store", initializer=come_last if last else None) as pool:
        yield StoreThread(pool)
