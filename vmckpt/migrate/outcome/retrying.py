"""Retry: a recovery continues while a host is silent, or a dead command's lock is held."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from vmckpt.deadlines import retry
from vmckpt.errors import BusyError, HostDownError

T = TypeVar("T")

# A silent host may be back by then; it frees a dead command's locks after 30 s.
RETRY_S, RETRY_POLL_S = 300.0, 2.0


async def retry_recovery(attempt: Callable[[], Awaitable[T]]) -> T:
    """The result of `attempt`, retried for 5 minutes while it raises HostDownError or BusyError.

    Raises its last error; any other at once.
    """
    return await retry(attempt, (HostDownError, BusyError), every_s=RETRY_POLL_S, within_s=RETRY_S)
