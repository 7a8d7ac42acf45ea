"""The pin of a guard's rollback checkpoint, held while the guard may need it.

STATE/guards/RUN.pin exists from before the pin is made until after it is removed. A pin whose guard
no longer has a record, but whose file is here, is stale: its guard ended while the store was
unreachable. The next command that sees it removes it. Guards of other operators, and those of a
lost state directory, have no file here: their pins stay until `unpin --force`.
"""

from contextlib import suppress
from pathlib import Path

from vmckpt.checkpoint.catalogue.catalogue import Catalogue, CatalogueEntry
from vmckpt.checkpoint.catalogue.location import Key
from vmckpt.checkpoint.catalogue.pinning import pin, release_all
from vmckpt.errors import VmckptError
from vmckpt.fleet.guard.record import GuardRecord, guards_dir
from vmckpt.state.durable import write_durably
from vmckpt.store.files.pins import Pin


async def pin_for(record: GuardRecord, entry: CatalogueEntry) -> None:
    """Pin the guard's checkpoint. Raises NotFoundError, BusyError, StorageError."""
    write_durably(_file(record.run), "")
    await pin(entry, f"rollback checkpoint of guard {record.run}", guard=record.run)


async def released(record: GuardRecord, found: Catalogue) -> list[CatalogueEntry]:
    """All entries, without the guard's pin. Raises StorageError, HostDownError: it may still
    exist.
    """
    entries = await release_all(found.entries, lambda one: one.guard == record.run)
    if not found.silent:  # otherwise the pin may be in a store that did not answer
        _file(record.run).unlink(missing_ok=True)
    return entries


async def without_stale(found: Catalogue, key: Key = None) -> Catalogue:
    """The catalogue after removal of stale pins, as far as their stores answer."""
    if not any(_is_stale(one) for entry in found.entries for one in entry.pins):
        return found
    with suppress(VmckptError):
        return found._replace(entries=await release_all(found.entries, _is_stale, key))
    return found


def _is_stale(pin: Pin) -> bool:
    if pin.guard is None or not _is_name(pin.guard):
        return False
    ours = _file(pin.guard)
    # In this order: a guard's record is written before its pin's file, and removed before it.
    return ours.exists() and not ours.with_suffix(".json").exists()


def _is_name(run: str) -> bool:
    """Whether it is a valid run id: a name from a store must not lead to other folders."""
    return run.replace("-", "").isalnum() and run.isascii()


def _file(run: str) -> Path:
    return guards_dir() / f"{run}.pin"
