"""gc: free space that no checkpoint needs, by a plan and its execution.

A writer holds the lock `writers`, shared, from before it looks up existing chunks until its
checkpoint is committed. gc removes under that lock, exclusive, and holds it only to check what is
new and to remove. It rewrites packs before, without the lock.

In object storage a lock can be lost at any instant, unnoticed until later (a host that sleeps, a
request that hangs). The order of steps makes that harmless: gc publishes what it is about to do
(`doomed/`, or a pack's next generation), then checks the checkpoints once more, then removes; a
writer puts its checkpoint, then checks what gc has published (`Transaction`). Whichever is first,
the other sees it: gc keeps the objects, or the writer takes its checkpoint back. No generation is
written twice, so two processes that rewrite a pack do not overwrite each other's result. One of two
generations is removed, or taken back, only if the other exists and no gc has announced its removal.

A merged pack (`bundles/`) is in several objects until gc removes all but one. gc removes a copy
only if another exists, was compared, and no gc is about to remove it. Of two objects only the lower
is removed in favour of the higher (`store/bundles/layout.py`), so one remains however many gcs run
at once.
"""

import secrets
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vmckpt.errors import StorageError
from vmckpt.store.area import FrameCache
from vmckpt.store.backends.backend import Backend, HeldLock, MissingError
from vmckpt.store.backends.cached import uncached
from vmckpt.store.bundles.bundled import Holdings
from vmckpt.store.bundles.layout import BUNDLES
from vmckpt.store.bundles.merging import (
    MANY,
    Copies,
    Merge,
    copies,
    may_merge,
    merge,
    plan_merges,
)
from vmckpt.store.damage.records import RECORD_COPIES, named
from vmckpt.store.errors import DamagedError, UnreadableError
from vmckpt.store.files import doomed
from vmckpt.store.files.checkpoint_file import MAPS
from vmckpt.store.files.pack import (
    FRAME_BYTES,
    PACKS,
    Numbers,
    Pack,
    PackWriter,
    pack_name,
    parsed_name,
)
from vmckpt.store.garbage import Needed, add_needs, dead_objects, kept_packs, of_table
from vmckpt.store.opened import Opened
from vmckpt.store.store import Store
from vmckpt.store.transaction import PATIENCE_S, WRITERS

