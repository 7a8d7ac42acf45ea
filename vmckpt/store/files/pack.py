"""The format of a pack: chunks of one size in compressed frames, with a table at its end.

    header     (`header.py`, kind P)
    frames     boxes of zstd: up to FRAME_BYTES of chunks each, without gaps between
    spare      the last frame, without chunks: empty zstd, then HASH_BYTES of every slot again, also
               of those that are gone because they were damaged (packs of an older vmckpt have none,
               and that vmckpt reads this as an empty frame)
    hashes     a box: HASH_BYTES of every slot; zeroes where the slot is gone
    table      a box of zstd: for each frame the size of its box, then how many chunks it holds
               (unsigned 32 bit, little-endian), then the slots of all chunks in their order unless
               these are 0, 1, 2, ...
    trailer    a box: bytes in a chunk, frames, slots, size of the hashes' box, of the table's box,
               whether the slots are listed; unsigned 32 bit each

A chunk's address (pack, slot) is permanent: `gc` rewrites a pack without unneeded slots as the next
generation, `packs/ID-GENERATION`, and the slots keep their numbers.
"""

import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from vmckpt.store.backends.backend import (
    Backend,
    Copying,
    MissingError,
    ObjectCopy,
    ObjectWriter,
    ReadableBackend,
)
from vmckpt.store.backends.cached import read_twice
from vmckpt.store.compression import compress, unpack
from vmckpt.store.errors import DamagedError, UnreadableError, damaged
from vmckpt.store.files.decoding import decoding
from vmckpt.store.files.header import HEADER_BYTES, Header
from vmckpt.store.files.manifest import MOST_CHUNK_BYTES
from vmckpt.store.sealing.seal import HASH_BYTES, TAG_BYTES, Box, Seal, Sealer

T = TypeVar("T")
PACKS = "packs"
FRAME_BYTES = 128 << 10
# Of chunks, before compression.
MOST_BYTES = 128 << 20
# Limits: a larger pack is not valid, so that no number in it makes a reader allocate more memory.
MOST_FRAME_BYTES = 2 << 20
MOST_SLOTS = 1 << 22
LEVEL = 1
_TRAILER = struct.Struct(">IIIIII")
_TRAILER_BYTES = _TRAILER.size + TAG_BYTES
# Read at once from a pack's end: nearly always enough.
_END_BYTES = 64 << 10
# An empty zstd frame: no chunks.
_NOTHING = bytes.fromhex("28b52ffd2000010000")
# Attempts to find a pack that gc is moving.
_TRIES = 4
# Frames being compressed while others are written.
_IN_FLIGHT = 8

Numbers = NDArray[np.int64]
Hashes = NDArray[np.uint64]


def pack_name(pack_id: bytes, generation: int) -> str:
    """A pack's object name."""
    return f"{PACKS}/{pack_id.hex()}-{generation}"


@dataclass(frozen=True, slots=True)
class PackTable:
    """Where a pack's chunks are: frame `i` is `stored[i]` bytes and holds `counts[i]` chunks.

    `starts` are the frames' offsets in the file, `firsts` the position of each one's first chunk.
    `slots` are the slots by position.
    """

    chunk_bytes: int
    stored: Numbers
    counts: Numbers
    starts: Numbers
    firsts: Numbers
    slots: Numbers
    slot_count: int
    ordered: bool

    def has(self, slots: Numbers) -> NDArray[np.bool_]:
        """Which of the slots the pack has; the others are gone."""
        if self.ordered:
            return slots < len(self.slots)
        if not len(self.slots):
            return np.zeros(len(slots), dtype=bool)
        found: NDArray[np.bool_] = (
            self.slots[np.searchsorted(self.slots, slots).clip(max=len(self.slots) - 1)] == slots
        )
        return found

    def frame_slots(self, frame: int) -> Numbers:
        """The slots of the chunks in a frame."""
        first = int(self.firsts[frame])
        return self.slots[first : first + int(self.counts[frame])]

    def positions(self, slots: Numbers) -> Numbers:
        """The positions of slots, in their order. Raises DamagedError if one is gone."""
        if not self.has(slots).all():
            raise damaged("a chunk is missing", "its pack does not have its slot")
        return slots if self.ordered else np.searchsorted(self.slots, slots)

    def frames(self, positions: Numbers) -> Numbers:
        """The frames of chunks, by position."""
        return np.searchsorted(self.firsts, positions, side="right") - 1


