"""Post-copy after a broken link: the guest waits for pages until both QEMUs are rejoined."""

import asyncio
import random

from vmckpt.deadlines import poll
from vmckpt.errors import HostDownError, OutcomeUnknownError
from vmckpt.migrate.outcome.ends import End, Pair
from vmckpt.migrate.steps.listen import uri
from vmckpt.qemu import commands
from vmckpt.qemu.monitor import CommandRefusedError

# The port is chosen here: a destination whose main loop waits for a page could not be asked for
# one.
PORTS = (49152, 65535)
PAUSE_TIMEOUT_S = 5.0
POLL_S = 0.02


async def reconnect(pair: Pair) -> bool:
    """Try once to rejoin an interrupted post-copy; True when pages flow again.

    Commands to the destination are out of band: its main loop may itself wait for a missing page.
    """
    host = pair.destination.host
    address = uri(host, random.randint(*(host.migration_ports or PORTS)))
    try:
        await _pause(pair)
        await commands.migrate_recover(await pair.destination.rescue(), address)
        source = await pair.source.monitor()
        await commands.migrate_resume(source, address)
        status = await poll(
            lambda: commands.query_migrate(source),
            lambda status: status.status in ("postcopy-active", "completed", "postcopy-paused"),
            every_s=POLL_S,
        )
        return status.status != "postcopy-paused"
    except (CommandRefusedError, OutcomeUnknownError, HostDownError):
        return False


async def _pause(pair: Pair) -> None:
    """Make both ends notice that the link is broken; neither notices a silent stall."""
    await asyncio.gather(_pause_end(pair.source), _pause_end(pair.destination))
    source = await pair.source.monitor()
    await poll(
        lambda: commands.query_migrate(source),
        lambda status: status.status != "postcopy-active",
        every_s=POLL_S,
        within_s=PAUSE_TIMEOUT_S,
    )


async def _pause_end(end: End) -> None:
    try:
        await commands.migrate_pause(await end.rescue())
    except (CommandRefusedError, OutcomeUnknownError):
        return  # it is paused already
