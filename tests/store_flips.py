"""Bits that flip in a store between what is done to it, and what has to hold whatever flips.

A round: bits flip, and between them writers, gc, copies and removals work. Then what `check` calls
whole is restored bit by bit, and what it calls lost is refused. Then all contents are put once
more: whatever can be healed is healed by that. What is left is removed, and the store is whole.
"""

import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from tests.guest_like import RAM
from tests.store_work import PAGES, make, require_right, state
from vmckpt.errors import RefusedError, VmckptError
from vmckpt.store.backends.backend import Backend
from vmckpt.store.check import check
from vmckpt.store.collect import collect, plan_gc
from vmckpt.store.copying import copy_checkpoints
from vmckpt.store.damage.repair import plan_repair, repair
from vmckpt.store.errors import DamagedError
from vmckpt.store.manifest import PAGE_CHUNK_BYTES, Manifest
from vmckpt.store.maps import packs_of, slots_of
from vmckpt.store.store import Store

# Few show what is still restored beside damage, many what is left of much of it.
FLIPS_A_ROUND = (1, 1, 2, 3, 5, 8, 10)
AT_ONCE = 3
LEAST_CHECKPOINTS = 3
MOST_CHANGES = 8
PAGES_OF_A_ROOT = 120
FOLDERS = ("packs", "packs", "packs", "checkpoints", "maps", "damaged")
MOST_CHECKPOINTS = 6

Put = Callable[[str, bytes], None]


class Flipping:
    """A store whose bits flip, and a mirror where they do not. `reopen` opens the store anew.

    `put` replaces an object of the store by other bytes.
    """

    def __init__(self, reopen: Callable[[], Store], mirror: Store, put: Put, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self._reopen, self._mirror, self._put = reopen, mirror, put
        self._random = random.Random(seed)
        self._seed = seed * 1_000_000

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

    def _flip(self, backend: Backend) -> None:
        """One bit, of a frame most often; else anywhere, or where the formats' own bytes are."""
        folder = self._random.choice(FOLDERS)
        names = sorted(backend.names(folder))
        if not names and not (names := sorted(backend.names(folder := "packs"))):
            return  # gc has removed all: what was removed was all that there was
        name = f"{folder}/{self._random.choice(names)}"
        data = bytearray(backend.read(name))
        at = self._random.randrange(len(data))
        if self._random.random() < 0.2:
            at = self._random.choice([at % 200, len(data) - 1 - at % 200]) % len(data)
        data[at] ^= 1 << self._random.randrange(8)
        self._put(name, bytes(data))
        self.counts["flips"] += 1
        self.counts[f"flips in {folder}"] += 1

    def _work(self, store: Store) -> None:
        """Something that is done to a store. That damage stops it is right; wrong bytes are not."""
        kind = self._random.choice(["make", "make", "gc", "copy", "copy back", "remove"])
        self.counts[kind] += 1
        try:
            if kind == "make":
                self._make(store)
            elif kind == "gc":
                collect(store, plan_gc(store))
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
            self.counts["stored anew"] += 1
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
            if manifest.id in lost and can_heal(store, manifest):
                self.counts["healed checkpoints"] += 1
                assert manifest.id not in left, (manifest.id, left[manifest.id])
                require_right(store, manifest)
        # What it was healed from may go: gc heals first.
        ids = [manifest.id for manifest in made]
        store.remove([*ids, *(m.id for m in manifests[:-MOST_CHECKPOINTS])])


def put_again(store: Store, changes: list[list[int]]) -> Manifest:
    """All of what a checkpoint with these changes holds is put, as another one."""
    ram = state(changes)
    with store.begin("again") as new:
        area = new.area(RAM, size_bytes=ram.nbytes, chunk_bytes=PAGE_CHUNK_BYTES)
        area.put(np.arange(PAGES), ram.tobytes())
        new.blob("device-state", ram[:2].tobytes())
        return new.commit({"changes": changes})


def can_heal(store: Store, manifest: Manifest) -> bool:
    """Whether only chunks of a checkpoint are damaged, and the names of all of them are known.

    Those of chunks that gc could not write anew are in a record, which may be damaged in its turn.
    """
    with suppress(VmckptError):
        _, maps = store.opened.files.read_all(manifest.id)
        for area in maps.areas.values():
            packs = packs_of(area.refs)
            for number in np.unique(packs[packs >= 0]).tolist():
                pack = store.opened.packs.find(maps.packs[number])
                pack.hashes()
                slots = slots_of(area.refs[packs == number])
                if not store.opened.elsewhere.names(pack, slots).any(axis=1).all():
                    return False
        return True
    return False