class Pack:
    """A pack to read from. `table_from`: another object with the same table."""

    def __init__(
        self,
        backend: ReadableBackend,
        pack_id: bytes,
        generation: int,
        seal: Seal,
        table_from: ReadableBackend | None = None,
    ) -> None:
        self.id, self.generation = pack_id, generation
        self.name = pack_name(pack_id, generation)
        self._backend, self._seal = backend, seal
        self._hash_span = (0, 0)
        self.table = self._read_table(table_from or backend)

    @property
    def frame_bytes(self) -> int:
        """The size of all frames with chunks. They follow the header."""
        return int(self.table.stored[self.table.counts > 0].sum())

    def frame(self, number: int) -> bytes:
        """A frame's content: its chunks one after the other. Raises DamagedError."""
        table = self.table
        start, stored = int(table.starts[number]), int(table.stored[number])
        size = int(table.counts[number]) * table.chunk_bytes
        return unpack(self._box(Box.FRAME, number, (start, stored)), size, self.name)

    def hashes(self) -> Hashes:
        """The chunks' names by slot, two words each, from either copy. Raises DamagedError."""
        try:
            return self.stored_hashes()
        except DamagedError:
            spare = self.spare_hashes()
            if spare is None:
                raise
            found = np.zeros_like(spare)
            found[self.table.slots] = spare[self.table.slots]
            return found

    def spare_hashes(self) -> Hashes | None:
        """The second copy of the names, which includes chunks that gc could not keep.

        None: an older vmckpt's pack. Raises DamagedError.
        """
        table, number = self.table, len(self.table.counts) - 1
        if number < 0 or table.counts[number]:
            return None
        data = self._box(Box.FRAME, number, (int(table.starts[number]), int(table.stored[number])))
        return self._as_hashes(data[len(_NOTHING) :])

    def require_hashes(self) -> None:
        """Raises DamagedError unless both copies of the names can be read."""
        self.stored_hashes()
        self.spare_hashes()

    def stored_hashes(self) -> Hashes:
        """The first copy of the names. Raises DamagedError."""
        return self._as_hashes(self._box(Box.HASHES, 0, self._hash_span))

    def _as_hashes(self, data: bytes) -> Hashes:
        if len(data) != self.table.slot_count * HASH_BYTES:
            raise damaged(f"{self.name} is damaged", "its hashes do not fit its table")
        return np.frombuffer(data, dtype="<u8").reshape(-1, 2)

    def _box(self, box: Box, number: int, span: tuple[int, int]) -> bytes:
        """A box's content. Raises DamagedError if it is damaged in storage.

        It is read once more first, also from other copies of a pack that gc is merging, because gc
        gives up what is damaged.
        """
        try:
            return read_twice(
                self._backend,
                lambda: self._seal.open(box, number, self._backend.read(self.name, *span)),
            )
        except DamagedError:
            if isinstance(self._backend, Copying):
                for holder in self._backend.holders(self.name):
                    with suppress(DamagedError, MissingError):
                        data = self._backend.read_held(self.name, holder, *span)
                        return self._seal.open(box, number, data)
            raise

    def _read_table(self, backend: ReadableBackend) -> PackTable:
        end, size = backend.read_end(self.name, _END_BYTES)
        trailer = self._seal.open(Box.TRAILER, 0, end[-_TRAILER_BYTES:])
        chunk_bytes, frames, slot_count, hash_bytes, table_bytes, listed = _TRAILER.unpack(trailer)
        if (
            not 0 < chunk_bytes <= MOST_CHUNK_BYTES
            or frames > MOST_SLOTS
            or slot_count > MOST_SLOTS
            or listed > 1
        ):
            raise damaged(f"{self.name} is damaged", "its trailer has numbers that no pack has")
        tail = hash_bytes + table_bytes + _TRAILER_BYTES
        if tail > size - HEADER_BYTES:
            raise damaged(f"{self.name} is damaged", "it is shorter than its table says")
        start = size - table_bytes - _TRAILER_BYTES
        if table_bytes + _TRAILER_BYTES <= len(end):
            sealed = end[len(end) - table_bytes - _TRAILER_BYTES : len(end) - _TRAILER_BYTES]
        else:
            sealed = backend.read(self.name, start, table_bytes)
        self._hash_span = (start - hash_bytes, hash_bytes)
        most = 8 * frames + (4 * slot_count if listed else 0)
        raw = unpack(self._seal.open(Box.TABLE, 0, sealed), None, self.name, most)
        with decoding(self.name):
            numbers = np.frombuffer(raw, dtype="<u4").astype(np.int64)
        stored, counts = numbers[:frames], numbers[frames : 2 * frames]
        chunks = int(counts.sum())
        if chunks > slot_count:  # before memory is allocated for that many
            raise damaged(f"{self.name} is damaged", "its table has more chunks than slots")
        slots = numbers[2 * frames :] if listed else np.arange(chunks, dtype=np.int64)
        if (
            len(counts) != frames
            or len(slots) != chunks
            or np.any(counts * chunk_bytes > MOST_FRAME_BYTES)
            or np.any(np.diff(slots) <= 0)
            or (chunks and int(slots[-1]) >= slot_count)
            or (not listed and chunks != slot_count)
        ):
            raise damaged(f"{self.name} is damaged", "its table does not fit itself")
        ends = np.cumsum(stored) + HEADER_BYTES
        firsts = np.cumsum(counts) - counts
        if (int(ends[-1]) if frames else HEADER_BYTES) != size - tail:
            raise damaged(f"{self.name} is damaged", "it is longer or shorter than its table says")
        return PackTable(
            chunk_bytes, stored, counts, ends - stored, firsts, slots, slot_count, not listed
        )


