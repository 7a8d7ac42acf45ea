"""Waiting within a time limit: until something is so (`poll`), until something succeeds (`retry`).

Loops that do more between two looks (tell, kill, go on to another question) stand where they are.
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
    look: Callable[[], Awaitable[T]],
    until: Callable[[T], object] = bool,
    *,
    every_s: float,
    within_s: float = math.inf,
) -> T: ...
@overload
async def poll(
    look: Callable[[], T],
    until: Callable[[T], object] = bool,
    *,
    every_s: float,
    within_s: float = math.inf,
) -> T: ...
async def poll(
    look: Callable[[], Any],
    until: Callable[[Any], object] = bool,
    *,
    every_s: float,
    within_s: float = math.inf,
) -> Any:
    """What `look` gives once that is as `until` wants it; after `within_s` what it gave last.

    It is called at once, then every `every_s`.
    """
    clock = asyncio.get_running_loop().time
    deadline_s = clock() + within_s
    while True:
        found = look()
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
    """What `attempt` gives, made again while it raises one of `errors`; after `within_s` that."""
    clock = asyncio.get_running_loop().time
    deadline_s = clock() + within_s
    while True:
        try:
            return await attempt()
        except errors:
            if clock() >= deadline_s:
                raise
        await asyncio.sleep(every_s)
