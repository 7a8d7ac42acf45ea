"""Act on both ends of a migration until one host has the guest."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from vmckpt.errors import HostDownError, OutcomeUnknownError, StorageError
from vmckpt.migrate.outcome.ends import QUERY_TIMEOUT_S, End, Pair, kill
from vmckpt.migrate.outcome.ownership import MigrationEnd, OwnershipMove, OwnershipView, decide
from vmckpt.migrate.steps.reconnect import reconnect
from vmckpt.migrate.steps.steering import SILENCE_S
from vmckpt.qemu import commands
from vmckpt.qemu.monitor import CommandRefusedError

POLL_S = 0.01
# A silent host may be back soon, and its guest may be waiting for it.
SILENT_HOST_S = 300.0
SILENT_POLL_S = 1.0
RECONNECT_POLL_S = 1.0
# The time limit for the state of a source beside a silent destination.
ALONE_S, ALONE_POLL_S = 5.0, 0.1
ENDINGS = frozenset(
    {
        OwnershipMove.SOURCE_OWNS,
        OwnershipMove.DESTINATION_OWNS,
        OwnershipMove.LOST,
        OwnershipMove.UNKNOWN,
    }
)

# Records that the destination never runs.
Keep = Callable[[], Awaitable[None]]


async def settle(
    pair: Pair, note: Callable[[str], None], keep: Keep, timeout_s: float = 30.0
) -> OwnershipMove:
    """Abort the migration, or let it end if it is too late, until one host has the guest.

    Returns SOURCE_OWNS, TARGET_OWNS, LOST or UNKNOWN (a QEMU did not answer for `timeout_s`, or a
    host for 5 minutes; then nothing was done that could make the guest run twice). `note` gets
    every move. `keep` is called before the source is resumed beside a silent destination.

    If a source's machine lost power, its connection was never closed: the destination would wait
    endlessly for a process that is gone. So that connection is cut after `timeout_s`, and the
    destination's QEMU says what it makes of what has arrived.
    """
    clock = asyncio.get_running_loop().time
    moved_s = clock()
    last: OwnershipMove | None = None
    sent_bytes = 0
    waited = is_cut = False
    while True:
        view = await pair.view()
        move = decide(view)
        migration = view.source.migration
        if migration and migration.transferred_bytes != sent_bytes:
            # A running post-copy has no time limit.
            sent_bytes, moved_s = migration.transferred_bytes, clock()
        if move in ENDINGS - {OwnershipMove.UNKNOWN}:
            return move
        silent = [
            end.host.name
            for end, side in ((pair.source, view.source), (pair.destination, view.destination))
            if side.silent
        ]
        if clock() > moved_s + (SILENT_HOST_S if silent else timeout_s):
            if is_cut or view.source.alive or move is not OwnershipMove.WAIT:
                return OwnershipMove.UNKNOWN
            is_cut, moved_s = True, clock()
            note(
                "the source has ended: closing the connection on which the destination still waits"
            )
            await pair.destination.yank()
        if silent and not waited:
            waited = True
            note(f"{' and '.join(silent)} does not answer: asking for {SILENT_HOST_S:g} s")
        if move is OwnershipMove.WAIT and migration and migration.in_postcopy:
            # Neither QEMU notices a silent link.
            move = OwnershipMove.RECONNECT if clock() > moved_s + SILENCE_S else move
        if move is OwnershipMove.RUN_SOURCE and view.destination.silent and not pair.stays:
            pair = pair._replace(stays=await _kept(keep))
            move = move if pair.stays else OwnershipMove.UNKNOWN
        if move is not last and move not in (OwnershipMove.WAIT, OwnershipMove.UNKNOWN):
            note(move.value)
        await _act(move, pair, repeated=move is last)
        last = move
        await asyncio.sleep(SILENT_POLL_S if silent else POLL_S)


async def settle_alone(
    source: End, keep: Keep, *, was_running: bool, stopped: bool
) -> OwnershipMove:
    """As `settle`, within 5 s and without the destination: SOURCE_OWNS or UNKNOWN."""
    clock = asyncio.get_running_loop().time
    given_up_s, kept = clock() + ALONE_S, False
    silent = MigrationEnd(alive=True, silent=True)
    while True:
        move = decide(OwnershipView(await source.inspect(), silent, was_running, stopped))
        if move is OwnershipMove.SOURCE_OWNS:
            return move
        if clock() > given_up_s:
            return OwnershipMove.UNKNOWN
        kept = kept or (move is OwnershipMove.RUN_SOURCE and await _kept(keep))
        if kept or move is OwnershipMove.CANCEL:
            with suppress(CommandRefusedError, OutcomeUnknownError, HostDownError):
                await _act_on_source(move, source)  # the next query shows the effect
        await asyncio.sleep(ALONE_POLL_S)


async def _kept(keep: Keep) -> bool:
    """If the source dies next, the destination must not continue from the switchover."""
    try:
        await keep()
    except (StorageError, HostDownError):
        return False
    return True


async def _act(move: OwnershipMove, pair: Pair, *, repeated: bool) -> None:
    """Make one move; a refusal or a lost monitor shows in the next query."""
    try:
        match move:
            case OwnershipMove.CANCEL | OwnershipMove.RUN_SOURCE:
                await _act_on_source(move, pair.source)
            case OwnershipMove.RUN_DESTINATION:
                await commands.cont(await pair.destination.monitor())
            case OwnershipMove.KILL_DESTINATION:
                await pair.destination.close()
                await kill(pair.destination)
            case OwnershipMove.YANK if not repeated:
                await pair.source.yank()
            case OwnershipMove.RECONNECT:
                if not await reconnect(pair):
                    await asyncio.sleep(RECONNECT_POLL_S)
            case _:
                pass
    except (CommandRefusedError, OutcomeUnknownError, HostDownError):
        await asyncio.sleep(POLL_S)


async def _act_on_source(move: OwnershipMove, source: End) -> None:
    if move is OwnershipMove.CANCEL:
        await commands.migrate_cancel(await source.monitor(), QUERY_TIMEOUT_S)
    elif move is OwnershipMove.RUN_SOURCE:
        await commands.cont(await source.monitor())
