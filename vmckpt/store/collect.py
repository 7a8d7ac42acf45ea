"""gc: space that no checkpoint needs comes back. A plan, and what it comes to.

A writer holds the lock `writers`, shared, from before it looks up what the store has until its
checkpoint is there; what is removed is removed under that lock, exclusive, and held only for
looking at what has come since, and for removing. Packs are rewritten before, without it.

In object storage a lock can be lost at any instant, unnoticed until later (a host that sleeps, a
request that hangs). So the order is such that this harms nothing: gc publishes what it is about to
do (`doomed/`, or a pack's next generation), then looks at checkpoints once more, then removes; a
writer puts its checkpoint, then looks at what gc has published (`Transaction`). Whichever is first,
the other sees it: gc leaves the objects, or the writer takes its checkpoint back. No generation is
written twice, so two that write a pack anew do not overwrite one another's.
"""

import secrets
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from vmckpt.errors import RefusedError, StorageError
from vmckpt.store import doomed
from vmckpt.store.area import FrameCache
from vmckpt.store.backends.backend import Held, MissingError
from vmckpt.store.checkpoint_file import MAPS, Maps
from vmckpt.store.damage.records import RECORD_COPIES, named
from vmckpt.store.errors import DamagedError
from vmckpt.store.maps import packs_of, slots_of
from vmckpt.store.opened import REQUESTS, Opened
from vmckpt.store.pack import (
    FRAME_BYTES,
    PACKS,
    Numbers,
    Pack,
    PackWriter,
    Table,
    every,
    pack_name,
)
from vmckpt.store.pins import orphans
from vmckpt.store.store import PATIENCE_S, WRITERS, Store

# A pack is rewritten when more than this part of it is of no use.
WORTH_RATIO = 0.2
# A generation is higher than the one before by up to so much, at random.
_GENERATIONS = 1 << 32


