"""Find chunks with damaged storage by name in other packs.

A lost chunk comes back when its content is stored again. Older checkpoints refer to its old slot,
but its name is known, from its old pack or from the damage record. So it can be read from then on,
and gc puts it into the next generation of the old pack.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np
from numpy.typing import NDArray

from vmckpt.store.backends.backend import MissingError
from vmckpt.store.damage.records import DamageRecords, named
from vmckpt.store.errors import DamagedError, UnreadableError, damaged
from vmckpt.store.files.pack import Hashes, Numbers, Pack, Packs
from vmckpt.store.index import Index
from vmckpt.store.sealing.seal import Sealer

# Retries: a chunk that was found may be damaged too, or be removed while it is read.
_TRIES = 8

Contents = NDArray[np.uint8]
Found = NDArray[np.bool_]
ReadFrame = Callable[[Pack, int], bytes]
Unread = list[UnreadableError]


class Elsewhere:
    """Reads chunks by location, and damaged ones by name. Thread-safe."""

    def __init__(self, packs: Packs, sealer: Sealer, records: DamageRecords) -> None:
        self._packs, self._sealer, self._records = packs, sealer, records
        self._mutex = threading.Lock()
        self._index, self._version = Index(), -1

    def read(self, pack: Pack, slots: Numbers, frame: ReadFrame) -> tuple[Contents, Found]:
        """The contents of a pack's slots, by `frame` or from elsewhere; and which were found.

        Records damage that it encounters. Raises MissingError: the pack is gone; UnreadableError:
        some were not found, which a disk may read later.
        """
        out, found, unread = self._read(pack, slots, frame)
        if unread and not found.all():
            raise unread[0]
        return out, found

    def finds_any(self, pack: Pack, slots: Numbers) -> bool:
        """Whether some of the slots can be read now. Raises MissingError."""
        return bool(self._read(pack, slots, Pack.frame)[1].any())

    def may_find_any(self, pack: Pack, slots: Numbers) -> bool:
        """Whether some can be read now, or may be later, when a disk can read them again."""
        _, found, unread = self._read(pack, slots, Pack.frame)
        return bool(unread) or bool(found.any())

    def older(self, pack: Pack, slots: Numbers, unread: Unread) -> tuple[Contents, Found]:
        """The contents of slots in older generations of a pack: see `Packs.older`."""
        out = np.zeros((len(slots), pack.table.chunk_bytes), dtype=np.uint8)
        found = np.zeros(len(slots), dtype=bool)
        for number in self._packs.older(pack):
            left = np.flatnonzero(~found)
            with suppress(MissingError), _noting(unread):
                other = self._packs.open(pack.id, number)
                if other.table.chunk_bytes == pack.table.chunk_bytes:
                    rows = self._by_position(other, slots[left], Pack.frame, unread)
                    out[left], found[left] = rows
        return out, found

    def _read(self, pack: Pack, slots: Numbers, frame: ReadFrame) -> tuple[Contents, Found, Unread]:
        table, size, unread = pack.table, pack.table.chunk_bytes, list[UnreadableError]()
        out, found = self._by_position(pack, slots, frame, unread)
        if not found.all():
            lost = np.flatnonzero(~found)
            out[lost], found[lost] = self.older(pack, slots[lost], unread)
        if not found.all():
            lost = np.flatnonzero(~found)
            names = self.names(pack, slots[lost])
            out[lost], found[lost] = self._by_name(names, size, unread)
            noted = lost[~found[lost]]
            names_noted = names[~found[lost]]
            out[noted], found[noted] = self._by_noted_name(pack, names_noted, unread)
            left = ~found[lost] & ~table.has(slots[lost]) & (slots[lost] < table.slot_count)
            if left.any():  # gc has recorded that, but its records may be damaged too
                self._records.note([named(pack, slots[lost[left]], names[left])])
        return out, found, unread

    def _by_position(
        self, pack: Pack, slots: Numbers, frame: ReadFrame, unread: Unread
    ) -> tuple[Contents, Found]:
        """The pack's slots at their own location. Raises MissingError.

        Noted slots count only if they match their names.
        """
        table, size = pack.table, pack.table.chunk_bytes
        out = np.zeros((len(slots), size), dtype=np.uint8)
        found = table.has(slots)
        here = np.flatnonzero(found)
        positions = table.positions(slots[here])
        frames = table.frames(positions)
        for number in np.unique(frames).tolist():
            chosen = frames == number
            found[here[chosen]] = False
            data = b""
            with _noting(unread):
                data = frame(pack, number)
            if not data:
                self._records.note_frame(pack, number)
                continue
            offsets = positions[chosen] - table.firsts[number]
            chunks = np.frombuffer(data, dtype=np.uint8).reshape(-1, size)
            out[here[chosen]], found[here[chosen]] = chunks[offsets], True
        noted = self._records.slots(pack.id, pack.generation)
        doubtful = np.flatnonzero(found & np.isin(slots, noted))
        if len(doubtful):
            with suppress(DamagedError):  # without a name, being readable is enough
                names = pack.hashes()[slots[doubtful]]
                is_right = self._have_names(out[doubtful], names)
                found[doubtful] = is_right | ~names.any(axis=1)
        return out, found

    def names(self, pack: Pack, slots: Numbers) -> Hashes:
        """The names of slots, including removed ones; zeroes if unknown."""
        found = np.zeros((len(slots), 2), dtype=np.uint64)
        inside = slots < pack.table.slot_count
        if not inside.all():  # maps are data: they may name any slot
            found[inside] = self.names(pack, slots[inside])
            return found
        with suppress(DamagedError):  # the records may have them
            found[:] = pack.hashes()[slots]
        unknown = np.flatnonzero(~found.any(axis=1))
        with suppress(DamagedError):
            if len(unknown) and (spare := pack.spare_hashes()) is not None:
                found[unknown] = spare[slots[unknown]]
                unknown = np.flatnonzero(~found.any(axis=1))
        if len(unknown):
            self._records.refresh()
            found[unknown] = self._records.names(pack.id, slots[unknown])
        return found

    def _by_name(self, names: Hashes, size: int, unread: Unread) -> tuple[Contents, Found]:
        out = np.zeros((len(names), size), dtype=np.uint8)
        found = np.zeros(len(names), dtype=bool)
        for attempt in range(_TRIES):
            left = np.flatnonzero(~found & names.any(axis=1))
            index = self._indexed(anew=attempt > 0)
            packs, slots = index.find(names[left])
            if not attempt and not (packs >= 0).all():
                continue  # it may have been stored since the index was made
            if not (packs >= 0).any():
                break
            for number in np.unique(packs[packs >= 0]).tolist():
                chosen = packs == number
                rows = left[chosen]
                contents = self._read_other(index.packs[number], slots[chosen], size, unread)
                right = self._have_names(contents, names[rows])
                out[rows[right]] = contents[right]
                found[rows[right]] = True
        return out, found

    def _by_noted_name(self, pack: Pack, names: Hashes, unread: Unread) -> tuple[Contents, Found]:
        """The same for noted chunks of other packs: a disk may have failed only once."""
        size = pack.table.chunk_bytes
        wanted, which = np.unique(names, axis=0, return_inverse=True)
        out = np.zeros((len(wanted), size), dtype=np.uint8)
        found = np.zeros(len(wanted), dtype=bool)
        for pack_id, (slots, rows) in self._records.positions(wanted).items():
            if pack_id != pack.id:
                contents = self._read_other(pack_id, slots, size, unread)
                right = self._have_names(contents, wanted[rows])
                out[rows[right]], found[rows[right]] = contents[right], True
        return out[which.reshape(-1)], found[which.reshape(-1)]

    def _have_names(self, contents: Contents, names: Hashes) -> Found:
        hashes = self._sealer.hashes(memoryview(contents.reshape(-1).data), contents.shape[1])
        found: Found = (np.frombuffer(hashes, dtype="<u8").reshape(-1, 2) == names).all(axis=1)
        return found

    def _read_other(self, pack_id: bytes, slots: Numbers, size: int, unread: Unread) -> Contents:
        """Chunks of another pack; zeroes, which match no name, if they cannot be read."""
        with suppress(MissingError), _noting(unread):  # search again
            pack = self._packs.find(pack_id)
            if pack.table.chunk_bytes == size:
                return self._by_position(pack, slots, Pack.frame, unread)[0]
        return np.zeros((len(slots), size), dtype=np.uint8)

    def _indexed(self, *, anew: bool) -> Index:
        """Every chunk of every pack, except known damage."""
        with self._mutex:
            if anew or self._version < 0:
                newest = self._packs.list_again()
                version = self._records.refresh()
                index = self._index
                if version != self._version or any(
                    newest.get(pack, (-1, 0))[0] != generation
                    for pack, generation in index.generations.items()
                ):
                    index = Index()
                packs = []
                for pack_id in [pack for pack in newest if pack not in index.generations]:
                    try:
                        packs.append(self._packs.find(pack_id))
                    except DamagedError:
                        continue  # nothing can be found in it
                self._index = index.grown(packs, self._records.slots)
                self._version = version
            return self._index


@contextmanager
def _noting(unread: Unread) -> Iterator[None]:
    """Damage in the block counts as not found; what a disk could not read goes into `unread`
    too.
    """
    try:
        yield
    except DamagedError as exc:
        if isinstance(exc, UnreadableError):
            unread.append(exc)


def lost_chunks(pack: Pack, lost: int) -> DamagedError:
    """The error for chunks that no longer exist anywhere."""
    return damaged(
        f"{pack.name} is damaged", f"{lost} chunks are lost: their content is nowhere else either"
    )