class PackWriter:
    """Writes a pack. `pool` compresses the frames, which are written in order."""

    def __init__(
        self, packs: "Packs", pack_id: bytes, generation: int, chunk_bytes: int, pool: Executor
    ) -> None:
        self.id, self.chunk_bytes = pack_id, chunk_bytes
        self.name = pack_name(pack_id, generation)
        self.slot_count = 0
        self.stored_bytes = 0
        header = packs.header.new()
        self._seal = packs.sealer.file(header, self.name)
        self._pool = pool
        self._writer: ObjectWriter = packs.backend.write(self.name)
        self._waiting: deque[Future[bytes]] = deque()
        self._stored: list[int] = []
        self._counts: list[int] = []
        self._slots: list[Numbers] = []
        self._hashes: list[bytes] = []
        try:
            self._write(header)
        except BaseException:
            self._writer.discard()
            raise

    def add(self, frame: bytes | bytearray, hashes: bytes, slots: Numbers | None = None) -> None:
        """Add a frame of chunks, and their names. Raises StorageError.

        Without `slots` they get the next ones.
        """
        number, count = len(self._counts), len(frame) // self.chunk_bytes
        self._counts.append(count)
        if slots is None:
            self.slot_count += count
        else:
            self._slots.append(slots)
        self._hashes.append(hashes)
        self._waiting.append(self._pool.submit(_frame, self._seal, number, frame))
        while len(self._waiting) > _IN_FLIGHT:
            self._write_next()

    def publish(
        self, slot_count: int | None = None, lost: Mapping[int, bytes] = MappingProxyType({})
    ) -> None:
        """Publish it durably. Raises StorageError.

        `slot_count`: when slots were given. `lost`: names of missing chunks, which may come back.
        """
        while self._waiting:
            self._write_next()
        hashes = spare = b"".join(self._hashes)
        listed = np.zeros(0, dtype=np.int64)
        if slot_count is not None:
            self.slot_count = slot_count
            listed = np.concatenate([*self._slots, listed])
            by_slot = np.zeros((slot_count, 2), dtype="<u8")
            by_slot[listed] = np.frombuffer(hashes, dtype="<u8").reshape(-1, 2)
            hashes = by_slot.tobytes()
            for slot, name in lost.items():
                by_slot[slot] = np.frombuffer(name or bytes(HASH_BYTES), dtype="<u8")
            spare = by_slot.tobytes()
        sealed = self._seal.seal(Box.FRAME, len(self._counts), _NOTHING + spare)
        self._stored.append(len(sealed))
        self._counts.append(0)
        self._write(sealed)
        columns = [np.array(self._stored), np.array(self._counts), listed]
        table = np.concatenate(columns).astype("<u4").tobytes()
        boxes = [
            self._seal.seal(Box.HASHES, 0, hashes),
            self._seal.seal(Box.TABLE, 0, compress(table, LEVEL)),
        ]
        facts = (self.chunk_bytes, len(self._counts), self.slot_count)
        trailer = _TRAILER.pack(*facts, len(boxes[0]), len(boxes[1]), slot_count is not None)
        boxes.append(self._seal.seal(Box.TRAILER, 0, trailer))
        self._write(b"".join(boxes))
        self._writer.publish()

    def discard(self) -> None:
        """Remove it, unless it was published."""
        for future in self._waiting:
            future.cancel()
        self._waiting.clear()
        self._writer.discard()

    def _write_next(self) -> None:
        sealed = self._waiting.popleft().result()
        self._stored.append(len(sealed))
        self._write(sealed)

    def _write(self, data: bytes) -> None:
        self._writer.write(data)
        self.stored_bytes += len(data)


