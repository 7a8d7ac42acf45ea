"""Waiting within a time limit: until a condition holds (`poll`), until a call succeeds (`retry`).

Loops that do more between two checks (report, kill, ask something else) are written out where they
are needed.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import Any, TypeVar, overload

T = TypeVar("T")
Errors = type[Exception] | tuple[type[Exception], ...]


@overload
async def poll(
    query: Callable[[], Awaitable[T]],
    until: Callable[[T], object] = bool,
    *,
    every_s: float,
    within_s: float = math.inf,
) -> T: ...
@overload
async def poll(
    query: Callable[[], T],
    until: Callable[[T], object] = bool,
    *,
    every_s: float,
    within_s: float = math.inf,
) -> T: ...
async def poll(
    query: Callable[[], Any],
    until: Callable[[Any], object] = bool,
    *,
    every_s: float,
    within_s: float = math.inf,
) -> Any:
    """Return the result of `query` once it satisfies `until`; after `within_s`, its last result.

    `query` is called at once, then every `every_s`.
    """
    clock = asyncio.get_running_loop().time
    deadline_s = clock() + within_s
    while True:
        found = query()
        if isawaitable(found):
            found = await found
        if until(found) or clock() >= deadline_s:
            return found
        await asyncio.sleep(every_s)


async def retry(
    attempt: Callable[[], Awaitable[T]],
    errors: Errors,
    *,
    every_s: float,
    within_s: float = math.inf,
) -> T:
    """Retry `attempt` while it raises one of `errors`; after `within_s` the error is raised."""
    clock = asyncio.get_running_loop().time
    deadline_s = clock() + within_s
    while True:
        try:
            return await attempt()
        except errors:
            if clock() >= deadline_s:
                raise
        await asyncio.sleep(every_s)
