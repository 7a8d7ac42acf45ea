"""Determine what checkpoints need, and which objects gc can therefore remove."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from vmckpt.errors import RefusedError
from vmckpt.store.backends.backend import MissingError
from vmckpt.store.bundles.bundled import Holdings
from vmckpt.store.bundles.merging import Copies, superseded
from vmckpt.store.errors import DamagedError, UnreadableError
from vmckpt.store.files.checkpoint_file import CHECKPOINTS, MAPS, Maps
from vmckpt.store.files.maps import packs_of, slots_of
from vmckpt.store.files.pack import Numbers, PackTable, believed, pack_name, parsed_name
from vmckpt.store.files.pins import orphans
from vmckpt.store.opened import REQUESTS
from vmckpt.store.store import Store, is_id


@dataclass(slots=True)
class Needed:
    """What checkpoints need: slots by pack, and the maps that others are based on.

    `checkpoints`: those examined, with versions: a removed one may return, by a copy, with other
    content.
    """

    checkpoints: dict[str, tuple[int, str]] = field(default_factory=dict)
    slots: dict[bytes, Numbers] = field(default_factory=dict)
    bases: set[bytes] = field(default_factory=set)

    def add(self, maps: Maps) -> None:
        """Add a checkpoint."""
        if maps.base is not None:
            self.bases.add(maps.base)
        for area in maps.areas.values():
            refs = np.unique(area.refs)
            packs = packs_of(refs)
            for number in np.unique(packs).tolist():
                if number >= 0:
                    pack_id = maps.packs[number]
                    slots = slots_of(refs[packs == number])
                    before = self.slots.get(pack_id, slots[:0])
                    self.slots[pack_id] = np.union1d(before, slots)


def add_needs(store: Store, needed: Needed) -> None:
    """Add the needs of checkpoints that were not examined yet. Raises RefusedError."""

    def read(checkpoint_id: str) -> Maps | None:
        try:
            return store.opened.files.read_maps(checkpoint_id)
        except MissingError:  # removed, meanwhile
            return None
        except DamagedError as exc:
            # One that may be readable later, or elsewhere, must not be removed.
            is_lost = not isinstance(exc, UnreadableError)
            remedy = "remove it (vmckpt checkpoint rm), then run this again"
            raise RefusedError(
                f"nothing can be collected in {store.location}",
                why=f"checkpoint {checkpoint_id} {'is damaged' if is_lost else 'cannot be read'} "
                f"({exc.why}): it is not known what it needs",
                remedy=remedy if is_lost else exc.remedy,
            ) from exc

    there = store.opened.backend.versions(CHECKPOINTS)
    new = [one for one in there if is_id(one) and needed.checkpoints.get(one) != there[one]]
    for at in range(0, len(new), REQUESTS):
        part = new[at : at + REQUESTS]
        for checkpoint_id, maps in zip(part, store.opened.at_once(read, part), strict=True):
            if maps is not None:
                needed.add(maps)
                needed.checkpoints[checkpoint_id] = there[checkpoint_id]


def dead_objects(
    store: Store, needed: Needed, proven: frozenset[Copies], gone: Collection[str] = frozenset()
) -> dict[str, int]:
    """Objects that no checkpoint needs: packs, all but one of their generations and copies, bundles
    of only such packs, maps, pins.

    `gone`: objects that others may remove at any moment.
    """
    held = store.opened.backend.list_holdings()
    kept = kept_packs(store, needed, held)

    stays = {name.partition("-")[0]: name for name in kept}

    def is_dead(pack: str, holder: str) -> bool:
        if pack in kept:
            return superseded(pack, holder, held, proven, gone)
        # Another generation is kept: but not in favour of one that its gc may be about to take
        # back.
        kept_one = stays.get(pack.partition("-")[0])
        return kept_one is None or any(one not in gone for one in held.holders(kept_one))

    dead = {
        name: size
        for name, size in held.loose.items()
        if parsed_name(name) is not None and is_dead(name, name)
    }
    for name, bundle in held.bundles.items():
        if all(is_dead(pack, name) for pack in bundle.members):
            dead[name] = bundle.size
    if len(kept) == len(needed.slots):  # nothing is missing that those might have
        dead |= held.unreadable_bytes
    for name, size in store.opened.backend.names(MAPS).items():
        if name not in {base.hex() for base in needed.bases}:
            dead[f"{MAPS}/{name}"] = size
    return dead | orphans(store.opened, store.ids)


def kept_packs(store: Store, needed: Needed, held: Holdings) -> dict[str, int]:
    """The packs that checkpoints need, each in the generation to keep, with sizes."""
    sizes = held.sizes()
    generations: dict[bytes, list[int]] = {}
    for parsed in map(parsed_name, sizes):
        if parsed is not None:
            generations.setdefault(parsed[0], []).append(parsed[1])
    kept = {}
    for pack_id, slots in needed.slots.items():
        if found := generations.get(pack_id):
            is_merged = partial(_is_merged, held, pack_id)
            newest_first = believed(found, is_merged)
            name = pack_name(pack_id, _kept_generation(store, pack_id, newest_first, slots))
            kept[name] = sizes[name]
    return kept


def _is_merged(held: Holdings, pack_id: bytes, generation: int) -> bool:
    return pack_name(pack_id, generation) in held.within


def _kept_generation(
    store: Store, pack_id: bytes, newest_first: Sequence[int], slots: Numbers
) -> int:
    """The generation to keep: the newest that lacks no needed slot of an older one.

    Known damage does not count as having a slot. If none can be read, the newest. Raises
    UnreadableError. A gc that was stopped for long may have published one that lacks chunks added
    meanwhile.
    """
    whole: dict[int, PackTable] = {}
    for number in newest_first if len(newest_first) > 1 else []:
        try:
            whole[number] = store.opened.packs.open(pack_id, number).table
        except UnreadableError:  # it may be the one to keep: remove none now
            raise
        except (DamagedError, MissingError):
            continue

    def good(number: int) -> Numbers:
        there = of_table(whole[number], slots)
        there = there[whole[number].has(there)]
        return np.setdiff1d(there, store.opened.records.slots(pack_id, number))

    for number, table in whole.items():
        if all(table.has(good(older)).all() for older in whole if older < number):
            return number
    return newest_first[0]


def of_table(table: PackTable, slots: Numbers) -> Numbers:
    """Slots that a pack can have: maps are data, and may name any."""
    return slots[slots < table.slot_count]
