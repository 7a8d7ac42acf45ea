"""Takes chunks of one size: those that the store has not go into packs, once each."""

import os

import numpy as np
from numpy.typing import NDArray

from vmckpt.store.files.maps import Refs, make_refs
from vmckpt.store.files.pack import FRAME_BYTES, MOST_BYTES, PackWriter
from vmckpt.store.index import Index
from vmckpt.store.opened import Opened
from vmckpt.store.sealing.seal import HASH_BYTES


class ChunkSink:
    """The packs that one checkpoint adds for one size of chunks.

    `packs` is the checkpoint's list of packs: those that are used are added to it. `published` is
    the checkpoint's list of the objects that may be in the store already: in an exported file they
    are taken back in no other order.
    """

    def __init__(
        self,
        opened: Opened,
        index: Index,
        packs: list[bytes],
        chunk_bytes: int,
        published: list[str],
    ) -> None:
        self._opened, self._index, self._packs = opened, index, packs
        self._chunk_bytes = chunk_bytes
        self._numbers = {pack: number for number, pack in enumerate(packs)}
        # Words of chunks that this checkpoint brought.
        self._new: dict[bytes, int] = {}
        self._frame, self._hashes = bytearray(), bytearray()
        self._writer: PackWriter | None = None
        self._full: list[PackWriter] = []
        self._slot = 0
        self._published = published

    @property
    def stored_bytes(self) -> int:
        """The size of its packs, so far as they are written."""
        return sum(writer.stored_bytes for writer in self._writers())

    @property
    def new_chunks(self) -> int:
        """How many chunks were new to the store."""
        return len(self._new)

    def take(self, contents: memoryview) -> Refs:
        """The words for chunks, none of them zero, one after the other. Raises StorageError."""
        size = self._chunk_bytes
        names = self._opened.sealer.hashes(contents, size)
        packs, slots = self._index.find(np.frombuffer(names, dtype="<u8").reshape(-1, 2))
        refs = np.zeros(len(packs), dtype=np.uint64)
        for pack in np.unique(packs):
            if pack >= 0:
                chosen = packs == pack
                refs[chosen] = make_refs(self._number(self._index.packs[pack]), slots[chosen])
        for i in np.flatnonzero(packs < 0).tolist():
            name = names[HASH_BYTES * i : HASH_BYTES * (i + 1)]
            word = self._new.get(name)
            if word is None:
                word = self._add(name, contents[size * i : size * (i + 1)])
            refs[i] = word
        return refs

    def lacks(self, contents: memoryview) -> NDArray[np.bool_]:
        """Which of the chunks would be stored, were they taken now."""
        names = self._opened.sealer.hashes(contents, self._chunk_bytes)
        packs, _ = self._index.find(np.frombuffer(names, dtype="<u8").reshape(-1, 2))
        missing = packs < 0
        for i in np.flatnonzero(missing).tolist():
            missing[i] = names[HASH_BYTES * i : HASH_BYTES * (i + 1)] not in self._new
        return missing

    def publish(self) -> None:
        """The packs are there when this returns. Raises StorageError."""
        self._end_frame()
        if self._writer is not None:
            self._publish(self._writer)

    def discard(self) -> None:
        """Nothing stays but what was published."""
        for writer in self._writers():
            writer.discard()

    def _writers(self) -> list[PackWriter]:
        return [*self._full, *([self._writer] if self._writer else [])]

    def _number(self, pack: bytes) -> int:
        if pack not in self._numbers:
            self._numbers[pack] = len(self._packs)
            self._packs.append(pack)
        return self._numbers[pack]

    def _add(self, name: bytes, chunk: memoryview) -> int:
        if self._writer is None:
            self._writer = self._begin_pack()
        word = (self._number(self._writer.id) + 1 << 32) | self._slot
        self._new[name] = word
        self._slot += 1
        self._frame += chunk
        self._hashes += name
        if len(self._frame) >= FRAME_BYTES:
            self._end_frame()
            if self._slot * self._chunk_bytes >= MOST_BYTES:
                # What is full is not kept aside: a checkpoint may be larger than the room there.
                full, self._writer = self._writer, None
                self._full.append(full)
                self._publish(full)
        return word

    def _publish(self, writer: PackWriter) -> None:
        self._published.append(writer.name)  # before it is there
        writer.publish()

    def _begin_pack(self) -> PackWriter:
        opened, self._slot = self._opened, 0
        return PackWriter(opened.packs, os.urandom(16), 0, self._chunk_bytes, opened.pool)

    def _end_frame(self) -> None:
        if self._writer is not None and self._frame:
            self._writer.add(self._frame, bytes(self._hashes))
            self._frame, self._hashes = bytearray(), bytearray()
