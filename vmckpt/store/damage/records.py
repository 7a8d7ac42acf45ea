"""The store's records of damaged chunks: damaged/ID.

    header     (`store/files/header.py`, kind D)
    record     a box of zstd: JSON, a list of [pack, generation, slots, names]; names are
               hexadecimal, or empty if unknown

A reader of a damaged frame adds an object; objects never change, so any number of processes may do
so at once, without a lock. A record is about one generation of a pack: once `gc` has rewritten the
pack, its records are obsolete and are removed.

Records are hints: new checkpoints do not reuse the chunks that they name, and `gc` heals these.
Reading does not trust them: a chunk that can be read, and matches its name, is returned.
"""

import json
import threading
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from secrets import token_hex
from typing import Any, NamedTuple

import numpy as np

from vmckpt.errors import VmckptError
from vmckpt.store.backends.backend import Backend, MissingError
from vmckpt.store.compression import compress, unpack
from vmckpt.store.errors import DamagedError, UnreadableError
from vmckpt.store.files.decoding import count, decoding, id_of, json_of, listed, row
from vmckpt.store.files.header import HEADER_BYTES, Header
from vmckpt.store.files.pack import Hashes, Numbers, Pack, every
from vmckpt.store.sealing.seal import Box, Sealer

DAMAGED = "damaged"
# Beyond this many records gc replaces them by one.
MANY_RECORDS = 32
# A record that alone has names may be damaged too.
RECORD_COPIES = 2
_LEVEL = 3
_MOST_BYTES = 64 << 20
_MOST_CHUNKS = 1 << 20
# No record is written near these limits.
_MOST_WRITTEN_CHUNKS = _MOST_CHUNKS // 4
_MOST_SLOT = (1 << 32) - 1
_MOST_GENERATION = 1 << 63


class Damage(NamedTuple):
    """Damaged chunks of one pack generation: the name of each slot, or b"" if unknown."""

    pack_id: bytes
    generation: int
    names: Mapping[int, bytes]


