"""The format of a bundle: many small packs in one object, each byte for byte unchanged.

bundles/ID-RANK:

    header     (`store/files/header.py`, kind B)
    length     of the list's box: unsigned 32 bit, big-endian
    list       a box (LIST, number 0) of zstd: JSON, for each pack [id, generation, size, bytes of
               frames], without the spare one
    tails      for each pack in the list's order its header, and all that comes after these frames
    frames     for each pack in the list's order these frames
    list       again, as a separate box (LIST, number 1)
    header     again, the same bytes
    length     again

One read of the beginning yields the tables of all packs. Either list is enough: the one at the
end is read if the first is damaged. A pack's own boxes are sealed for its own name
(`packs/ID-GENERATION`), wherever it is stored, so damage in a bundle affects only that pack.

If several objects have the same pack, the bundle with the highest RANK keeps it (of two, the one
with the higher name), and a pack's own object ranks last. So two gcs never remove each other's
copy.
"""

import json
import re
import secrets
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from vmckpt.errors import StorageError
from vmckpt.store.backends.backend import Backend
from vmckpt.store.backends.cached import read_twice
from vmckpt.store.compression import compress, unpack
from vmckpt.store.errors import DamagedError, damaged
from vmckpt.store.files.decoding import count, decoding, id_of, json_of, listed, row
from vmckpt.store.files.header import HEADER_BYTES, Header
from vmckpt.store.files.pack import pack_name
from vmckpt.store.sealing.seal import TAG_BYTES, Box, Sealer

BUNDLES = "bundles"
# Larger bundles are not made.
MOST_BYTES, MOST_PACKS = 64 << 20, 4096
# A bundle that claims more than this is rejected, so that no number in it makes a reader allocate
# more memory.
_MOST_CLAIMED_BYTES = 4 * MOST_BYTES
# A new bundle's rank exceeds earlier ones by a random step of up to this. An append-only client can
# create a bundle with the highest rank; no other has a higher one.
_RANKS, _MOST_RANK = 1 << 32, 10**19 - 1
_LENGTH = struct.Struct(">I")
_HEAD_BYTES = HEADER_BYTES + _LENGTH.size
# Read at once: usually the whole list.
_FIRST_BYTES = 64 << 10
_MOST_LIST_BYTES = 16 << 20
_MOST_GENERATION = 1 << 63
_LEVEL = 3
_NAME = re.compile(r"[0-9a-f]{32}-(0|[1-9][0-9]{0,18})")


