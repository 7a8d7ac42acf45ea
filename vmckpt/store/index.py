"""Which chunks the store has, by name."""

from collections.abc import Iterable

import numpy as np

from vmckpt.store.pack import Hashes, Numbers, Pack


class Index:
    """The chunks of some packs, to be looked up by the thousand.

    Packs are known by their number, in the order in which they were added.
    """

    def __init__(self) -> None:
        self.packs: list[bytes] = []
        self.generations: dict[bytes, int] = {}
        self._first = np.zeros(0, dtype=np.uint64)
        self._second = np.zeros(0, dtype=np.uint64)
        self._places = np.zeros(0, dtype=np.int64)

    def add(self, packs: Iterable[Pack]) -> None:
        """Packs that were not added yet. Raises DamagedError."""
        firsts, seconds, places = [self._first], [self._second], [self._places]
        for pack in packs:
            hashes = pack.hashes()
            there = np.flatnonzero(hashes.any(axis=1))
            firsts.append(hashes[there, 0])
            seconds.append(hashes[there, 1])
            places.append(there + (len(self.packs) << 32))
            self.packs.append(pack.id)
            self.generations[pack.id] = pack.header.generation
        if len(firsts) == 1:
            return
        first = np.concatenate(firsts)
        # What was there is in order: that order is used.
        order = np.argsort(first, kind="stable")
        self._first = first[order]
        self._second = np.concatenate(seconds)[order]
        self._places = np.concatenate(places)[order]

    def find(self, hashes: Hashes) -> tuple[Numbers, Numbers]:
        """The packs' numbers (-1: no pack has it) and slots of chunks with these names.

        Of two with the same first half it may find none: then one of them is stored once more.
        """
        if not len(self._first):
            return np.full(len(hashes), -1), np.zeros(len(hashes), dtype=np.int64)
        at = np.searchsorted(self._first, hashes[:, 0]).clip(max=len(self._first) - 1)
        same = (self._first[at] == hashes[:, 0]) & (self._second[at] == hashes[:, 1])
        places = self._places[at]
        return np.where(same, places >> 32, -1), places & 0xFFFFFFFF
