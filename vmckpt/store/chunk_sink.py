"""Deduplicate chunks of one size: those new to the store go into packs, once each."""

import os

import numpy as np
from numpy.typing import NDArray

from vmckpt.store.files.maps import Refs, make_refs
from vmckpt.store.files.pack import FRAME_BYTES, MOST_BYTES, PackWriter
from vmckpt.store.index import Index
from vmckpt.store.opened import Opened
from vmckpt.store.sealing.seal import HASH_BYTES


class ChunkSink:
    """The packs that one checkpoint adds for one chunk size.

    `packs` is the checkpoint's list of packs, extended by those that are used. `published` is the
    checkpoint's list of objects that may be in the store already: an exported file can take them
    back only in this order.
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
        # The map words of chunks that this checkpoint added.
        self._new: dict[bytes, int] = {}
        self._frame, self._hashes = bytearray(), bytearray()
        self._writer: PackWriter | None = None
        self._full: list[PackWriter] = []
        self._slot = 0
        self._published = published

    @property
    def stored_bytes(self) -> int:
        """The size of its packs written so far."""
        return sum(writer.stored_bytes for writer in self._writers())

    @property
    def new_chunks(self) -> int:
        """How many chunks were new to the store."""
        return len(self._new)

    def take(self, contents: memoryview) -> Refs:
        """The map words of chunks, none of them zero, in order. Raises StorageError."""
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
        """Which of the chunks would be stored if they were taken now."""
        names = self._opened.sealer.hashes(contents, self._chunk_bytes)
        packs, _ = self._index.find(np.frombuffer(names, dtype="<u8").reshape(-1, 2))
        missing = packs < 0
        for i in np.flatnonzero(missing).tolist():
            missing[i] = names[HASH_BYTES * i : HASH_BYTES * (i + 1)] not in self._new
        return missing

    def publish(self) -> None:
        """Publish the packs durably. Raises StorageError."""
        self._end_frame()
        if self._writer is not None:
            self._publish(self._writer)

    def discard(self) -> None:
        """Remove all that was not published."""
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
                # Publish full packs at once: a checkpoint may exceed the space for temporary files.
                full, self._writer = self._writer, None
                self._full.append(full)
                self._publish(full)
        return word

    def _publish(self, writer: PackWriter) -> None:
        self._published.append(writer.name)  # before it exists
        writer.publish()

    def _begin_pack(self) -> PackWriter:
        opened, self._slot = self._opened, 0
        return PackWriter(opened.packs, os.urandom(16), 0, self._chunk_bytes, opened.pool)

    def _end_frame(self) -> None:
        if self._writer is not None and self._frame:
            self._writer.add(self._frame, bytes(self._hashes))
            self._frame, self._hashes = bytearray(), bytearray()
