"""What the catalogue says of a checkpoint."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vmckpt.store.errors import damaged

# RAM, and disks.
PAGE_CHUNK_BYTES = 4 << 10
BLOCK_CHUNK_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class AreaFacts:
    """One area: RAM, or a disk. Chunks of zeroes do not count.

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
    """Something small that is kept whole."""

    name: str
    size_bytes: int
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checkpoint, in words.

    `parent` need not be there any more. `added_bytes` is what the store grew by. `facts` are the
    maker's: the store looks only for a "name" in them, by which `Store.find` finds it. `packs` hold
    its chunks.
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

    def area(self, name: str) -> AreaFacts | None:
        """The area of that name."""
        return next((area for area in self.areas if area.name == name), None)

    def encode(self) -> bytes:
        """As JSON. Raises TypeError when the facts are none."""
        words = {name: getattr(self, name) for name in self.__slots__ if name != "id"}
        words["areas"] = [[getattr(area, f) for f in area.__slots__] for area in self.areas]
        words["blobs"] = [[getattr(blob, f) for f in blob.__slots__] for blob in self.blobs]
        return json.dumps(words, separators=(",", ":"), allow_nan=False).encode()

    @classmethod
    def decode(cls, checkpoint_id: str, data: bytes) -> "Manifest":
        """The inverse. Raises DamagedError."""
        try:
            words = json.loads(data)
            words["areas"] = tuple(AreaFacts(*area) for area in words["areas"])
            words["blobs"] = tuple(BlobFacts(*blob) for blob in words["blobs"])
            words["packs"] = tuple(words["packs"])
            return cls(id=checkpoint_id, **words)
        except (ValueError, TypeError, KeyError) as exc:
            raise damaged(f"checkpoint {checkpoint_id} is damaged", f"manifest: {exc}") from exc
