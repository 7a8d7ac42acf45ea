"""Acting on both ends of a migration until one place has the guest."""

import asyncio
from collections.abc import Callable

from vmckpt.errors import HostDownError, OutcomeUnknownError
from vmckpt.migrate.ends import LOOK_TIMEOUT_S, Pair, kill
from vmckpt.migrate.ownership import Move, decide
from vmckpt.migrate.reconnect import reconnect
from vmckpt.migrate.steering import SILENCE_S
from vmckpt.qemu import commands
from vmckpt.qemu.monitor import CommandRefusedError

POLL_S = 0.01
# A host that gives no answer may be back soon, and its guest may be waiting for it.
SILENT_HOST_S = 300.0
SILENT_POLL_S = 1.0
RECONNECT_POLL_S = 1.0
ENDINGS = frozenset({Move.SOURCE_OWNS, Move.TARGET_OWNS, Move.LOST, Move.UNKNOWN})


async def settle(pair: Pair, note: Callable[[str], None], timeout_s: float = 30.0) -> Move:
    """Give the migration up, or let it end if it is too late, until one place has the guest.

    Returns SOURCE_OWNS, TARGET_OWNS, LOST or UNKNOWN (a QEMU gave no answer for `timeout_s`, or a
    host for 5 minutes; then nothing was done that could make the guest run twice). `note` is told
    every move.
    """
    clock = asyncio.get_running_loop().time
    moved_s = clock()
    last: Move | None = None
    sent_bytes = 0
    waited = False
    while True:
        view = await pair.view()
        move = decide(view)
        migration = view.source.migration
        if migration and migration.transferred_bytes != sent_bytes:
            # Post-copy under way takes as long as it takes.
            sent_bytes, moved_s = migration.transferred_bytes, clock()
        if move in ENDINGS - {Move.UNKNOWN}:
            return move
        silent = [
            end.host.name
            for end, side in ((pair.source, view.source), (pair.target, view.target))
            if side.silent
        ]
        if clock() > moved_s + (SILENT_HOST_S if silent else timeout_s):
            return Move.UNKNOWN
        if silent and not waited:
            waited = True
            note(f"{' and '.join(silent)} gives no answer: asking for {SILENT_HOST_S:g} s")
        if move is Move.WAIT and migration and migration.in_postcopy:
            # A silent link is noticed by neither QEMU.
            move = Move.RECONNECT if clock() > moved_s + SILENCE_S else move
        if move is not last and move not in (Move.WAIT, Move.UNKNOWN):
            note(move.value)
        await _act(move, pair, repeated=move is last)
        last = move
        await asyncio.sleep(SILENT_POLL_S if silent else POLL_S)


async def _act(move: Move, pair: Pair, *, repeated: bool) -> None:
    """One move; a refusal or a lost monitor shows in the next look."""
    try:
        match move:
            case Move.CANCEL:
                await commands.migrate_cancel(await pair.source.monitor(), LOOK_TIMEOUT_S)
            case Move.RUN_TARGET:
                await commands.cont(await pair.target.monitor())
            case Move.RUN_SOURCE:
                await commands.cont(await pair.source.monitor())
            case Move.KILL_TARGET:
                await pair.target.close()
                await kill(pair.target)
            case Move.YANK if not repeated:
                await pair.source.yank()
            case Move.RECONNECT:
                if not await reconnect(pair):
                    await asyncio.sleep(RECONNECT_POLL_S)
            case _:
                pass
    except (CommandRefusedError, OutcomeUnknownError, HostDownError):
        await asyncio.sleep(POLL_S)
