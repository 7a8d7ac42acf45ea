"""Bits that flip in a store between what is done to it, and what has to hold whatever flips.

A round: bits flip, and between them writers, gc, copies and removals work. Then what `check` calls
whole is restored bit by bit, and what it calls lost is refused. Then all contents are put once
more, and all damage to them is healed by that. Only two things are not: a checkpoint whose own file
or maps, or a pack whose table, has flipped; and chunks whose name has flipped in each of its copies
as long as none was written again, which is watched here flip by flip: it is not what the store
says. What is left is removed, and the store is whole.
"""

import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from tests.guest_like import RAM
from tests.store_work import PAGES, make, require_right, state
from vmckpt.errors import RefusedError, VmckptError
from vmckpt.store.bundles.bundled import BundledBackend, Holdings
from vmckpt.store.bundles.layout import Bundle
from vmckpt.store.check import check
from vmckpt.store.collect import collect, plan_gc
from vmckpt.store.copying import copy_checkpoints
from vmckpt.store.damage.repair import plan_repair, repair
from vmckpt.store.errors import DamagedError
from vmckpt.store.files.manifest import PAGE_CHUNK_BYTES, Manifest
from vmckpt.store.files.maps import packs_of, slots_of
from vmckpt.store.files.pack import Pack
from vmckpt.store.opened import Opened
from vmckpt.store.store import Store

# Few show what is still restored beside damage, many what is left of much of it.
FLIPS_A_ROUND = (1, 1, 2, 3, 5, 8, 10)
AT_ONCE = 3
LEAST_CHECKPOINTS = 3
MOST_CHANGES = 8
PAGES_OF_A_ROOT = 120
FOLDERS = ("packs", "packs", "packs", "bundles", "bundles", "checkpoints", "maps", "damaged")
WORK = ("make", "make", "again", "gc", "gc", "check", "copy", "copy back", "remove")
MOST_CHECKPOINTS = 6

Put = Callable[[str, bytes], None]


