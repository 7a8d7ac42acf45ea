"""Pin checkpoints: a pinned checkpoint cannot be removed from any store that has it."""

import getpass
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from vmckpt.checkpoint.catalogue.catalogue import CatalogueEntry
from vmckpt.checkpoint.catalogue.location import Key, opened
from vmckpt.errors import RefusedError, UsageError, VmckptError
from vmckpt.sequence.in_thread import in_thread
from vmckpt.sequence.steps import finish
from vmckpt.store.files.pins import MOST_TEXT, Pin, new_pin


def operator() -> str:
    """Who runs this command, and on which machine."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a user without a passwd entry
        name = "?"
    return f"{name}@{socket.gethostname()}"


def check_reason(text: str) -> str:
    """Return `text`. Raises UsageError unless it is one line, not empty and not too long."""
    if not text.strip() or not text.isprintable() or len(text) > MOST_TEXT:
        raise UsageError(
            "that is not a reason for a pin",
            why=f"it must be one line of printable text, 1 to {MOST_TEXT} characters",
            remedy="write e.g. --reason 'before the upgrade of 12 May'",
        )
    return text


async def pin(
    entry: CatalogueEntry, reason: str, key: Key = None, *, guard: str | None = None
) -> Pin:
    """Pin it in every store that has it, or in none. Raises NotFoundError, BusyError, StorageError.

    `guard`: the run of the guard that needs it.
    """
    made = new_pin(entry.id, reason, operator(), guard)
    try:
        for location in entry.locations:
            async with opened(location, key) as store:
                await in_thread(partial(store.pin, made))
    except BaseException:
        with suppress(VmckptError):
            await finish(release(entry, [made], key))
        raise
    return made


async def unpin(entry: CatalogueEntry, key: Key = None, *, force: bool) -> tuple[Pin, ...]:
    """Remove its pins and return them; pins of guards only with `force`.

    Raises RefusedError if it is not pinned, or only guards need it.
    """
    wanted = [one for one in entry.pins if force or one.guard is None]
    if not wanted:
        guards = ", ".join(str(one.guard) for one in entry.pins)
        raise RefusedError(
            f"checkpoint {entry.name} is {'pinned by a guard' if guards else 'not pinned'}",
            why=f"it is the rollback checkpoint of guard {guards}"
            if guards
            else "there is no pin to remove",
            remedy="end the guard (vmckpt guard list), or add --force: then the guard may have no "
            "rollback"
            if guards
            else "see `vmckpt checkpoint list`",
        )
    await release(entry, wanted, key)
    return tuple(wanted)


async def release(entry: CatalogueEntry, pins: Iterable[Pin], key: Key = None) -> CatalogueEntry:
    """Remove the given pins in every store that has the checkpoint; returns the updated entry."""
    wanted = list(pins)
    for location in entry.locations:
        async with opened(location, key) as store:
            for one in wanted:
                await in_thread(partial(store.unpin, one))
    gone = {one.id for one in wanted}
    return replace(entry, pins=tuple(one for one in entry.pins if one.id not in gone))


async def release_all(
    entries: Iterable[CatalogueEntry], chosen: Callable[[Pin], bool], key: Key = None
) -> list[CatalogueEntry]:
    """Remove the chosen pins; returns the updated entries. Raises StorageError, HostDownError."""
    return [
        await release(one, wanted, key) if (wanted := list(filter(chosen, one.pins))) else one
        for one in entries
    ]