class DamageRecords:
    """What is known to be damaged in a store. Thread-safe."""

    def __init__(self, backend: Backend, sealer: Sealer, header: Header) -> None:
        self._backend, self._sealer, self._header = backend, sealer, header
        self._mutex = threading.Lock()
        # Held from determining what is new until it is written: several threads may read one frame.
        self._noting = threading.Lock()
        self._written: dict[str, list[Damage]] = {}
        # Not written, in a read-only location.
        self._unwritten: list[Damage] = []
        self._known: dict[bytes, dict[int, dict[int, bytes]]] = {}
        self.unreadable: dict[str, DamagedError] = {}
        # Incremented with each change.
        self.version = 0

    def refresh(self) -> int:
        """Read other processes' records; returns the resulting version. Raises StorageError.

        Records that could not be read before are read again.
        """
        there = set(self._backend.names(DAMAGED))
        with self._mutex:
            gone = self._written.keys() - there
            for name in gone:
                del self._written[name]
            self.unreadable = {}
            learned = False
            for name in there - self._written.keys():
                try:
                    self._written[name] = self._read(name)
                    learned = True
                except DamagedError as exc:
                    self.unreadable[name] = exc
                except MissingError:
                    continue
            if gone or learned:
                self._learn()
        return self.version

    def slots(self, pack_id: bytes, generation: int) -> Numbers:
        """The damaged slots of a pack generation, ascending."""
        with self._mutex:
            known = self._known.get(pack_id, {}).get(generation, {})
            return np.array(sorted(known), dtype=np.int64)

    def names(self, pack_id: bytes, slots: Numbers) -> Hashes:
        """The recorded names of slots; zeroes if unknown."""
        found = np.zeros((len(slots), 2), dtype=np.uint64)
        with self._mutex:
            for known in self._known.get(pack_id, {}).values():
                for i, slot in enumerate(slots.tolist()):
                    if name := known.get(slot):
                        found[i] = np.frombuffer(name, dtype="<u8")
        return found

    def positions(self, names: Hashes) -> dict[bytes, tuple[Numbers, Numbers]]:
        """Where chunks of these distinct names were noted: by pack, their slots and the index of
        each one's name.
        """
        rows = {one.tobytes(): row for row, one in enumerate(names.astype("<u8"))}
        found = {}
        with self._mutex:
            for pack_id, generations in self._known.items():
                noted = [one for known in generations.values() for one in known.items()]
                here = {slot: rows[name] for slot, name in noted if name in rows}
                if here:
                    found[pack_id] = np.array(list(here)), np.array(list(here.values()))
        return found

    def note_frame(self, pack: Pack, frame: int) -> None:
        """Record that a frame cannot be read. Never raises: the reader has its own error to
        report.
        """
        slots = pack.table.frame_slots(frame)
        with self._mutex:
            known = self._known.get(pack.id, {}).get(pack.generation, {})
            is_known = all(known.get(slot) for slot in slots.tolist())
        if not is_known:
            self.note([damage(pack, slots)])

    def note(self, found: Sequence[Damage]) -> bool:
        """Record damage; False: the location takes no records, and only this process knows.

        Known damage is not recorded again.
        """
        with self._noting:
            new = [one for one in map(self._unknown, found) if one.names]
            if not new:
                return not self._unwritten
            try:
                self.write(new)
            except VmckptError:
                with self._mutex:
                    self._unwritten += new
                    self._learn()
                return False
        return True

    def write(self, found: Iterable[Damage]) -> list[str]:
        """Record damage durably; returns the records, as many as its size requires. Raises
        StorageError, RefusedError.
        """
        return [self._write(part) for part in _parts(found)]

    def remove(self, names: Iterable[str]) -> None:
        """Remove records. Raises StorageError."""
        for name in names:
            self._backend.remove(f"{DAMAGED}/{name}")

    def tidy(self, needed: Container[bytes]) -> None:
        """Remove obsolete records, and merge many into one. Called by gc.

        `needed` packs, by id, may reappear if none is there: a disk may read later what it cannot
        read now. Afterwards each name is in RECORD_COPIES records, as one may be damaged. Safe also
        beside another gc that has lost its lock. Raises StorageError.
        """
        self.refresh()
        # After the records were listed: a pack existed before its record, or, if it is a newer
        # generation, is published next.
        there: dict[bytes, set[int]] = {}
        for pack_id, generation, _ in every(self._backend):
            there.setdefault(pack_id, set()).add(generation)

        def is_past(one: Damage) -> bool:
            generations = there.get(one.pack_id)
            if generations is None:
                return one.pack_id not in needed
            return one.generation not in generations and one.generation < max(generations)

        with self._mutex:
            written = dict(self._written)
            # Read twice just now; a disk may read later what it cannot read now.
            unreadable = self.unreadable.items()
            bad = [name for name, exc in unreadable if not isinstance(exc, UnreadableError)]
        kept = {
            name: mine
            for name, found in written.items()
            if (mine := [one for one in found if not is_past(one)])
        }
        past = set(written.keys() - kept.keys())
        if len(kept) > MANY_RECORDS:
            together = _merged(one for found in kept.values() for one in found)
            for _ in range(RECORD_COPIES):
                self.write(together)
            past |= written.keys()
        else:
            self.write(_in_one(kept.values()))
        self.remove([*past, *bad])
        self.refresh()

    def _write(self, found: Sequence[Damage]) -> str:
        name = token_hex(16)
        header = self._header.new()
        rows = [
            [
                one.pack_id.hex(),
                one.generation,
                list(one.names),
                [n.hex() for n in one.names.values()],
            ]
            for one in found
        ]
        data = compress(json.dumps(rows, separators=(",", ":")).encode(), _LEVEL)
        seal = self._sealer.file(header, f"{DAMAGED}/{name}")
        writer = self._backend.write(f"{DAMAGED}/{name}")
        try:
            writer.write(header + seal.seal(Box.DAMAGED, 0, data))
            writer.publish()
        finally:
            writer.discard()
        with self._mutex:
            self._written[name] = list(found)
            self._learn()
        return name

    def _unknown(self, found: Damage) -> Damage:
        """The part of it that is not known yet, slots or their names."""
        with self._mutex:
            known = self._known.get(found.pack_id, {}).get(found.generation, {})
            names = {
                slot: name
                for slot, name in found.names.items()
                if slot not in known or (name and not known[slot])
            }
        return found._replace(names=names)

    def _learn(self) -> None:
        self._known = {}
        self.version += 1
        for one in [*(d for found in self._written.values() for d in found), *self._unwritten]:
            slots = self._known.setdefault(one.pack_id, {}).setdefault(one.generation, {})
            for slot, name in one.names.items():
                slots[slot] = name or slots.get(slot, b"")

    def _read(self, name: str) -> list[Damage]:
        """Read a record; one that seems damaged is read once more. DamagedError, MissingError."""
        try:
            return self._read_once(name)
        except DamagedError:
            return self._read_once(name)

    def _read_once(self, name: str) -> list[Damage]:
        full = f"{DAMAGED}/{name}"
        data = self._backend.read(full, 0, _MOST_BYTES)
        seal = self._sealer.file(self._header.read(data, full), full)
        plain = unpack(seal.open(Box.DAMAGED, 0, data[HEADER_BYTES:]), None, full, _MOST_BYTES)
        with decoding(full):
            return [_parsed(one) for one in listed(json_of(plain), _MOST_CHUNKS)]


