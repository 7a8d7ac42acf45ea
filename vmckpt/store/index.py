"""Which chunks the store has, by name."""

from collections.abc import Callable, Iterable

import numpy as np

from vmckpt.store.backends.backend import MissingError
from vmckpt.store.errors import DamagedError
from vmckpt.store.files.pack import Hashes, Numbers, Pack


class Index:
    """The chunks of some packs, for bulk lookups. Immutable.

    Packs are identified by their number in `packs`.
    """

    def __init__(self) -> None:
        self.packs: tuple[bytes, ...] = ()
        self.generations: dict[bytes, int] = {}
        self._first = np.zeros(0, dtype=np.uint64)
        self._second = np.zeros(0, dtype=np.uint64)
        self._locations = np.zeros(0, dtype=np.int64)

    def grown(self, packs: Iterable[Pack], damaged: Callable[[bytes, int], Numbers]) -> "Index":
        """A new index that includes these packs, except damaged slots, which nothing should reuse.

        `damaged`: the known damaged slots of a pack's generation.
        """
        firsts, seconds, locations = [self._first], [self._second], [self._locations]
        new = Index()
        new.packs, new.generations = self.packs, dict(self.generations)
        for pack in packs:
            try:
                hashes = pack.hashes()
            except (DamagedError, MissingError):
                continue
            there = np.flatnonzero(hashes.any(axis=1))
            bad = damaged(pack.id, pack.generation)
            if len(bad):
                there = np.setdiff1d(there, bad, assume_unique=True)
            firsts.append(hashes[there, 0])
            seconds.append(hashes[there, 1])
            locations.append(there + (len(new.packs) << 32))
            new.packs += (pack.id,)
            new.generations[pack.id] = pack.generation
        if len(firsts) == 1:
            return self
        first = np.concatenate(firsts)
        # The existing entries are sorted: use that.
        order = np.argsort(first, kind="stable")
        new._first = first[order]
        new._second = np.concatenate(seconds)[order]
        new._locations = np.concatenate(locations)[order]
        return new

    def find(self, hashes: Hashes) -> tuple[Numbers, Numbers]:
        """The pack numbers (-1: in no pack) and slots of chunks with these names.

        Of two names with the same first half it may find none: then one chunk is stored again.
        """
        if not len(self._first):
            return np.full(len(hashes), -1), np.zeros(len(hashes), dtype=np.int64)
        at = np.searchsorted(self._first, hashes[:, 0]).clip(max=len(self._first) - 1)
        same = (self._first[at] == hashes[:, 0]) & (self._second[at] == hashes[:, 1])
        locations = self._locations[at]
        return np.where(same, locations >> 32, -1), locations & 0xFFFFFFFF
