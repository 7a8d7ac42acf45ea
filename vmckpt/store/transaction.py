"""A transaction: a checkpoint that exists completely from `commit` on, or not at all."""

import json
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from vmckpt.errors import (
    OperationFailedError,
    OutcomeUnknownError,
    RefusedError,
    StorageError,
    UsageError,
    VmckptError,
)
from vmckpt.store.backends.backend import Buffer
from vmckpt.store.chunk_sink import ChunkSink
from vmckpt.store.damage.records import DamageRecords
from vmckpt.store.errors import DamagedError, damaged
from vmckpt.store.files import doomed
from vmckpt.store.files.checkpoint_file import (
    CHECKPOINTS,
    MAPS,
    AreaMap,
    Maps,
    base_refs,
    encode_maps,
)
from vmckpt.store.files.manifest import AreaFacts, Manifest
from vmckpt.store.files.maps import make_refs, packs_of, slots_of
from vmckpt.store.files.naming import Settled
from vmckpt.store.files.pack import Numbers, pack_name
from vmckpt.store.files.pins import PINS, Pin, write_pin
from vmckpt.store.index import Index
from vmckpt.store.opened import Opened

# The lock that writers share and gc holds exclusively; and how long to wait for it, or for another
# one that is held briefly.
WRITERS, PATIENCE_S = "writers", 60.0
# Processed at once: it fits the processor's cache.
_BATCH_BYTES = 1 << 20
# A smaller difference to the base does not justify a new base.
_SMALL_MAP_BYTES = 2048


class Origin(NamedTuple):
    """The identity of a checkpoint. A copy keeps the original's."""

    id: str
    vm: str
    parent: str | None
    created_unix_s: float | None
    vm_id: str | None = None
    sequence: int | None = None


def new_id() -> str:
    """A new checkpoint id."""
    return secrets.token_hex(16)


def new_origin(vm: str, parent: str | None) -> Origin:
    """The identity of a new checkpoint."""
    return Origin(new_id(), vm, parent, None)