# A pack is rewritten when more than this share of it is unused.
WORTH_RATIO = 0.2
# A generation exceeds the previous one by a random step of up to this.
_GENERATIONS = 1 << 32
# Bundles made at a time: their packs are stored twice until the old copies are removed.
_MERGES = 16


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A pack to rewrite without the chunks that no checkpoint needs.

    `heals`: damaged chunks of it can be read again.
    """

    pack_id: bytes
    generation: int
    stored_bytes: int
    freed_bytes: int
    heals: bool = False


@dataclass(frozen=True, slots=True)
class GcPlan:
    """What gc would do: objects to remove (name: size), packs to rewrite, small ones to merge.

    `damaged` packs have no readable table: they are left alone. `proven`: see `copies`.
    """

    dead: dict[str, int]
    rewrites: tuple[Rewrite, ...]
    leftovers: dict[str, int]
    damaged: tuple[str, ...]
    needed: Needed
    merges: tuple[Merge, ...] = ()
    proven: frozenset[Copies] = frozenset()

    @property
    def freed_bytes(self) -> int:
        """The approximate space that would be freed."""
        removed = sum(self.dead.values()) + sum(self.leftovers.values())
        return removed + sum(rewrite.freed_bytes for rewrite in self.rewrites)


class Collected(NamedTuple):
    """The result of gc: bytes freed, chunks healed, and lost chunks by pack.

    Lost chunks are needed by checkpoints and cannot be read anywhere, until their content is stored
    again. `bundles`: the number of bundles made of small packs.
    """

    freed_bytes: int
    healed: int
    lost: dict[str, int]
    bundles: int = 0


def plan_gc(store: Store) -> GcPlan:
    """Plan what gc would do now. Changes nothing. Raises RefusedError, StorageError.

    Refused while a checkpoint cannot be read: its needs are unknown.
    """
    needed = Needed()
    add_needs(store, needed)
    store.opened.records.refresh()
    rewrites, bad = [], []
    newest = store.opened.packs.list_again()
    for pack_id, (generation, size) in newest.items():
        slots = needed.slots.get(pack_id)
        if slots is None:
            continue
        try:
            pack = store.opened.packs.find(pack_id)
            unneeded = _unneeded_bytes(pack, slots[pack.table.has(slots)])
            heals = _may_heal(store.opened, pack, slots)
            is_whole_without = not heals and _is_whole_without(store.opened, pack, slots)
        except DamagedError:
            bad.append(pack_name(pack_id, generation))
            continue
        except MissingError:  # another gc has removed it meanwhile
            continue
        if heals or is_whole_without or unneeded > size * WORTH_RATIO:
            rewrites.append(Rewrite(pack_id, generation, size, unneeded, heals))
    leftovers = store.opened.backend.leftovers()
    held = store.opened.backend.list_holdings()
    kept = kept_packs(store, needed, held)
    proven = copies(store, held, kept)
    return GcPlan(
        dead_objects(store, needed, proven),
        tuple(rewrites),
        leftovers,
        tuple(bad),
        needed,
        tuple(_merges(store, held, kept, proven, rewrites)),
        proven,
    )


def collect(store: Store, plan: GcPlan) -> Collected:
    """Execute the parts of a plan that are still valid.

    Killed at any moment it does no harm, and the next gc continues. Raises BusyError (another gc,
    or a writer that does not end), RefusedError, StorageError.
    """
    hold, backend = store.opened.backend.hold, store.opened.backend
    needed = plan.needed
    came = Collected(0, 0, {})
    with hold("gc", shared=False):
        before = _size(store)
        # First: what heals a pack may be in another one that no checkpoint needs.
        put_off = list[Rewrite]()
        for rewrite in plan.rewrites:
            if rewrite.heals:
                try:
                    came = _rewritten(store, rewrite, needed, came)
                except StorageError:  # on a full disk removing frees the space for it
                    put_off.append(rewrite)
        with hold(WRITERS, shared=False, wait_s=PATIENCE_S) as lock:
            add_needs(store, needed)
            _remove_dead(store, needed, plan.proven, lock)
            for name in backend.leftovers():
                lock.require()
                backend.remove(name)
        for rewrite in put_off:
            came = _rewritten(store, rewrite, needed, came)
        for rewrite in plan.rewrites:
            others = [one for one in _to_heal(store, needed) if one[0].id != rewrite.pack_id]
            name = pack_name(rewrite.pack_id, rewrite.generation)
            if not rewrite.heals and not _may_help(store, name, others):
                came = _rewritten(store, rewrite, needed, came)
        # Last: it takes space before it frees any.
        came = came._replace(bundles=_merged(store, plan, needed))
        store.opened.records.tidy(needed.slots)
        return came._replace(freed_bytes=max(0, before - _size(store)))


def _merged(store: Store, plan: GcPlan, needed: Needed) -> int:
    """Merge packs in batches, removing old copies before the next batch; returns the bundle
    count.
    """
    if not plan.merges or not may_merge(store):
        return 0
    backend, made = store.opened.backend, 0
    for at in range(0, len(plan.merges), _MERGES):
        made += merge(store, backend.list_holdings(), plan.merges[at : at + _MERGES])
        # List again: nothing is removed because of an object that was not read again.
        held = backend.list_holdings()
        proven = plan.proven | copies(store, held, kept_packs(store, needed, held))
        with backend.hold(WRITERS, shared=False, wait_s=PATIENCE_S) as lock:
            add_needs(store, needed)
            _remove_dead(store, needed, proven, lock)
    return made


def _remove_dead(store: Store, needed: Needed, proven: frozenset[Copies], lock: HeldLock) -> None:
    backend = store.opened.backend
    for name in doomed.stale(backend, time.time()):
        lock.require()
        backend.remove(name)
    dead = dead_objects(store, needed, proven)
    # First heal what was found damaged, or had no space, since the plan was made.
    if dead and (hurt := list(_to_heal(store, needed))):
        dead = {name: size for name, size in dead.items() if not _may_help(store, name, hurt)}
    if not dead:
        return
    with _published(backend, dead) as mine:
        add_needs(store, needed)
        # Before listing the store: a gc that removes a copy may have ended by then.
        others = doomed.names(backend, but=mine)
        for name in dead.keys() & dead_objects(store, needed, proven, others).keys():
            lock.require()
            backend.remove(name)


@contextmanager
def _published(backend: Backend, names: Iterable[str]) -> Iterator[str]:
    """As `doomed.published`; where locks last, without it if the disk is full."""
    with ExitStack() as said:
        mine = ""
        try:
            mine = said.enter_context(doomed.published(backend, names))
        except StorageError:
            # This is to free space; the lock, too, keeps writers away.
            if not backend.locks_last:
                raise
        yield mine


def _removed_for(store: Store, goes: str, stays: str) -> bool:
    """Remove one generation of a pack in favour of another. False: that one is gone, or another gc
    may be about to remove it, so both are left to the next gc.
    """
    backend = store.opened.backend
    with _published(backend, [goes]) as mine:
        # In the same order as in `_remove_dead`.
        others = doomed.names(backend, but=mine)
        held = backend.list_holdings()
        if others.issuperset(held.holders(stays)):
            return not held.holders(goes)
        backend.remove(goes)
    return True


def _rewritten(store: Store, rewrite: Rewrite, needed: Needed, before: Collected) -> Collected:
    """The result so far, after one more pack was rewritten, or found gone or unreadable."""
    name = pack_name(rewrite.pack_id, rewrite.generation)
    try:
        with ExitStack() as undo:
            healed, lost = _rewrite(store, rewrite, needed, undo)
    except MissingError:  # another gc has rewritten it
        return before
    except DamagedError:
        # Damaged since the plan was made: all of it is lost, because its intact parts are unknown.
        # Or its disk cannot read some of it: it stays until it can be read, or no checkpoint needs
        # it.
        healed, lost = 0, len(needed.slots.get(rewrite.pack_id, ()))
    known = before.lost | ({name: lost} if lost else {})
    return before._replace(healed=before.healed + healed, lost=known)


def _rewrite(store: Store, rewrite: Rewrite, needed: Needed, undo: ExitStack) -> tuple[int, int]:
    """Rewrite a pack and remove the old generation; both may exist for a moment.

    Returns how many chunks known as damaged it has again, and how many are lost. Lost chunks are
    recorded first, with their names, and return when their content is stored again. A pack that
    heals keeps all its chunks: another may heal by chunks that no checkpoint needs of this one.
    """
    opened = store.opened
    pack = opened.packs.open(rewrite.pack_id, rewrite.generation)
    wanted = of_table(pack.table, needed.slots[pack.id])
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
        add_needs(store, needed)
        kept = of_table(pack.table, needed.slots[pack.id])
        lost = np.setdiff1d(kept, found)
        if not np.isin(lost, wanted).all():
            return 0, len(lost)  # a new checkpoint needs more of it
        lock.require()
        gone = named(pack, lost, opened.elsewhere.names(pack, lost))._replace(generation=generation)
        noted = list[str]()
        # Undone until it is certain to be complete, whatever `publish` reports.
        undo.callback(_take_back, store, new.name, pack.name, noted)
        if len(lost):
            for _ in range(RECORD_COPIES):  # nothing else knows these names from now on
                noted += opened.records.write([gone])
        new.publish(pack.table.slot_count, gone.names)
        add_needs(store, needed)
        if len(np.setdiff1d(of_table(pack.table, needed.slots[pack.id]), found)) > len(lost):
            return 0, len(lost)
        lock.require()
        undo.pop_all()
        _removed_for(store, pack.name, new.name)
        bad = opened.records.slots(pack.id, pack.generation)
        bad = np.union1d(bad, kept[~pack.table.has(kept)])
        return len(np.intersect1d(bad, np.intersect1d(kept, found))), len(lost)


def _take_back(store: Store, new: str, old: str, noted: Sequence[str]) -> None:
    """Remove a pack's next generation, which may be published, and the records about it.

    Except if another gc, which took this one's lost locks, keeps that generation and removes the
    old one.
    """
    if _removed_for(store, new, old):
        store.opened.records.remove(noted)


def _kept(opened: Opened, pack: Pack, slots: Numbers) -> Iterable[tuple[Numbers, bytes]]:
    """A pack's chunks, in full frames: slots and contents, without lost ones."""
    per_frame = FRAME_BYTES // pack.table.chunk_bytes
    cache = FrameCache()
    for at in range(0, len(slots), per_frame):
        wanted = slots[at : at + per_frame]
        contents, found = opened.elsewhere.read(pack, wanted, cache.get)
        if found.any():
            yield wanted[found], contents[found].tobytes()


