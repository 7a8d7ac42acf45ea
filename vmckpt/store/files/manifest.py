"""A checkpoint's entry in the catalogue."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vmckpt.store.files.decoding import (
    count,
    decoding,
    id_of,
    json_of,
    listed,
    mapping,
    number,
    row,
    text,
    uuid_of,
)

# For RAM, and for disks.
PAGE_CHUNK_BYTES = 4 << 10
BLOCK_CHUNK_BYTES = 64 << 10
# Limits: beyond them a file is not a valid checkpoint. Chunks: 16 TiB of RAM, 256 TiB of a disk.
MOST_CHUNKS = 1 << 32
MOST_CHUNK_BYTES = 1 << 20
MOST_PARTS = 1 << 12
MOST_PACKS = 1 << 22
MOST_BLOB_BYTES = 16 << 30
MOST_SEQUENCE = 1 << 53
_MOST_BYTES = 1 << 62
# The year 9987: later ones have no date.
LATEST_UNIX_S = 253e9
# A manifest's fields; an older vmckpt lacks the last two.
_WORDS = (
    "vm", "parent", "created_unix_s", "added_bytes", "areas", "blobs", "packs", "facts",
)  # fmt: skip
_LATER_WORDS = ("vm_id", "sequence")


@dataclass(frozen=True, slots=True)
class AreaFacts:
    """One area: RAM, or a disk. Zero chunks do not count.

    `given_chunks` were put, `new_chunks` of them were not in the store yet.
    """

    name: str
    size_bytes: int
    chunk_bytes: int
    chunks: int
    given_chunks: int
    new_chunks: int


@dataclass(frozen=True, slots=True)
class BlobFacts:
    """A small item that is stored whole."""

    name: str
    size_bytes: int
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """The description of a checkpoint.

    `vm_id` is the VM's UUID, and `sequence` numbers its checkpoints in the order in which they were
    taken; both are None if it is older than these fields. `created_unix_s` is by the host's clock.
    `parent` may no longer exist. `added_bytes` is the store's growth. `facts` are the maker's: the
    store uses only their "name", by which `Store.find` finds it. `packs` hold its chunks.
    """

    id: str
    vm: str
    parent: str | None
    created_unix_s: float
    added_bytes: int
    areas: tuple[AreaFacts, ...]
    blobs: tuple[BlobFacts, ...]
    packs: tuple[str, ...]
    facts: Mapping[str, Any]
    vm_id: str | None = None
    sequence: int | None = None

    def area(self, name: str) -> AreaFacts | None:
        """The area of that name."""
        return next((area for area in self.areas if area.name == name), None)

    def encode(self) -> bytes:
        """Encode as JSON. Raises TypeError if the facts are not JSON."""
        words = {name: getattr(self, name) for name in self.__slots__ if name != "id"}
        words["areas"] = [[getattr(area, f) for f in area.__slots__] for area in self.areas]
        words["blobs"] = [[getattr(blob, f) for f in blob.__slots__] for blob in self.blobs]
        return json.dumps(words, separators=(",", ":"), allow_nan=False).encode()

    @classmethod
    def decode(cls, checkpoint_id: str, data: bytes) -> "Manifest":
        """The inverse of `encode`. Raises DamagedError."""
        with decoding(f"the manifest of checkpoint {checkpoint_id}"):
            given = mapping(json_of(data), of=_WORDS, maybe=_LATER_WORDS)
            parent, vm_id, sequence = map(given.get, ("parent", *_LATER_WORDS))
            return cls(
                id=checkpoint_id,
                vm=text(given["vm"]),
                parent=None if parent is None else id_of(parent).hex(),
                created_unix_s=number(given["created_unix_s"], LATEST_UNIX_S),
                added_bytes=count(given["added_bytes"], _MOST_BYTES),
                areas=tuple(_area(area) for area in listed(given["areas"], MOST_PARTS)),
                blobs=tuple(_blob(blob) for blob in listed(given["blobs"], MOST_PARTS)),
                packs=tuple(id_of(pack).hex() for pack in listed(given["packs"], MOST_PACKS)),
                facts=mapping(given["facts"]),
                vm_id=None if vm_id is None else uuid_of(vm_id),
                sequence=None if sequence is None else count(sequence, MOST_SEQUENCE),
            )


def area_shape(size_bytes: Any, chunk_bytes: Any) -> tuple[int, int]:
    """The size of an area and of its chunks. Raises ValueError if they are not valid."""
    chunk = count(chunk_bytes, MOST_CHUNK_BYTES, 1)
    return count(size_bytes, MOST_CHUNKS * chunk), chunk


def _area(written: Any) -> AreaFacts:
    name, size, chunk, chunks, given, new = row(written, 6)
    size_bytes, chunk_bytes = area_shape(size, chunk)
    present = count(chunks, -(-size_bytes // chunk_bytes))
    brought = count(given, _MOST_BYTES), count(new, _MOST_BYTES)
    return AreaFacts(text(name), size_bytes, chunk_bytes, present, *brought)


def _blob(written: Any) -> BlobFacts:
    name, size, stored = row(written, 3)
    return BlobFacts(text(name), count(size, MOST_BLOB_BYTES), count(stored, MOST_BLOB_BYTES))


def is_same(one: Manifest, other: Manifest) -> bool:
    """Whether two manifests with one id describe the same checkpoint.

    A manifest by an older vmckpt leaves out fields that it did not know.
    """
    words = ("vm", "parent", "created_unix_s", "facts")
    if any(getattr(one, word) != getattr(other, word) for word in words):
        return False
    later = ((one.vm_id, other.vm_id), (one.sequence, other.sequence))
    return all(None in pair or pair[0] == pair[1] for pair in later)