def damage(pack: Pack, slots: Numbers) -> Damage:
    """Damage of a pack, with the names of its slots if these can be read."""
    hashes = np.zeros((len(slots), 2), dtype=np.uint64)
    with suppress(DamagedError, MissingError):
        hashes = pack.hashes()[slots]
    return named(pack, slots, hashes)


def named(pack: Pack, slots: Numbers, hashes: Hashes) -> Damage:
    """Damage of a pack with the names of its slots; zeroes: unknown."""
    words = [one.tobytes() if one.any() else b"" for one in hashes.astype("<u8")]
    return Damage(pack.id, pack.generation, dict(zip(slots.tolist(), words, strict=True)))


def _parsed(written: Any) -> Damage:
    pack_id, generation, slots, names = row(written, 4)
    numbers = [count(slot, _MOST_SLOT) for slot in listed(slots, _MOST_CHUNKS)]
    known = [id_of(name) if name else b"" for name in row(names, len(numbers))]
    found = dict(zip(numbers, known, strict=True))
    return Damage(id_of(pack_id), count(generation, _MOST_GENERATION), found)


def _merged(found: Iterable[Damage]) -> list[Damage]:
    together: dict[tuple[bytes, int], dict[int, bytes]] = {}
    for one in found:
        names = together.setdefault((one.pack_id, one.generation), {})
        for slot, name in one.names.items():
            names[slot] = name or names.get(slot, b"")
    return [Damage(*key, names) for key, names in together.items()]


def _in_one(records: Iterable[Iterable[Damage]]) -> list[Damage]:
    """The damage whose names are in fewer than RECORD_COPIES of the records."""
    merged = [_merged(found) for found in records]
    copies = Counter(
        (one.pack_id, one.generation, slot)
        for found in merged
        for one in found
        for slot, name in one.names.items()
        if name
    )
    rare = [
        one._replace(
            names={
                slot: name
                for slot, name in one.names.items()
                if 0 < copies[one.pack_id, one.generation, slot] < RECORD_COPIES
            }
        )
        for found in merged
        for one in found
    ]
    return [one for one in rare if one.names]


def _parts(found: Iterable[Damage]) -> Iterator[list[Damage]]:
    """Split damage into records that can be read within the limits."""
    part, room = list[Damage](), _MOST_WRITTEN_CHUNKS
    for one in found:
        slots = iter(one.names.items())
        while names := dict(islice(slots, room)):
            part.append(one._replace(names=names))
            room -= len(names)
            if not room:
                yield part
                part, room = [], _MOST_WRITTEN_CHUNKS
    if part:
        yield part