class Flipping:
    """A store whose bits flip, and a mirror where they do not. `reopen` opens the store again.

    `put` replaces an object of the store by other bytes, `look` opens it to see what is there.
    """

    def __init__(
        self,
        reopen: Callable[[], Store],
        mirror: Store,
        put: Put,
        look: Callable[[], Store],
        *,
        seed: int,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._reopen, self._mirror, self._put, self._look = reopen, mirror, put, look
        self._random = random.Random(seed)
        self._seed = seed * 1_000_000
        # Chunks of which a flip took the last copy of the name: pack, slot.
        self._nameless: set[tuple[bytes, int]] = set()
        self._flipped: set[str] = set()

    def run(self, flips: int) -> None:
        """So many flips, in rounds."""
        while self.counts["flips"] < flips:
            most = self._random.choice(FLIPS_A_ROUND)
            self._round(min(most, flips - self.counts["flips"]))

    def _round(self, flips: int) -> None:
        self.counts["rounds"] += 1
        with self._reopen() as store:
            while len(store.ids()) < LEAST_CHECKPOINTS:
                self._make(store)
        for at in range(0, flips, AT_ONCE):
            with self._reopen() as store:
                for _ in range(min(AT_ONCE, flips - at)):
                    self._flip(store.opened.backend)
                self._work(store)
        with self._reopen() as store:
            lost = self._require_check_is_right(store)
        with self._reopen() as store:
            self._heal(store, lost)
        with self._reopen() as store:
            done = repair(store, plan_repair(store), remove_lost=True)
            self.counts["removed"] += len(done.removed)
            self.counts["healed chunks"] += done.collected.healed if done.collected else 0
            report = check(store)
            assert report.whole, (report.findings, report.lost)
            for manifest in store.manifests():
                require_right(store, manifest)

    def _flip(self, backend: BundledBackend) -> None:
        """One bit, of a frame most often; else anywhere, or where the formats' own bytes are."""
        folder = self._random.choice(FOLDERS)
        held = backend.list_holdings()
        packs = [*held.loose, *held.bundles]
        names = [f"{folder}/{name}" for name in backend.names(folder)]
        if folder == "packs" or not names:
            folder, names = "packs", packs
        if not names:
            return  # gc has removed all: what was removed was all that there was
        name = self._random.choice(sorted(names))
        data = bytearray(backend.read(name))
        at = self._random.randrange(len(data))
        if self._random.random() < 0.2:
            at = self._random.choice([at % 200, len(data) - 1 - at % 200]) % len(data)
        data[at] ^= 1 << self._random.randrange(8)
        ids = {
            bytes.fromhex(pack.partition("/")[2].partition("-")[0]) for pack in ids_of(held, name)
        }
        before = self._named(folder, ids)
        self._put(name, bytes(data))
        after = self._named(folder, ids)
        for pack_id in before.keys() & after.keys():
            self._nameless |= {(pack_id, slot) for slot in before[pack_id] - after[pack_id]}
        self._flipped |= {name} if name not in held.bundles else touched(held.bundles[name], at)
        self.counts["flips"] += 1
        self.counts[f"flips in {folder}"] += 1

    def _work(self, store: Store) -> None:
        """Something that is done to a store. That damage stops it is right; wrong bytes are not."""
        kind = self._random.choice(WORK)
        self.counts[kind] += 1
        try:
            if kind == "make":
                self._make(store)
            elif kind == "again":
                for manifest in store.manifests()[-2:]:
                    put_again(store, list(manifest.facts["changes"]))
            elif kind == "gc":
                collect(store, plan_gc(store))
            elif kind == "check":
                check(store)
            elif kind == "copy":
                copy_checkpoints(store, self._mirror, store.manifests())
            elif kind == "copy back":
                copy_checkpoints(self._mirror, store, self._mirror.manifests()[-2:])
            elif len(ids := store.ids()) > MOST_CHECKPOINTS:
                store.remove([self._random.choice(ids)])
        except (DamagedError, RefusedError):
            self.counts["stopped by damage"] += 1
        for manifest in self._mirror.manifests()[:-MOST_CHECKPOINTS]:
            self._mirror.remove([manifest.id])

    def _make(self, store: Store) -> None:
        self._seed += 1
        manifests = store.manifests()
        parents = [m for m in manifests[-3:] if len(m.facts["changes"]) < MOST_CHANGES]
        parent = self._random.choice([None, *parents])
        try:
            pages = 20 if parent else PAGES_OF_A_ROOT
            made = make(store, self._seed, parent, pages)
        except DamagedError:
            self.counts["stored again"] += 1
            made = make(store, self._seed, None, PAGES_OF_A_ROOT)
        # What is made is whole then, but for damage that was met by no one yet.
        self.counts["made"] += 1
        assert made.id in store.ids()

    def _require_check_is_right(self, store: Store) -> set[str]:
        """The checkpoints that are lost."""
        lost = check(store).lost
        for checkpoint_id in store.ids():
            try:
                require_right(store, store.manifest(checkpoint_id))
            except VmckptError as exc:
                assert checkpoint_id in lost, f"{checkpoint_id} is lost, unsaid: {exc}"
                self.counts["lost"] += 1
            else:
                longer = "longer than its manifest" in str(lost.get(checkpoint_id))
                assert longer or checkpoint_id not in lost, f"{checkpoint_id} is whole"
                self.counts["restored"] += 1
        for manifest in self._mirror.manifests():
            require_right(self._mirror, manifest)
        return set(lost)

    def _heal(self, store: Store, lost: set[str]) -> None:
        """All contents are put once more, from memory: whatever has a name is healed."""
        manifests = store.manifests()
        made = [put_again(store, list(manifest.facts["changes"])) for manifest in manifests]
        for manifest in made:
            require_right(store, manifest)
        left = check(store).lost
        for manifest in manifests:
            if manifest.id not in left:
                self.counts["healed checkpoints"] += manifest.id in lost
                require_right(store, manifest)
                continue
            try:
                chunks = self._lost_chunks(store, manifest)
            except DamagedError as exc:
                assert any(name in exc.what for name in self._flipped), (manifest.id, exc)
                self.counts["files that no put heals"] += 1
                continue
            assert chunks, (manifest.id, left[manifest.id])
            assert chunks <= self._nameless, (manifest.id, left[manifest.id], len(chunks))
            self.counts["chunks without a name"] += len(chunks)
        # What it was healed from may go: gc heals first.
        ids = [manifest.id for manifest in made]
        store.remove([*ids, *(m.id for m in manifests[:-MOST_CHECKPOINTS])])

    def _lost_chunks(self, store: Store, manifest: Manifest) -> set[tuple[bytes, int]]:
        """Those that are nowhere: pack, slot. DamagedError: a file or a table has flipped."""
        _, maps = store.opened.files.read_all(manifest.id)
        lost = set[tuple[bytes, int]]()
        for area in maps.areas.values():
            packs = packs_of(area.refs)
            for number in np.unique(packs[packs >= 0]).tolist():
                pack = store.opened.packs.find(maps.packs[number])
                slots = np.unique(slots_of(area.refs[packs == number]))
                _, found = store.opened.elsewhere.read(pack, slots, Pack.frame)
                lost |= {(pack.id, slot) for slot in slots[~found].tolist()}
        return lost

    def _named(self, folder: str, ids: set[bytes]) -> dict[bytes, set[int]]:
        """The slots whose content or name can be read by one who knows nothing yet.

        Of the packs with these ids, or, where a record of damage may say something, of all.
        """
        if not ids and folder != "damaged":
            return {}
        with self._look() as store:
            opened = store.opened
            opened.records.refresh()
            packs = set(opened.packs.list_again())
            if folder != "damaged":
                packs &= ids
            return {
                pack_id: named(opened, opened.packs.find(pack_id))
                for pack_id in packs
                if readable(opened, pack_id)
            }


def ids_of(held: Holdings, name: str) -> list[str]:
    """The packs that an object has."""
    if name in held.bundles:
        return list(held.bundles[name].members)
    return [name] if name in held.loose else []


def touched(bundle: Bundle, at: int) -> set[str]:
    """What a flip of a bundle may damage: a pack, or, in a list of it, all, as packs that are
    missing, when the other list is damaged too.
    """
    for member in bundle.members.values():
        parts = member.parts(0, member.size)
        if any(first <= at < first + length for first, length in parts):
            return {member.name}
    ids = (name.partition("/")[2].partition("-")[0] for name in bundle.members)
    return {f"pack {pack_id} is missing" for pack_id in ids}


def named(opened: Opened, pack: Pack) -> set[int]:
    """The slots of a pack whose name is in it, in a record, or follows from what it holds."""
    found = np.zeros(pack.table.slot_count, dtype=bool)
    for hashes in (pack.stored_hashes, pack.spare_hashes):
        with suppress(DamagedError):
            if (names := hashes()) is not None:
                found |= names.any(axis=1)
    slots = np.flatnonzero(~found)
    found[slots] = opened.records.names(pack.id, slots).any(axis=1)
    for frame in range(len(pack.table.counts)):
        if not found[slots := pack.table.frame_slots(frame)].all():
            with suppress(DamagedError):
                pack.frame(frame)
                found[slots] = True
    return set(np.flatnonzero(found).tolist())


def readable(opened: Opened, pack_id: bytes) -> bool:
    """Whether a pack has a table."""
    try:
        opened.packs.find(pack_id)
    except DamagedError:
        return False
    return True


def put_again(store: Store, changes: list[list[int]]) -> Manifest:
    """All of what a checkpoint with these changes holds is put, as another one."""
    ram = state(changes)
    with store.begin("again") as new:
        area = new.area(RAM, size_bytes=ram.nbytes, chunk_bytes=PAGE_CHUNK_BYTES)
        area.put(np.arange(PAGES), ram.tobytes())
        new.blob("device-state", ram[:2].tobytes())
        return new.commit({"changes": changes})
