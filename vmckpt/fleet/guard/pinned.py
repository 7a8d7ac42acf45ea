"""The pin of a guard's rollback checkpoint: as long as the guard may need it, nothing removes it.

STATE/guards/RUN.pin is there from before the pin is made until after it was taken out. A pin whose
guard is not written down any more, and whose file is here, is stale: its guard ended, and the store
could not be reached. The next command that sees it removes it. Guards of other operators, and those
of a lost state directory, have no file here: their pins stay until `unpin --force`.
"""

from contextlib import suppress
from pathlib import Path

from vmckpt.checkpoint.catalogue.catalogue import Catalogue, CatalogueEntry
from vmckpt.checkpoint.catalogue.pinning import pin, release_all
from vmckpt.checkpoint.catalogue.place import Key
from vmckpt.errors import VmckptError
from vmckpt.fleet.guard.record import GuardRecord, guards_dir
from vmckpt.state.durable import write_durably
from vmckpt.store.files.pins import Pin


async def pin_for(record: GuardRecord, entry: CatalogueEntry) -> None:
    """Pin the guard's checkpoint. Raises NotFoundError, BusyError, StorageError."""
    write_durably(_file(record.run), "")
    await pin(entry, f"rollback checkpoint of guard {record.run}", guard=record.run)


async def released(record: GuardRecord, found: Catalogue) -> list[CatalogueEntry]:
    """All entries, without the guard's pin. Raises StorageError, HostDownError: it may be there."""
    entries = await release_all(found.entries, lambda one: one.guard == record.run)
    if not found.silent:  # else the pin may be in a store that did not answer
        _file(record.run).unlink(missing_ok=True)
    return entries


async def without_stale(found: Catalogue, key: Key = None) -> Catalogue:
    """The catalogue once stale pins were taken out, as far as their stores answer."""
    if not any(_is_stale(one) for entry in found.entries for one in entry.pins):
        return found
    with suppress(VmckptError):
        return found._replace(entries=await release_all(found.entries, _is_stale, key))
    return found


def _is_stale(pin: Pin) -> bool:
    if pin.guard is None or not _is_name(pin.guard):
        return False
    ours = _file(pin.guard)
    # In this order: a guard's record is written before its pin's file, and goes before it.
    return ours.exists() and not ours.with_suffix(".json").exists()


def _is_name(run: str) -> bool:
    """Whether a run is called so: what a store says does not lead to other folders."""
    return run.replace("-", "").isalnum() and run.isascii()


def _file(run: str) -> Path:
    return guards_dir() / f"{run}.pin"
