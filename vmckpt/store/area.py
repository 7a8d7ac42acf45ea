"""Read an area of a checkpoint: chunks in any order, or all of it at full speed."""

import threading
from collections import OrderedDict, deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vmckpt.store.backends.backend import MissingError
from vmckpt.store.damage.elsewhere import lost_chunks
from vmckpt.store.errors import DamagedError, damaged
from vmckpt.store.files.checkpoint_file import AreaMap, Maps
from vmckpt.store.files.maps import SLOT_BITS, Refs, make_refs, packs_of, slots_of
from vmckpt.store.files.pack import Numbers, Pack
from vmckpt.store.opened import Opened

# Frames kept for requests for their other chunks.
_KEPT_FRAMES = 64
# Frames read ahead of use.
_AHEAD = 8
# The most chunks in one item: a frame of identical chunks may have thousands.
_MOST_AT_ONCE = 256


class Chunks(NamedTuple):
    """Chunk numbers, and the chunks' contents in the same order."""

    numbers: Numbers
    contents: memoryview


class _FramePart(NamedTuple):
    """Chunk numbers, and their positions in a frame; no frame: the pack no longer has them."""

    frame: int | None
    numbers: Numbers
    offsets: Numbers


class FrameCache:
    """The frames used last, for all areas of a checkpoint."""

    def __init__(self) -> None:
        self._frames: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._mutex = threading.Lock()

    def get(self, pack: Pack, frame: int) -> bytes:
        """A frame's content. Raises DamagedError, MissingError."""
        key = pack.name, frame
        with self._mutex:
            found = self._frames.get(key)
            if found is not None:
                self._frames.move_to_end(key)
                return found
        found = pack.frame(frame)
        with self._mutex:
            self._frames[key] = found
            if len(self._frames) > _KEPT_FRAMES:
                self._frames.popitem(last=False)
        return found