def _may_heal(opened: Opened, pack: Pack, slots: Numbers) -> bool:
    """Whether rewriting a pack recovers slots of it, or its table of names."""
    try:
        pack.require_hashes()
    except DamagedError:
        return True
    bad = slots[~pack.table.has(slots)]
    known = opened.records.slots(pack.id, pack.generation)
    bad = np.union1d(bad, known[np.isin(known, slots)])
    return _are_found(opened, pack, bad)


def _is_whole_without(opened: Opened, pack: Pack, needed: Numbers) -> bool:
    """Whether a pack has known damage, and only of chunks that no checkpoint needs.

    Without them it is intact. If a disk cannot read it now, but perhaps later: False.
    """
    known, table = opened.records.slots(pack.id, pack.generation), pack.table
    if not len(known) or np.isin(known, needed).any():
        return False
    there = known[table.has(known)]
    for frame in np.unique(table.frames(table.positions(there))).tolist():
        try:
            pack.frame(frame)
        except UnreadableError:
            return False
        except DamagedError:
            continue
    return True


def _to_heal(store: Store, needed: Needed) -> Iterator[tuple[Pack, Numbers]]:
    """Known damage that may heal, now or once a disk can read it, perhaps with chunks that no
    checkpoint needs: packs and their slots.
    """
    opened = store.opened
    opened.records.refresh()
    for pack_id, (generation, _) in opened.packs.list_again().items():
        bad = np.intersect1d(
            needed.slots.get(pack_id, np.zeros(0, dtype=np.int64)),
            opened.records.slots(pack_id, generation),
        )
        with suppress(DamagedError, MissingError):
            if len(bad) and opened.elsewhere.may_find_any(pack := opened.packs.find(pack_id), bad):
                yield pack, bad