class Packs:
    """The packs of a store, each opened once, in its newest generation."""

    def __init__(self, backend: Backend, sealer: Sealer, header: Header) -> None:
        self.backend, self.sealer, self.header = backend, sealer, header
        self._names: dict[bytes, tuple[int, int]] = {}
        self._packs: dict[bytes, Pack] = {}
        self._mutex = threading.Lock()

    def find(self, pack_id: bytes, *, again: bool = False) -> Pack:
        """Find a pack. Raises DamagedError if it is missing or unreadable.

        `again`: the one found before is gone; list again.
        """
        with self._mutex:
            if again:
                self._packs.pop(pack_id, None)
                self._names = {}
            if pack_id in self._packs:
                return self._packs[pack_id]
            names = self._names
        # Not under the mutex: in object storage many are opened at once.
        for _ in range(_TRIES):
            try:
                found = self._open_newest(pack_id, names)
                break
            except MissingError:  # rewritten or moved since the listing
                names = {}
        else:
            raise self._missing(pack_id)
        with self._mutex:
            before = self._packs.setdefault(pack_id, found)
            if before.generation < found.generation:
                self._packs[pack_id] = found
            return self._packs[pack_id]

    def use(self, pack_id: bytes, read: Callable[[Pack], T]) -> T:
        """Apply `read` to the pack, and to its next generation if it was rewritten.

        Raises DamagedError if it is missing or unreadable, and what else `read` raises.
        """
        for attempt in range(_TRIES):
            with suppress(MissingError):
                return read(self.find(pack_id, again=attempt > 0))
        raise self._missing(pack_id)

    def _open_newest(self, pack_id: bytes, names: dict[bytes, tuple[int, int]]) -> Pack:
        if pack_id not in names:
            names = newest(self.backend)
            with self._mutex:
                self._names = names
        if pack_id not in names:
            # Its folders are listed one after the other, while gc moves it between them.
            raise MissingError(pack_id.hex())
        return self.open(pack_id, names[pack_id][0])

    def _missing(self, pack_id: bytes) -> DamagedError:
        what, backend = f"pack {pack_id.hex()} is missing", self.backend
        unread = backend.unread() if isinstance(backend, Copying) else None
        if unread is not None:
            return UnreadableError(what, why=f"{unread.what}: {unread.why}", remedy=unread.remedy)
        return damaged(what, "a checkpoint needs it")

    def list_again(self) -> dict[bytes, tuple[int, int]]:
        """Every pack's newest generation, and its size, as of now."""
        found = newest(self.backend)
        with self._mutex:
            self._names = found
            for pack_id, pack in list(self._packs.items()):
                if found.get(pack_id, (-1, 0))[0] != pack.generation:
                    del self._packs[pack_id]
        return found

    def older(self, pack: Pack) -> list[int]:
        """The existing generations before it, newest first.

        A gc that was stopped for long may have published this one without chunks that were added
        meanwhile: until the next gc only older generations have those. Raises StorageError.
        """
        numbers = [number for one, number, _ in every(self.backend) if one == pack.id]
        found = believed(numbers, self._is_merged(pack.id))
        return [number for number in found if number < pack.generation]

    def _is_merged(self, pack_id: bytes) -> Callable[[int], bool]:
        def is_merged(number: int) -> bool:
            name, backend = pack_name(pack_id, number), self.backend
            return isinstance(backend, Copying) and backend.holders(name)[:1] not in ([name], [])

        return is_merged

    def open(self, pack_id: bytes, generation: int) -> Pack:
        """Open exactly that generation. Raises DamagedError, MissingError."""
        name = pack_name(pack_id, generation)

        def read(backend: ReadableBackend) -> Pack:
            header = self.header.read(backend.read(name, 0, HEADER_BYTES), name)
            seal = self.sealer.file(header, name)
            return Pack(self.backend, pack_id, generation, seal, table_from=backend)

        try:
            return read_twice(self.backend, partial(read, self.backend))
        except DamagedError:
            # As in `Pack`: another copy of a pack that gc is merging may be intact.
            if isinstance(self.backend, Copying):
                for holder in self.backend.holders(name):
                    with suppress(DamagedError, MissingError):
                        return read(ObjectCopy(self.backend, holder))
            raise


