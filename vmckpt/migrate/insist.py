"""Asking again: a recovery goes on while a host is silent, or a dead command's lock is held."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from vmckpt.errors import BusyError, HostDownError

T = TypeVar("T")

# A host that fell silent may be back by then; it frees a dead command's locks after 30 s.
INSIST_S, INSIST_POLL_S = 300.0, 2.0


async def insist(attempt: Callable[[], Awaitable[T]]) -> T:
    """What `attempt` gives, made again for 5 minutes while it raises HostDownError or BusyError.

    Raises its last error; any other at once.
    """
    clock = asyncio.get_running_loop().time
    given_up_s = clock() + INSIST_S
    while True:
        try:
            return await attempt()
        except (HostDownError, BusyError):
            if clock() > given_up_s:
                raise
        await asyncio.sleep(INSIST_POLL_S)