class BundledPack(NamedTuple):
    """A pack in a bundle: the offsets of its header and tail, and of its frames."""

    name: str
    size: int
    frame_bytes: int
    tail_at: int
    frames_at: int

    def parts(self, start: int, end: int) -> list[tuple[int, int]]:
        """The offsets and lengths in the bundle of these bytes of the pack, in order."""
        frames_end = HEADER_BYTES + self.frame_bytes
        areas = (
            (0, HEADER_BYTES, self.tail_at),
            (HEADER_BYTES, frames_end, self.frames_at),
            (frames_end, self.size, self.tail_at + HEADER_BYTES),
        )
        found = []
        for first, last, at in areas:
            low, high = max(start, first), min(end, last)
            if low < high:
                found.append((at + low - first, high - low))
        return found


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle as its list describes it. `front_bytes`: up to the end of the tails.

    `fault`: what is wrong with it although one list is intact.
    """

    name: str
    rank: int
    size: int
    front_bytes: int
    members: Mapping[str, BundledPack]
    fault: StorageError | None = None

    @property
    def order(self) -> tuple[int, str]:
        """Of bundles with the same pack the highest keeps it."""
        return self.rank, self.name


class Whole(NamedTuple):
    """All bytes of a pack, and how many of them are frames."""

    name: str
    data: bytes
    frame_bytes: int

    @property
    def tail(self) -> bytes:
        """The header, and the part after the frames."""
        return self.data[:HEADER_BYTES] + self.data[HEADER_BYTES + self.frame_bytes :]

    @property
    def frames(self) -> bytes:
        """The frames."""
        return self.data[HEADER_BYTES : HEADER_BYTES + self.frame_bytes]


class BundleFiles:
    """Reads and writes bundles."""

    def __init__(self, backend: Backend, sealer: Sealer, header: Header) -> None:
        self._backend, self._sealer, self._header = backend, sealer, header

    def read(self, name: str, size: int) -> Bundle:
        """Read a bundle's list. Raises MissingError, DamagedError (neither list is intact),
        StorageError.
        """

        def read() -> Bundle:
            try:
                return self._first(name, size)
            except StorageError as exc:  # damaged, or a disk cannot read it
                return self._second(name, size, exc)

        return read_twice(self._backend, read)

    def faults(self, name: str, size: int) -> list[str]:
        """The faults of its two lists. Raises MissingError, StorageError (neither can be read)."""
        found, unread = [], list[StorageError]()
        for read in (self._first, self._second):
            try:
                fault = read_twice(self._backend, partial(read, name, size)).fault
            except DamagedError as exc:
                fault = exc
            except StorageError as exc:
                fault = exc
                unread.append(exc)
            if fault is not None and fault.why not in found:
                found.append(fault.why)
        if len(unread) > 1:
            raise unread[0]
        return found

    def write(self, packs: Sequence[Whole], above: int) -> str:
        """Write a bundle with a rank above that of `above`, if given; returns its name.

        It is durable on return. Raises StorageError.
        """
        rank = min(above + 1 + secrets.randbelow(_RANKS), _MOST_RANK)
        name = f"{BUNDLES}/{secrets.token_hex(16)}-{rank}"
        header = self._header.new()
        seal = self._sealer.file(header, name)
        rows = []
        for pack in packs:
            pack_id, _, generation = pack.name.rpartition("/")[2].partition("-")
            rows.append([pack_id, int(generation), len(pack.data), pack.frame_bytes])
        text = compress(json.dumps(rows, separators=(",", ":")).encode(), _LEVEL)
        first, second = (seal.seal(Box.LIST, number, text) for number in (0, 1))
        writer = self._backend.write(name)
        try:
            writer.write(header + _LENGTH.pack(len(first)) + first)
            for pack in packs:
                writer.write(pack.tail)
            for pack in packs:
                writer.write(pack.frames)
            writer.write(second + header + _LENGTH.pack(len(second)))
            writer.publish()
        finally:
            writer.discard()
        return name

    def _first(self, name: str, size: int) -> Bundle:
        begin = self._backend.read(name, 0, _FIRST_BYTES)
        header = self._header.read(begin, name)
        length = _length(begin[HEADER_BYTES:_HEAD_BYTES], name)
        sealed = begin[_HEAD_BYTES : _HEAD_BYTES + length]
        if len(sealed) < length:
            sealed = self._backend.read(name, _HEAD_BYTES, length)
        return self._parsed(name, size, _Sealed(header, sealed, 0))

    def _second(self, name: str, size: int, why: StorageError | None = None) -> Bundle:
        end, size = self._backend.read_end(name, _FIRST_BYTES)
        last = end[-_HEAD_BYTES:]
        header = self._header.read(last, name)
        length = _length(last[HEADER_BYTES:], name)
        sealed = end[-_HEAD_BYTES - length : -_HEAD_BYTES]
        if len(sealed) < length:
            sealed = self._backend.read(name, max(0, size - _HEAD_BYTES - length), length)
        return self._parsed(name, size, _Sealed(header, sealed, 1), why)

    def _parsed(
        self, name: str, size: int, sealed: "_Sealed", fault: StorageError | None = None
    ) -> Bundle:
        seal = self._sealer.file(sealed.header, name)
        text = seal.open(Box.LIST, sealed.number, sealed.box)
        plain = unpack(text, None, name, _MOST_LIST_BYTES)
        with decoding(name):
            rows = [_row(one) for one in listed(json_of(plain), MOST_PACKS)]
            tails_at = _HEAD_BYTES + len(sealed.box)
            frames_at = front = tails_at + sum(size - frames for _, size, frames in rows)
            members = {}
            for pack, bytes_, frames in rows:
                members[pack] = BundledPack(pack, bytes_, frames, tails_at, frames_at)
                tails_at += bytes_ - frames
                frames_at += frames
            if len(members) != len(rows):
                raise ValueError("its list has a pack twice")
            if frames_at > _MOST_CLAIMED_BYTES:
                raise ValueError("its packs are larger than those of any bundle")
        if frames_at + len(sealed.box) + _HEAD_BYTES != size:
            fault = damaged(f"{name} is damaged", "its size is not what its list says")
        return Bundle(name, rank_of(name), size, front, members, fault)


class _Sealed(NamedTuple):
    """A list as it is stored."""

    header: bytes
    box: bytes
    number: int


def is_bundle(name: str) -> bool:
    """Whether it is a valid name of an object in `bundles`."""
    return _NAME.fullmatch(name) is not None


def rank_of(name: str) -> int:
    """The rank in a bundle's name."""
    return int(name.rpartition("-")[2])


def _row(written: object) -> tuple[str, int, int]:
    pack_id, generation, size, frames = row(written, 4)
    bytes_ = count(size, _MOST_CLAIMED_BYTES, HEADER_BYTES)
    name = pack_name(id_of(pack_id), count(generation, _MOST_GENERATION))
    return name, bytes_, count(frames, bytes_ - HEADER_BYTES)


def _length(data: bytes, name: str) -> int:
    if len(data) == _LENGTH.size:
        (length,) = _LENGTH.unpack(data)
        if TAG_BYTES <= length <= _MOST_LIST_BYTES:
            return int(length)
    raise damaged(f"{name} is damaged", "its list has a length that no list has")