class Transaction:
    """Made by `Store.begin`; for one thread at a time.

    `start` are the parent's maps. `locks` are released at the end; `require_locks` raises if they
    were lost before. `settled` is its name, and the locked checkpoints that it replaces.
    """

    def __init__(
        self,
        opened: Opened,
        index: Index,
        origin: Origin,
        start: Maps,
        locks: tuple[ExitStack, Callable[[], None]],
        *,
        settled: Settled,
    ) -> None:
        self.id, self.name = origin.id, settled.name
        self.replaced: list[str] = []
        self.not_replaced: VmckptError | None = None
        self._replaces = settled.replaces
        self._opened, self._index, self._origin, self._start = opened, index, origin, start
        self._locks, self._require_locks = locks
        self._packs = list(start.packs)
        self._sinks: dict[int, ChunkSink] = {}
        self._areas: dict[str, AreaWriter] = {}
        self._file = opened.files.new_checkpoint(origin.id)
        # Names of objects that may be in the store already, in the order of their creation.
        self._published: list[str] = []
        self._over = self._committed = False

    @property
    def is_committed(self) -> bool:
        """Whether the checkpoint is in the store."""
        return self._committed

    def area(self, name: str, *, size_bytes: int, chunk_bytes: int) -> "AreaWriter":
        """An area of the checkpoint: it starts as the parent's area of that name, else as zeroes.

        RAM in PAGE_CHUNK_BYTES, disks in BLOCK_CHUNK_BYTES. An area that is not requested is not in
        the checkpoint. Raises UsageError if the name is in use.
        """
        self._require_unused(name)
        before = base_refs(self._start, name, chunk_bytes, -(-size_bytes // chunk_bytes))
        if chunk_bytes not in self._sinks:
            self._sinks[chunk_bytes] = ChunkSink(
                self._opened, self._index, self._packs, chunk_bytes, self._published
            )
        map_ = AreaMap(size_bytes, chunk_bytes, before)
        self._areas[name] = AreaWriter(map_, self._sinks[chunk_bytes])
        return self._areas[name]

    def blob(self, name: str, data: bytes) -> None:
        """A small item, stored whole. Raises UsageError if the name is in use."""
        self._require_unused(name)
        self._file.add_blob(name, data)

    def commit(
        self,
        facts: Mapping[str, Any],
        *,
        created_unix_s: float | None = None,
        pins: Iterable[Pin] = (),
    ) -> Manifest:
        """Commit the checkpoint durably.

        `facts`: JSON. `created_unix_s`: its point in time, else now. `pins`: those that it has from
        the start. Afterwards the checkpoints that it replaces are removed: `replaced`;
        `not_replaced` says why one was not. Raises StorageError, OperationFailedError, BusyError:
        it is not in the store; ThereAlreadyError: another writer stored it; OutcomeUnknownError: it
        may be in the store.
        """
        if self._over:
            raise ValueError("the checkpoint was committed or aborted")
        # Fails before anything is written.
        facts = json.loads(json.dumps(facts, allow_nan=False))
        when_s = self._origin.created_unix_s or created_unix_s or time.time()
        try:
            for pin in pins:
                self._published.append(pin.name)
                write_pin(self._opened, pin)
            manifest = self._commit(facts, when_s, self._published)
        except BaseException:
            self._end()
            raise
        self._over = self._committed = True
        with self._locks:
            self._replace()
        return manifest

    def _replace(self) -> None:
        """Remove what the committed checkpoint replaces. A failure does not fail the commit."""
        try:
            gone = doomed.remove_checkpoints(self._opened, self._replaces, self._require_locks)
            for old in gone:
                self.replaced.append(old)
        except (StorageError, RefusedError, OperationFailedError) as exc:
            self.not_replaced = exc

    def abort(self) -> None:
        """Remove it without a trace. After `commit` it does nothing."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()

    def _commit(self, facts: Mapping[str, Any], when_s: float, published: list[str]) -> Manifest:
        for sink in self._sinks.values():
            sink.publish()
        added = sum(sink.stored_bytes for sink in self._sinks.values())
        maps, encoded, base_bytes = self._maps(published)
        blobs = tuple(self._file.blobs)
        manifest = Manifest(
            id=self.id,
            vm=self._origin.vm,
            parent=self._origin.parent,
            created_unix_s=when_s,
            added_bytes=added + base_bytes + len(encoded) + sum(b.stored_bytes for b in blobs),
            areas=tuple(area.facts(name) for name, area in self._areas.items()),
            blobs=blobs,
            packs=tuple(pack.hex() for pack in used_packs(maps)),
            facts=facts,
            vm_id=self._origin.vm_id,
            sequence=self._origin.sequence,
        )
        # A checkpoint that could not be read back must not be written.
        Manifest.decode(self.id, manifest.encode())
        self._require_locks()
        published.append(self._file.name)
        self._file.write(manifest, encoded)
        self._require_complete(manifest, maps, published)
        try:
            # After checking what is stored: a lock lost before that would have allowed its removal.
            self._require_locks()
        except OperationFailedError:
            if self.name:  # another writer may have taken the name since
                raise
            # Others may rely on a copy that they have seen: it stays if this check succeeds.
            with self._opened.backend.hold(WRITERS, shared=True, wait_s=PATIENCE_S) as lock:
                self._require_complete(manifest, maps, published)
                lock.require()
        return manifest

    def _require_complete(self, manifest: Manifest, maps: Maps, published: list[str]) -> None:
        """Raises DamagedError, OperationFailedError unless the store still has all that the new
        checkpoint needs, and no gc is about to remove any of it (`store/files/doomed.py`).
        """
        backend = self._opened.backend
        # Before listing the store: a gc that has removed objects may have ended by then.
        doomed_now = doomed.names(backend)
        there = self._opened.packs.list_again()
        self._opened.records.refresh()
        lost = [pack_id for pack_id in used_packs(maps) if pack_id not in there]
        bases = self._opened.backend.names(MAPS) if maps.base is not None else {}
        if lost or (maps.base is not None and maps.base.hex() not in bases):
            raise damaged(
                f"checkpoint {manifest.id} was not made",
                f"{len(lost)} of its packs, or its maps, were removed from the store meanwhile",
            )
        generations = {pack_id: generation for pack_id, (generation, _) in there.items()}
        if bad := damaged_chunks(maps, generations, self._opened.records):
            raise damaged(
                f"checkpoint {manifest.id} was not made",
                f"{bad} chunks that it builds on were found to be damaged meanwhile",
            )
        self._require_slots(maps, there)
        packs = {pack_name(pack_id, there[pack_id][0]) for pack_id in used_packs(maps)}
        # A pack that gc is merging is in several objects, not all of which are removed.
        held = backend.list_holdings()
        going = [pack for pack in packs if doomed_now.issuperset(held.holders(pack))]
        needed = {self._opened.files.base_name(maps.base)} if maps.base is not None else set()
        pins = {name for name in published if name.startswith(f"{PINS}/")}
        lost_pins = {name.partition("/")[2] for name in pins} - (
            backend.names(PINS) if pins else {}
        ).keys()
        if going or lost_pins or (needed | pins) & doomed_now:
            raise self._collected()

    def _require_slots(self, maps: Maps, there: Mapping[bytes, tuple[int, int]]) -> None:
        """Raises OperationFailedError if gc has rewritten a pack without slots that the new
        checkpoint needs: locks were lost, here or there.
        """
        for number, pack_id in enumerate(maps.packs):
            known = self._index.generations.get(pack_id, 0)
            if there.get(pack_id, (known, 0))[0] == known:
                continue
            refs = [area.refs[packs_of(area.refs) == number] for area in maps.areas.values()]
            slots = slots_of(np.unique(np.concatenate([*refs, np.zeros(0, dtype=np.uint64)])))
            if not len(slots):
                continue
            try:
                self._opened.packs.find(pack_id).table.positions(slots)
            except DamagedError as exc:
                raise self._collected() from exc

    def _collected(self) -> OperationFailedError:
        return OperationFailedError(
            f"checkpoint {self.id} was not made",
            why="gc removes content that it was about to share: a lock in the store was lost, here "
            "or at gc",
            remedy="run this again",
        )

    def _maps(self, published: list[str]) -> tuple[Maps, bytes, int]:
        """The maps, their encoding, and the size of a base that was written for them.

        They use the parent's base unless the difference has become too large.
        """
        maps = Maps(self._start.base, self._packs, {n: a.map for n, a in self._areas.items()})
        files = self._opened.files
        if maps.base is not None:
            encoded = encode_maps(maps, files.read_base(maps.base))
            if len(encoded) <= _SMALL_MAP_BYTES:
                return maps, encoded, 0
        maps = _renumbered(maps)
        whole = encode_maps(maps, None)
        if self._start.base is not None and len(encoded) <= len(whole) // 2:
            return maps, encoded, 0
        maps.base = os.urandom(16)
        published.append(files.base_name(maps.base))
        size = files.write_base(maps.base, whole)
        return maps, encode_maps(maps, maps), size

    def _require_unused(self, name: str) -> None:
        if name in self._areas or name in {blob.name for blob in self._file.blobs}:
            raise UsageError(
                f"the checkpoint has a part '{name}' already",
                why="parts are known by their names",
                remedy="choose another name",
            )

    def _end(self) -> None:
        if self._over:
            return
        self._over = True
        with self._locks:
            for sink in self._sinks.values():
                sink.discard()
            if self._file.name in self._published:
                self._take_back()
                return
            for name in reversed(self._published):
                try:
                    self._opened.backend.remove(name)
                except RefusedError:  # an append-only client: left for the owner's gc
                    return

    def _take_back(self) -> None:
        """Remove the checkpoint after it may have existed; only it, and never another writer's.

        Another writer may have reused its packs and maps meanwhile: they are left to gc, which
        knows what is needed. Raises OutcomeUnknownError if it cannot be removed.
        """
        backend = self._opened.backend
        try:
            if self._file.is_there():
                backend.remove(self._file.name)
        except RefusedError as exc:
            raise OutcomeUnknownError(
                f"checkpoint {self.id} may be in the store, and be incomplete",
                why=f"making it failed, and {exc.why}",
                remedy="`vmckpt store check` says whether it can be restored; the store's owner "
                "can remove it",
            ) from exc
        except StorageError as exc:
            with suppress(StorageError):
                if self.id not in backend.names(CHECKPOINTS):
                    return
            raise OutcomeUnknownError(
                f"whether checkpoint {self.id} is in the store is not known",
                why=f"writing it failed, and so did removing it: {exc.why}",
                remedy="see `vmckpt checkpoint list` once the store answers; if it is listed, "
                "`vmckpt store check` says whether it is complete",
            ) from exc


class AreaWriter:
    """Writes an area's content."""

    def __init__(self, map_: AreaMap, sink: ChunkSink) -> None:
        self.map, self._sink = map_, sink
        self._given = self._new = 0

    def put(self, numbers: Numbers, data: Buffer) -> None:
        """Put chunks by number, with their contents in the same order. The later one wins.

        Raises ValueError (lengths do not match, or the area has no such chunks), StorageError.
        """
        size = self.map.chunk_bytes
        view = memoryview(data).cast("B")
        if len(view) != len(numbers) * size or (
            len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < len(self.map.refs)
        ):
            raise ValueError(f"{len(numbers)} chunks of {size} bytes, and {len(view)} bytes")
        step = _BATCH_BYTES // size
        for at in range(0, len(numbers), step):
            self._put(numbers[at : at + step], view[at * size : (at + step) * size])

    def lacks(self, data: Buffer) -> NDArray[np.bool_]:
        """Which of these chunks `put` would write: those new to the store. Zeroes never are."""
        view, size = memoryview(data).cast("B"), self.map.chunk_bytes
        found = np.zeros(len(view) // size, bool)
        step = _BATCH_BYTES // size
        for at in range(0, len(found), step):
            part = view[at * size : (at + step) * size]
            words = np.frombuffer(part, dtype=np.uint64).reshape(len(part) // size, -1)
            full = np.bitwise_or.reduce(words, axis=1) != 0
            found[at : at + step] = full & self._sink.lacks(part)
        return found

    def put_file(self, fd: int, spans: Iterable[tuple[int, int]]) -> None:
        """Put an area from a file of the same shape: byte ranges of whole chunks, or up to its end.

        Holes are zeroes. Raises OSError (the file), StorageError (the store), ValueError.
        """
        size = self.map.chunk_bytes
        buffer = bytearray(_BATCH_BYTES)
        for start, end in spans:
            if start % size or (end % size and end != self.map.size_bytes):
                raise ValueError(f"the span {start}-{end} is not of whole chunks")
            for at in range(start, end, len(buffer)):
                wanted = min(len(buffer), end - at)
                got = os.preadv(fd, [memoryview(buffer)[:wanted]], at)
                while 0 < got < wanted:
                    more = os.preadv(fd, [memoryview(buffer)[got:wanted]], at + got)
                    if not more:
                        break
                    got += more
                chunks = -(-wanted // size)
                buffer[got : chunks * size] = bytes(chunks * size - got)
                numbers = np.arange(at // size, at // size + chunks)
                self.put(numbers, memoryview(buffer)[: chunks * size])

    def put_zero(self, numbers: Numbers) -> None:
        """Chunks that hold zeroes."""
        self.map.refs[numbers] = 0
        self._given += len(numbers)

    def facts(self, name: str) -> AreaFacts:
        """Its entry in the catalogue."""
        present = int(np.count_nonzero(self.map.refs))
        map_ = self.map
        return AreaFacts(name, map_.size_bytes, map_.chunk_bytes, present, self._given, self._new)

    def _put(self, numbers: Numbers, data: memoryview) -> None:
        before = self._sink.new_chunks
        words = np.frombuffer(data, dtype=np.uint64).reshape(len(numbers), -1)
        full = np.bitwise_or.reduce(words, axis=1) != 0
        refs = np.zeros(len(numbers), dtype=np.uint64)
        if full.all():
            refs = self._sink.take(data)
        elif full.any():
            refs[full] = self._sink.take(words[full].reshape(-1).data.cast("B"))
        self.map.refs[numbers] = refs
        self._given += len(numbers)
        self._new += self._sink.new_chunks - before


def used_packs(maps: Maps) -> list[bytes]:
    """The packs that the maps use, in the order of their list."""
    used = [np.unique(packs_of(area.refs)) for area in maps.areas.values()]
    numbers = np.unique(np.concatenate([*used, np.zeros(0, dtype=np.int64)]))
    return [maps.packs[number] for number in numbers if number >= 0]


def damaged_chunks(maps: Maps, generations: Mapping[bytes, int], records: DamageRecords) -> int:
    """How many chunks of the areas are known to be damaged, in packs of these generations."""
    total = 0
    for number, pack_id in enumerate(maps.packs):
        bad = records.slots(pack_id, generations.get(pack_id, -1))
        if len(bad):
            bad_refs = make_refs(number, bad)
            total += sum(int(np.isin(area.refs, bad_refs).sum()) for area in maps.areas.values())
    return total


def _renumbered(maps: Maps) -> Maps:
    """The same maps with a list of only the used packs."""
    packs = used_packs(maps)
    numbers = {pack: number for number, pack in enumerate(packs, start=1)}
    table = np.array([0] + [numbers.get(pack, 0) for pack in maps.packs], dtype=np.uint64)
    areas = {}
    for name, area in maps.areas.items():
        upper = table[packs_of(area.refs) + 1] << np.uint64(32)
        refs = upper | (area.refs & np.uint64(0xFFFFFFFF))
        areas[name] = AreaMap(area.size_bytes, area.chunk_bytes, refs)
    return Maps(maps.base, packs, areas)