def _may_help(store: Store, name: str, hurt: Sequence[tuple[Pack, Numbers]]) -> bool:
    """Whether an object may have chunks that heal some of these, unless it certainly has not."""
    opened = store.opened
    if not hurt or not name.startswith((f"{PACKS}/", f"{BUNDLES}/")):
        return False
    if name.startswith(f"{BUNDLES}/"):
        bundle = opened.backend.list_holdings().bundles.get(name)
        return bundle is None or any(_may_help(store, one, hurt) for one in bundle.members)
    parsed = parsed_name(name)
    if parsed is None or any(parsed[0] == pack.id for pack, _ in hurt):
        return True
    try:
        there = opened.packs.open(*parsed).hashes()
    except MissingError:
        return False
    except DamagedError:
        return True
    names = (opened.elsewhere.names(*one) for one in hurt)
    return any(np.isin(there[:, 0], one[:, 0]).any() for one in names)


def _are_found(opened: Opened, pack: Pack, slots: Numbers) -> bool:
    """Whether some of these can be read, by location or by name."""
    return bool(len(slots)) and opened.elsewhere.finds_any(pack, slots)


def _merges(
    store: Store,
    held: Holdings,
    kept: Mapping[str, int],
    proven: frozenset[Copies],
    rewrites: Iterable[Rewrite],
) -> list[Merge]:
    """The small packs worth merging, in the order in which checkpoints need them."""
    generations = Counter(parsed[0] for parsed in map(parsed_name, held.sizes()) if parsed)
    # Of two generations another gc may be about to take one back.
    changing = {
        name for name in kept if (parsed := parsed_name(name)) and generations[parsed[0]] > 1
    } | {pack_name(one.pack_id, one.generation) for one in rewrites}
    faulty = []
    with uncached(store.opened.backend):
        for name, bundle in held.bundles.items():
            with suppress(MissingError):
                if store.opened.backend.files.faults(name, bundle.size):
                    faulty.append(name)
    ages: dict[str, int] = {}
    if held.bundles or len(kept) >= MANY:
        for manifest in store.manifests():
            for pack in manifest.packs:
                ages.setdefault(pack, len(ages))
    return plan_merges(
        held,
        kept,
        proven,
        changing=changing,
        faulty=faulty,
        age=lambda name: ages.get(name.rpartition("/")[2].partition("-")[0], 0),
    )


def _unneeded_bytes(pack: Pack, slots: Numbers) -> int:
    """Approximate unused share of a pack."""
    table = pack.table
    frames = table.frames(table.positions(slots))
    used = np.bincount(frames, minlength=len(table.counts))
    unused = np.sum(table.stored * (table.counts - used) // np.maximum(table.counts, 1))
    return int(unused)


def _size(store: Store) -> int:
    backend = store.opened.backend
    others = *backend.names(MAPS).values(), *backend.leftovers().values()
    return backend.list_holdings().stored_bytes + sum(others)