@dataclass(slots=True)
class Needed:
    """What checkpoints need: of each pack the slots, and the maps that others rest on."""

    checkpoints: set[str] = field(default_factory=set)
    slots: dict[bytes, Numbers] = field(default_factory=dict)
    bases: set[bytes] = field(default_factory=set)

    def add(self, checkpoint_id: str, maps: Maps) -> None:
        """One more checkpoint."""
        self.checkpoints.add(checkpoint_id)
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


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A pack that is to be written anew, without what no checkpoint needs.

    `heals`: damaged chunks of it are to be had again.
    """

    pack_id: bytes
    generation: int
    stored_bytes: int
    freed_bytes: int
    heals: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """What gc would do: objects to remove (name: size), packs to rewrite.

    `damaged` packs have no table that can be read: they are left alone.
    """

    dead: dict[str, int]
    rewrites: tuple[Rewrite, ...]
    leftovers: dict[str, int]
    damaged: tuple[str, ...]
    needed: Needed

    @property
    def freed_bytes(self) -> int:
        """How much space comes back, about."""
        removed = sum(self.dead.values()) + sum(self.leftovers.values())
        return removed + sum(rewrite.freed_bytes for rewrite in self.rewrites)


class Collected(NamedTuple):
    """What gc came to: bytes that came back, chunks that were healed, and by pack those lost.

    Lost chunks are needed by checkpoints and can be read nowhere, until their content is put again.
    """

    freed_bytes: int
    healed: int
    lost: dict[str, int]


def plan_gc(store: Store) -> Plan:
    """What gc would do now. Changes nothing. Raises RefusedError, StorageError.

    Refused while a checkpoint cannot be read: nobody knows what it needs.
    """
    needed = Needed()
    _look(store, needed)
    store.opened.records.refresh()
    rewrites, bad = [], []
    newest = store.opened.packs.look_again()
    for pack_id, (generation, size) in newest.items():
        slots = needed.slots.get(pack_id)
        if slots is None:
            continue
        try:
            pack = store.opened.packs.find(pack_id)
            unneeded = _unneeded_bytes(pack, slots[pack.table.has(slots)])
            heals = _may_heal(store.opened, pack, slots)
        except DamagedError:
            bad.append(pack_name(pack_id, generation))
            continue
        except MissingError:  # another gc has removed it meanwhile
            continue
        if heals or unneeded > size * WORTH_RATIO:
            rewrites.append(Rewrite(pack_id, generation, size, unneeded, heals))
    leftovers = store.opened.backend.leftovers()
    return Plan(_dead(store, needed), tuple(rewrites), leftovers, tuple(bad), needed)


def collect(store: Store, plan: Plan) -> Collected:
    """Do it, as far as it is still right.

    Killed at any moment it has harmed nothing, and the next one goes on. Raises BusyError (another
    gc, or a writer that does not end), RefusedError, StorageError.
    """
    hold, backend = store.opened.backend.hold, store.opened.backend
    needed = plan.needed
    came = Collected(0, 0, {})
    with hold("gc", shared=False):
        before = _size(store)
        # First: what heals a pack may lie in another one that no checkpoint needs.
        for rewrite in plan.rewrites:
            if rewrite.heals:
                came = _rewritten(store, rewrite, needed, came)
        with hold(WRITERS, shared=False, wait_s=PATIENCE_S) as lock:
            _look(store, needed)
            _remove_dead(store, needed, lock)
            for name in backend.leftovers():
                lock.require()
                backend.remove(name)
        for rewrite in plan.rewrites:
            if not rewrite.heals:
                came = _rewritten(store, rewrite, needed, came)
        store.opened.records.tidy()
        return came._replace(freed_bytes=before - _size(store))


def _remove_dead(store: Store, needed: Needed, lock: Held) -> None:
    backend = store.opened.backend
    for name in doomed.stale(backend, time.time()):
        lock.require()
        backend.remove(name)
    if not (dead := _dead(store, needed)):
        return
    with ExitStack() as said:
        try:
            said.enter_context(doomed.published(backend, dead))
        except StorageError:
            # A full disk, which this is to make room on. The lock keeps writers away, too.
            if not backend.locks_last:
                raise
        _look(store, needed)
        for name in dead.keys() & _dead(store, needed).keys():
            lock.require()
            backend.remove(name)


def _rewritten(store: Store, rewrite: Rewrite, needed: Needed, before: Collected) -> Collected:
    """What gc came to after one more pack was written anew, or found to be gone or unreadable."""
    name = pack_name(rewrite.pack_id, rewrite.generation)
    try:
        with ExitStack() as undo:
            healed, lost = _rewrite(store, rewrite, needed, undo)
    except MissingError:  # another gc has written it anew
        return before
    except DamagedError:
        # All that it has, since the plan was made: none of it can be told from what is whole.
        healed, lost = 0, len(needed.slots.get(rewrite.pack_id, ()))
    known = before.lost | ({name: lost} if lost else {})
    return before._replace(healed=before.healed + healed, lost=known)


def _rewrite(store: Store, rewrite: Rewrite, needed: Needed, undo: ExitStack) -> tuple[int, int]:
    """Write a pack anew and put it in the place of the old one; both may be there for a moment.

    How many of its chunks that were known to be damaged it has again, and how many are lost: these
    are written down first, with their names, and come back when their content does. One that heals
    keeps all that it has: another may heal by what no checkpoint needs of this one.
    """
    opened = store.opened
    pack = opened.packs.open(rewrite.pack_id, rewrite.generation)
    wanted = _of(pack.table, needed.slots[pack.id])
    if rewrite.heals:
        wanted = np.union1d(wanted, pack.table.slots)
    size = pack.table.chunk_bytes
    generation = pack.generation + 1 + secrets.randbelow(_GENERATIONS)
    new = PackWriter(opened.packs, pack.id, generation, size, opened.pool)
    undo.callback(new.discard)
    found = wanted[:0]
    for slots, contents in _kept(opened, pack, wanted):
        new.add(contents, opened.sealer.hashes(memoryview(contents), size), slots)
        found = np.append(found, slots)
    with opened.backend.hold(WRITERS, shared=False, wait_s=PATIENCE_S) as lock:
        _look(store, needed)
        kept = _of(pack.table, needed.slots[pack.id])
        lost = np.setdiff1d(kept, found)
        if not np.isin(lost, wanted).all():
            return 0, len(lost)  # a checkpoint came meanwhile that needs more of it
        lock.require()
        gone = named(pack, lost, opened.elsewhere.names(pack, lost))._replace(generation=generation)
        if len(lost):
            for _ in range(RECORD_COPIES):  # nothing else knows these names from now on
                undo.callback(opened.records.remove, opened.records.write([gone]))
        # Undone until it is certain that it has all that is needed, whatever `publish` says.
        undo.callback(opened.backend.remove, new.name)
        new.publish(pack.table.slot_count, gone.names)
        _look(store, needed)
        if len(np.setdiff1d(_of(pack.table, needed.slots[pack.id]), found)) > len(lost):
            return 0, len(lost)
        lock.require()
        undo.pop_all()
        opened.backend.remove(pack.name)
        bad = opened.records.slots(pack.id, pack.generation)
        bad = np.union1d(bad, kept[~pack.table.has(kept)])
        return len(np.intersect1d(bad, np.intersect1d(kept, found))), len(lost)


def _kept(opened: Opened, pack: Pack, slots: Numbers) -> Iterable[tuple[Numbers, bytes]]:
    """Chunks of a pack, frames full of them: slots and contents, without those that are lost."""
    per_frame = FRAME_BYTES // pack.table.chunk_bytes
    cache = FrameCache()
    for at in range(0, len(slots), per_frame):
        wanted = slots[at : at + per_frame]
        contents, found = opened.elsewhere.read(pack, wanted, cache.get)
        if found.any():
            yield wanted[found], contents[found].tobytes()


def _may_heal(opened: Opened, pack: Pack, slots: Numbers) -> bool:
    """Whether writing a pack anew brings back slots of it, or its table of names."""
    try:
        pack.require_hashes()
    except DamagedError:
        return True
    bad = slots[~pack.table.has(slots)]
    known = opened.records.slots(pack.id, pack.generation)
    bad = np.union1d(bad, known[np.isin(known, slots)])
    if not len(bad):
        return False
    _, found = opened.elsewhere.read(pack, bad, FrameCache().get)
    return bool(found.any())


def _look(store: Store, needed: Needed) -> None:
    """Add what checkpoints need that were not looked at yet. Raises RefusedError."""

    def read(checkpoint_id: str) -> Maps | None:
        try:
            return store.opened.files.read_maps(checkpoint_id)
        except MissingError:  # removed, meanwhile
            return None
        except DamagedError as exc:
            raise RefusedError(
                f"nothing can be collected in {store.place}",
                why=f"checkpoint {checkpoint_id} is damaged ({exc.why}): nobody knows what it "
                "needs",
                remedy="remove it (vmckpt checkpoint rm), then run this again",
            ) from exc

    new = [one for one in store.ids() if one not in needed.checkpoints]
    for at in range(0, len(new), REQUESTS):
        part = new[at : at + REQUESTS]
        for checkpoint_id, maps in zip(part, store.opened.at_once(read, part), strict=True):
            if maps is not None:
                needed.add(checkpoint_id, maps)


def _dead(store: Store, needed: Needed) -> dict[str, int]:
    """Objects that no checkpoint needs: packs, all but one of their generations, maps, pins."""
    generations: dict[bytes, list[tuple[int, int]]] = {}
    for pack_id, generation, size in every(store.opened.backend):
        generations.setdefault(pack_id, []).append((generation, size))
    dead = dict[str, int]()
    for pack_id, found in generations.items():
        kept = None
        if pack_id in needed.slots:
            kept = _kept_generation(store, pack_id, found, needed.slots[pack_id])
        dead |= {pack_name(pack_id, number): size for number, size in found if number != kept}
    for name, size in store.opened.backend.names(MAPS).items():
        if name not in {base.hex() for base in needed.bases}:
            dead[f"{MAPS}/{name}"] = size
    return dead | orphans(store.opened, store.ids)


def _kept_generation(
    store: Store, pack_id: bytes, found: Iterable[tuple[int, int]], slots: Numbers
) -> int:
    """The newest that has all that is needed but for known damage; where none has, the newest.

    A gc that was stopped for long may have published one that lacks what came meanwhile.
    """
    newest_first = sorted((number for number, _ in found), reverse=True)
    for number in newest_first if len(newest_first) > 1 else []:
        with suppress(DamagedError, MissingError):
            table = store.opened.packs.open(pack_id, number).table
            known = store.opened.records.slots(pack_id, number)
            there = _of(table, slots)
            if np.isin(there[~table.has(there)], known).all():
                return number
    return newest_first[0]


def _of(table: Table, slots: Numbers) -> Numbers:
    """Those that a pack may have: maps are data, and may name any."""
    return slots[slots < table.slot_count]


def _unneeded_bytes(pack: Pack, slots: Numbers) -> int:
    """About how much of a pack nobody needs."""
    table = pack.table
    frames = table.frames(table.positions(slots))
    used = np.bincount(frames, minlength=len(table.counts))
    unused = np.sum(table.stored * (table.counts - used) // np.maximum(table.counts, 1))
    return int(unused)


def _size(store: Store) -> int:
    names = store.opened.backend.names
    kept = sum(sum(names(folder).values()) for folder in (PACKS, MAPS))
    return kept + sum(store.opened.backend.leftovers().values())
