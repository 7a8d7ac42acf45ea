"""Power a guest off by its button, pressed again until the guest reacts."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from vmckpt.errors import HostDownError, OutcomeUnknownError, TimedOutError

STOP_POLL_S, PRESS_AGAIN_S = 0.05, 5.0


async def power_off(
    name: str,
    press: Callable[[], Awaitable[None]],
    is_alive: Callable[[], Awaitable[bool]],
    timeout_s: float,
) -> None:
    """Press the button of the running guest and wait for its end.

    Raises TimedOutError if it does not power off within `timeout_s`: it continues to run.
    """
    began_s = pressed_s = time.monotonic()
    await press()
    while await is_alive():
        now_s = time.monotonic()
        if now_s > began_s + timeout_s:
            raise TimedOutError(
                f"'{name}' did not power off within {timeout_s:g} s",
                why="the guest did not act on its power button",
                remedy="resume it if it is paused, wait longer (--timeout), or end it at once with "
                "--force",
            )
        if now_s > pressed_s + PRESS_AGAIN_S:
            # A guest that is booting does not notice the first press.
            pressed_s = now_s
            with suppress(HostDownError, OutcomeUnknownError):  # it may be ending
                await press()
        await asyncio.sleep(STOP_POLL_S)
