"""The end of post-copy: every page reaches the destination, however often the link breaks."""

import asyncio
import time
from collections.abc import Callable

from vmckpt.errors import HostDownError, OperationFailedError
from vmckpt.events.record import LINK_BROKE
from vmckpt.migrate.outcome.ends import Pair
from vmckpt.migrate.outcome.ownership import OwnershipMove, decide
from vmckpt.migrate.steps.reconnect import reconnect
from vmckpt.migrate.steps.transfer import Transfer

# How long, and at which intervals, to reconnect a silent link.
RECONNECT_S, RECONNECT_FIRST_S, RECONNECT_LAST_S = 300.0, 0.5, 10.0


async def drain(pair: Pair, transfer: Transfer, note: Callable[[str, str], None]) -> bool:
    """Wait for the last page, rejoining both ends whenever the link breaks.

    False if they cannot be rejoined, or no byte arrived for 300 s: settle it.
    """
    given_up_s, wait_s = time.monotonic() + RECONNECT_S, RECONNECT_FIRST_S
    while True:
        sent_bytes = transfer.last.transferred_bytes
        try:
            await transfer.drain()
            return True
        except (OperationFailedError, HostDownError) as exc:
            if transfer.last.transferred_bytes > sent_bytes:
                given_up_s, wait_s = time.monotonic() + RECONNECT_S, RECONNECT_FIRST_S
            can_rejoin = decide(await pair.view()) in (OwnershipMove.RECONNECT, OwnershipMove.WAIT)
            if not can_rejoin or time.monotonic() > given_up_s:
                return False
            note(LINK_BROKE, f"{exc.what}; the guest waits for its pages: rejoining")
        if not await reconnect(pair):
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, RECONNECT_LAST_S)