class Area:
    """An area to read from; thread-safe.

    All content is verified: reading raises DamagedError, and never returns other bytes.
    """

    def __init__(self, opened: Opened, maps: Maps, map_: AreaMap, cache: FrameCache) -> None:
        self.size_bytes, self.chunk_bytes = map_.size_bytes, map_.chunk_bytes
        self._opened, self._pack_ids, self._refs, self._cache = opened, maps.packs, map_.refs, cache
        # The non-zero chunks in storage order, and their map words.
        self._lying: tuple[Numbers, Refs] | None = None

    @property
    def chunk_count(self) -> int:
        """The number of chunks, zeroes included; the last one may be padded with zeroes."""
        return len(self._refs)

    def numbers(self) -> Numbers:
        """The chunks that are not zero, ascending."""
        return np.flatnonzero(self._refs)

    def read(self, numbers: Numbers) -> memoryview:
        """The contents of chunks, one after the other, zeroes included.

        Raises DamagedError, IndexError.
        """
        out = np.zeros((len(numbers), self.chunk_bytes), dtype=np.uint8)
        refs = self._refs[numbers]
        packs = packs_of(refs)
        for number in np.unique(packs).tolist():
            if number >= 0:
                rows = np.flatnonzero(packs == number)
                slots = slots_of(refs[rows])
                out[rows] = self._opened.packs.use(
                    self._pack_ids[number], partial(self._gather, slots)
                )
        return out.reshape(-1).data

    def read_around(self, number: int) -> Chunks:
        """A chunk, and others that the same read yields, in storage order.

        Raises DamagedError, IndexError.
        """
        ref = self._refs[[number]]
        if not ref[0]:
            return Chunks(np.array([number]), memoryview(bytes(self.chunk_bytes)))
        pack_number = int(packs_of(ref)[0])

        def read(pack: Pack) -> Chunks:
            table = self._fitting(pack).table
            frame = table.frames(table.positions(slots_of(ref)))[0]
            first = int(table.firsts[frame])
            slots = table.slots[[first, first + int(table.counts[frame]) - 1]]
            lying, refs = self._by_position()
            if np.isin(table.frame_slots(frame), self._noted(pack)).any():
                raise damaged(f"{pack.name} is damaged", "chunks of it were noted")
            low, high = np.searchsorted(refs, make_refs(pack_number, slots + np.array([0, 1])))
            if high - low > _MOST_AT_ONCE:
                position = low + int(np.flatnonzero(lying[low:high] == number)[0])
                low = max(low, position - _MOST_AT_ONCE // 2)
                high = min(high, low + _MOST_AT_ONCE)
            offsets = table.positions(slots_of(refs[low:high])) - first
            data = self._cache.get(pack, int(frame))
            return Chunks(lying[low:high], self._pick(data, offsets))

        try:
            return self._opened.packs.use(self._pack_ids[pack_number], read)
        except DamagedError:  # another pack may have it
            return Chunks(np.array([number]), self.read(np.array([number])))

    def stream(self) -> Iterator[Chunks]:
        """Every non-zero chunk once, in storage order. Raises DamagedError."""
        waiting: deque[Future[Chunks]] = deque()
        try:
            for number in np.unique(packs_of(self._by_position()[1])).tolist():
                pack = self._fitting(self._opened.packs.find(self._pack_ids[number]))
                for part in self._frames(number, pack):
                    waiting.append(self._opened.pool.submit(self._read_frame, pack, part))
                    if len(waiting) > _AHEAD:
                        yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()

    def _frames(self, number: int, pack: Pack) -> Iterator["_FramePart"]:
        """The needed frames of a pack, and the chunks to read otherwise: those that the pack no
        longer has, or that were noted as damaged.
        """
        lying, refs = self._by_position()
        ends = np.array([number + 1, number + 2], dtype=np.uint64) << np.uint64(SLOT_BITS)
        low, high = np.searchsorted(refs, ends)
        chunks, slots = lying[low:high], slots_of(refs[low:high])
        here = pack.table.has(slots) & ~np.isin(slots, self._noted(pack))
        gone = chunks[~here]
        for at in range(0, len(gone), _MOST_AT_ONCE):
            yield _FramePart(None, gone[at : at + _MOST_AT_ONCE], gone[:0])
        chunks, positions = chunks[here], pack.table.positions(slots[here])
        frames = pack.table.frames(positions)
        starts = np.flatnonzero(np.diff(frames, prepend=-1))
        for start, end in pairwise([*starts.tolist(), len(frames)]):
            frame = int(frames[start])
            for at in range(start, end, _MOST_AT_ONCE):
                to = min(end, at + _MOST_AT_ONCE)
                yield _FramePart(frame, chunks[at:to], positions[at:to] - pack.table.firsts[frame])

    def _read_frame(self, pack: Pack, part: "_FramePart") -> Chunks:
        if part.frame is not None:
            # Rewritten meanwhile, or damaged: read it chunk by chunk, perhaps from another pack.
            with suppress(MissingError, DamagedError):
                return Chunks(part.numbers, self._pick(pack.frame(part.frame), part.offsets))
        return Chunks(part.numbers, self.read(part.numbers))

    def _gather(self, slots: Numbers, pack: Pack) -> NDArray[np.uint8]:
        """Chunks of one pack; a damaged one is read from another pack that has it."""
        out, found = self._opened.elsewhere.read(self._fitting(pack), slots, self._cache.get)
        if not found.all():
            raise lost_chunks(pack, int(np.sum(~found)))
        return out

    def _noted(self, pack: Pack) -> Numbers:
        """The slots found damaged: reading them verifies the content against its name."""
        return self._opened.records.slots(pack.id, pack.generation)

    def _fitting(self, pack: Pack) -> Pack:
        """The pack, if its chunks have the area's size: maps are data. Raises DamagedError."""
        if pack.table.chunk_bytes != self.chunk_bytes:
            raise damaged(
                f"{pack.name} does not fit a checkpoint that names it",
                f"its chunks are {pack.table.chunk_bytes} bytes, the checkpoint's "
                f"{self.chunk_bytes}",
            )
        return pack

    def _pick(self, frame: bytes, offsets: Numbers) -> memoryview:
        size, first = self.chunk_bytes, int(offsets[0])
        if int(offsets[-1]) - first == len(offsets) - 1 and np.all(np.diff(offsets) == 1):
            return memoryview(frame)[first * size : (first + len(offsets)) * size]
        chosen = np.frombuffer(frame, dtype=np.uint8).reshape(-1, size)[offsets]
        return chosen.reshape(-1).data

    def _by_position(self) -> tuple[Numbers, Refs]:
        if self._lying is None:
            numbers = np.flatnonzero(self._refs)
            refs = self._refs[numbers]
            order = np.argsort(refs, kind="stable")
            self._lying = numbers[order], refs[order]
        return self._lying
