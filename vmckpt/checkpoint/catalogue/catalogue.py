"""Find checkpoints in all stores, wherever their VMs are now."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from vmckpt.checkpoint.catalogue.location import (
    Key,
    StoreLocation,
    is_there,
    opened,
    own,
    parse_location,
)
from vmckpt.checkpoint.catalogue.whose import vm_labels
from vmckpt.checkpoint.facts import CheckpointFacts, UnknownFactsError
from vmckpt.checkpoint.history import History
from vmckpt.checkpoint.origin import is_own
from vmckpt.errors import (
    HostDownError,
    NotFoundError,
    RefusedError,
    StorageError,
    UsageError,
    VmckptError,
)
from vmckpt.hosts.every import ask_every
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory.directories import state_dir
from vmckpt.sequence.in_thread import in_thread
from vmckpt.store.files.manifest import Manifest, is_same
from vmckpt.store.files.naming import meant
from vmckpt.store.files.order import in_order
from vmckpt.store.files.pins import Pin, Pinned
from vmckpt.vm.paths import vm_dir, vms_dir

# Errors of a single store: the list leaves it out and reports it.
_ITS_OWN = (HostDownError, StorageError, RefusedError, NotFoundError)


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A checkpoint, in one store or several. `facts` is None if another version of vmckpt wrote it.

    `pins` are those of all these stores, each listed once.
    """

    locations: tuple[StoreLocation, ...]
    manifest: Manifest
    facts: CheckpointFacts | None
    pins: tuple[Pin, ...] = ()

    @property
    def location(self) -> StoreLocation:
        """The nearest store."""
        return self.locations[0]

    @property
    def id(self) -> str:
        """The permanent id."""
        return self.manifest.id

    @property
    def name(self) -> str:
        """The name given when it was taken."""
        return self.facts.name if self.facts else "?"


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A checkpoint with an unreadable manifest: it can only be removed."""

    location: StoreLocation
    id: str
    error: VmckptError


class Catalogue(NamedTuple):
    """All checkpoints found, oldest first, and the stores or checkpoints that could not be read.

    `unreadable` lists those checkpoints.
    """

    entries: list[CatalogueEntry]
    silent: list[VmckptError]
    unreadable: tuple[Unreadable, ...] = ()

    def find_unreadable(self, text: str) -> list[Unreadable]:
        """The unreadable checkpoint with this id or id prefix, in each store; [] if none matches.

        Raises UsageError if the prefix matches several.
        """
        found = [one for one in self.unreadable if len(text) >= 4 and one.id.startswith(text)]
        if len({one.id for one in found}) > 1:
            raise UsageError(
                f"'{text}' matches several checkpoints",
                why=f"these ids begin with it: {', '.join(one.id for one in found)}",
                remedy="write more characters of the id",
            )
        return found

    def find(self, text: str) -> CatalogueEntry:
        """Find a checkpoint by name or id prefix. Raises NotFoundError, UsageError."""
        ids = meant(text, {one.id: one.name for one in self.entries})
        found = [one for one in self.entries if one.id in ids]
        if len(found) == 1:
            return found[0]
        if found:
            labels = vm_labels([one.manifest for one in found])
            raise UsageError(
                f"'{text}' matches {len(found)} checkpoints",
                why=", ".join(f"{one.id} ('{one.name}' of {labels[one.id]})" for one in found),
                remedy="write more characters of the id",
            )
        whys = [
            "no store that was searched has it",
            *(f"{e.what}: {e.why}" for e in self.silent),
        ]
        raise NotFoundError(
            f"there is no checkpoint '{text}'",
            why="; ".join(whys),
            remedy="see `vmckpt checkpoint list`, or name its store: --store",
        )


async def catalogue(
    hosts: Sequence[Host], given: str | None, key: Key = None, vm: str | None = None
) -> Catalogue:
    """All checkpoints, or one VM's, in the given store or else in all known stores.

    Known stores are every host's own and those that its VMs were taken into. Raises StorageError,
    RefusedError, HostDownError if the given store cannot be read.
    """
    if given is not None:
        there = await _read(parse_location(given), key, vm)
        silent = [one.error for one in there.damaged]
        return Catalogue(_merged(there.manifests, there.pins), silent, tuple(there.damaged))
    locations, silent = await known_locations(hosts, vm)
    unreachable = list[VmckptError]()

    async def read_location(location: StoreLocation) -> _There:
        try:
            return await _read(location, key, vm, named=False)
        except _ITS_OWN as exc:
            unreachable.append(exc)
            return _There([], [], {})

    found = await asyncio.gather(*(read_location(location) for location in locations))
    unreadable = tuple(one for there in found for one in there.damaged)
    every = [one for there in found for one in there.manifests]
    manifests, others = await in_thread(partial(_agreeing, every, _is_ours))
    silent += [*unreachable, *(one.error for one in unreadable), *others]
    pins: Pinned = {}
    for there in found:
        for checkpoint_id, those in there.pins.items():
            pins[checkpoint_id] = (*pins.get(checkpoint_id, ()), *those)
    return Catalogue(_merged(manifests, pins), silent, unreadable)


def _agreeing(
    found: Sequence[tuple[StoreLocation, Manifest]], is_ours: Callable[[Manifest], bool]
) -> tuple[list[tuple[StoreLocation, Manifest]], list[VmckptError]]:
    """The correct description of each checkpoint, with the stores that agree on it.

    If stores contradict each other, one with this site's mark is right (`origin.py`), otherwise the
    nearest: write access to one store must not suffice to make another store's checkpoint look old,
    or foreign.
    """
    nearest_first = sorted(found, key=lambda one: _distance(one[0]))
    right = dict[str, Manifest]()
    for _, one in nearest_first:
        known = right.setdefault(one.id, one)
        if not is_same(known, one) and is_ours(one) and not is_ours(known):
            right[one.id] = one
    kept, errors = list[tuple[StoreLocation, Manifest]](), list[VmckptError]()
    for location, manifest in nearest_first:
        if is_same(right[manifest.id], manifest):
            kept.append((location, manifest))
        else:
            errors.append(contradiction(location, manifest.id))
    return kept, errors


def _is_ours(manifest: Manifest) -> bool:
    """Whether this site took it, as far as its key can be read. Blocking."""
    with suppress(StorageError):
        return is_own(state_dir(), manifest)
    return False


def contradiction(location: StoreLocation, checkpoint_id: str) -> StorageError:
    """Two stores have different checkpoints with the same id."""
    return StorageError(
        f"checkpoint {checkpoint_id} in {location.label} is not the one of that id in another "
        "store",
        why="their descriptions differ; those of copies are identical",
        remedy=f"find out who wrote it, and remove it: vmckpt checkpoint rm {checkpoint_id} "
        f"--store {location.label}",
    )


def _distance(location: StoreLocation) -> tuple[bool, bool]:
    """Sort key: stores of this machine first."""
    return not location.is_here, location.host is None


async def known_locations(
    hosts: Sequence[Host], vm: str | None = None
) -> tuple[list[StoreLocation], list[VmckptError]]:
    """Every known store, once, and why some may be missing.

    Known stores are all hosts' own and those that their VMs (or one VM) were taken into.
    """
    answers = await ask_every(hosts, lambda host: _locations(host, vm))
    locations = _different(location for found in answers.given for location in found)
    silent = list(answers.silent)

    async def has_one(location: StoreLocation) -> bool:
        try:
            return await is_there(location)
        except _ITS_OWN as exc:
            silent.append(exc)
            return False

    there = await asyncio.gather(*map(has_one, locations))
    return [location for location, is_one in zip(locations, there, strict=True) if is_one], silent


async def _locations(host: Host, vm: str | None) -> list[StoreLocation]:
    names = [vm] if vm else await host.list_dir(vms_dir(host.state_dir))
    paths = [vm_dir(host.state_dir, name).point for name in names]
    texts = await asyncio.gather(*(host.read_text(path) for path in paths))
    return [
        own(host),
        *(location for text in texts for location in History.parse(text).locations(host)),
    ]


def _different(locations: Iterable[StoreLocation]) -> list[StoreLocation]:
    """Remove duplicates: a directory of this machine is the same under each of its host names."""
    found: dict[tuple[str, str], StoreLocation] = {}
    for location in locations:
        where = "" if location.is_here or location.host is None else location.host.name
        if location.is_own or (where, location.path) not in found:
            found[where, location.path] = location
    return list(found.values())


class _There(NamedTuple):
    """What one store contains, and which parts of it cannot be read."""

    manifests: list[tuple[StoreLocation, Manifest]]
    damaged: list[Unreadable]
    pins: Pinned


async def _read(location: StoreLocation, key: Key, vm: str | None, *, named: bool = True) -> _There:
    async with opened(location, key, any_encryption=not named) as store:
        found = await in_thread(store.catalogue)
        pins = await in_thread(store.pins)
    mine = [(location, one) for one in found.manifests if vm is None or one.vm == vm]
    bad = [Unreadable(location, one, error) for one, error in found.damaged.items()]
    return _There(mine, bad, pins)


def _merged(
    found: Sequence[tuple[StoreLocation, Manifest]],
    pins: Mapping[str, Sequence[Pin]] = MappingProxyType({}),
) -> list[CatalogueEntry]:
    """One entry per checkpoint, however many stores have it; stores of this machine come first."""
    locations: dict[str, list[StoreLocation]] = {}
    manifests: dict[str, Manifest] = {}
    for location, manifest in found:
        locations.setdefault(manifest.id, []).append(location)
        manifests[manifest.id] = manifest
    entries = {
        one: CatalogueEntry(
            tuple(sorted(locations[one], key=_distance)),
            manifest,
            _facts(manifest),
            tuple({pin.id: pin for pin in pins.get(one, ())}.values()),
        )
        for one, manifest in manifests.items()
    }
    return [entries[manifest.id] for manifest in in_order(manifests.values())]


def _facts(manifest: Manifest) -> CheckpointFacts | None:
    try:
        return CheckpointFacts.from_json(manifest.facts)
    except UnknownFactsError:
        return None


def to_json(entry: CatalogueEntry) -> dict[str, Any]:
    """The entry as JSON."""
    manifest = entry.manifest
    return {
        "id": manifest.id,
        "vm": manifest.vm,
        "vm_id": manifest.vm_id,
        "sequence": manifest.sequence,
        "parent": manifest.parent,
        "created_unix_s": manifest.created_unix_s,
        "added_bytes": manifest.added_bytes,
        "areas": [asdict(area) for area in manifest.areas],
        "store": entry.location.label,
        "stores": [location.label for location in entry.locations],
        "pins": [pin.to_json() for pin in entry.pins],
        "facts": entry.facts.shown() if entry.facts else None,
    }