def believed(found: Iterable[int], is_merged: Callable[[int], bool]) -> list[int]:
    """A pack's generations, newest first, without those that gc did not make.

    A merged pack had replaced its predecessors: an older generation outside a bundle came later,
    from a client that may add packs of any name.
    """
    numbers = sorted(found, reverse=True)
    last = next((at for at, number in enumerate(numbers) if is_merged(number)), len(numbers))
    return [*numbers[:last], *filter(is_merged, numbers[last:])]


def newest(backend: Backend) -> dict[bytes, tuple[int, int]]:
    """Every pack's newest generation, and its size."""
    found: dict[bytes, tuple[int, int]] = {}
    for pack_id, generation, size in every(backend):
        if pack_id not in found or found[pack_id][0] < generation:
            found[pack_id] = generation, size
    return found


def every(backend: Backend) -> Iterator[tuple[bytes, int, int]]:
    """All packs: ids, generations, sizes."""
    for name, size in backend.names(PACKS).items():
        if parsed := parsed_name(f"{PACKS}/{name}"):
            yield *parsed, size


def parsed_name(name: str) -> tuple[bytes, int] | None:
    """The id and generation in a pack's object name; None: not a pack."""
    pack_id, _, generation = name.removeprefix(f"{PACKS}/").partition("-")
    try:
        parsed = bytes.fromhex(pack_id), int(generation)
    except ValueError:
        return None
    return parsed if pack_name(*parsed) == name else None


def _frame(seal: Seal, number: int, frame: bytes | bytearray) -> bytes:
    return seal.seal(Box.FRAME, number, compress(frame, LEVEL))
