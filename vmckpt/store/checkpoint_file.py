"""A checkpoint's file, and the file of the maps that it and others differ little from.

checkpoints/ID:

    header      (`header.py`, kind C)
    lengths     of the boxes of the manifest and of the maps, unsigned 32 bit each, big-endian
    manifest    a box of zstd: JSON (`manifest.py`)
    maps        a box: see below
    blobs       a box of zstd each, without gaps, in the manifest's order

maps/ID is a header (kind M) and one box of maps. Maps are a length (unsigned 32 bit, big-endian)
and that much JSON: the base's id or null, the packs that the base does not list yet, and for each
area name, size, size of a chunk, and length of its map; then the areas' maps (`maps.py`).
"""

import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vmckpt.store.backends.backend import Backend, MissingError
from vmckpt.store.errors import DamagedError, damaged
from vmckpt.store.header import HEADER_BYTES, Header, Kind
from vmckpt.store.manifest import BlobFacts, Manifest
from vmckpt.store.maps import Refs, decode, encode, resized
from vmckpt.store.pack import compress, unpack
from vmckpt.store.sealing.seal import Box, Sealer

CHECKPOINTS, MAPS = "checkpoints", "maps"
_LENGTHS = struct.Struct(">II")
_LENGTH = struct.Struct(">I")
_LEVEL = 3
# A manifest is nearly always had with the first read.
_FIRST_BYTES = 16 << 10


@dataclass(slots=True)
class AreaMap:
    """Where an area's chunks are."""

    size_bytes: int
    chunk_bytes: int
    refs: Refs


@dataclass(slots=True)
class Maps:
    """All areas of a checkpoint, and the packs that they name by number."""

    base: bytes | None = None
    packs: list[bytes] = field(default_factory=list)
    areas: dict[str, AreaMap] = field(default_factory=dict)


class Files:
    """Reads and writes both kinds of file."""

    def __init__(self, backend: Backend, sealer: Sealer, store_id: bytes) -> None:
        self.backend, self.sealer = backend, sealer
        self.store_id = store_id

    def header(self, kind: Kind, file_id: bytes) -> Header:
        """The header of a file of this store."""
        return Header(kind, self.sealer.encrypted, self.store_id, file_id)

    def read_manifest(self, checkpoint_id: str) -> Manifest:
        """A checkpoint's manifest. Raises MissingError, DamagedError."""
        return self._manifest(checkpoint_id, self._begin(checkpoint_id))

    def read_maps(self, checkpoint_id: str) -> Maps:
        """A checkpoint's maps, base and all. Raises MissingError, DamagedError."""
        start, length, _ = self._places(checkpoint_id, self._begin(checkpoint_id))
        name = f"{CHECKPOINTS}/{checkpoint_id}"
        sealed = self.backend.read(name, start, length)
        seal = self.sealer.file(self._header_of(checkpoint_id).pack(), name)
        return self._decode(seal.open(Box.MAPS, 0, sealed), name)

    def read_blob(self, manifest: Manifest, name: str) -> bytes:
        """A blob. Raises KeyError, DamagedError."""
        _, _, start = self._places(manifest.id, self._begin(manifest.id))
        for number, blob in enumerate(manifest.blobs):
            if blob.name == name:
                return self._blob(manifest.id, number, blob, start)
            start += blob.stored_bytes
        raise KeyError(name)

    def read_all(self, checkpoint_id: str) -> tuple[Manifest, Maps]:
        """Every byte of a checkpoint's file read and found right. MissingError, DamagedError."""
        manifest = self.read_manifest(checkpoint_id)
        maps = self.read_maps(checkpoint_id)
        _, _, end = self._places(checkpoint_id, self._begin(checkpoint_id))
        for number, blob in enumerate(manifest.blobs):
            self._blob(checkpoint_id, number, blob, end)
            end += blob.stored_bytes
        if self.backend.read_end(f"{CHECKPOINTS}/{checkpoint_id}", 0)[1] != end:
            raise damaged(f"checkpoint {checkpoint_id} is damaged", "its file is too long")
        return manifest, maps

    def write_checkpoint(self, manifest: Manifest, maps: bytes, blobs: Sequence[bytes]) -> None:
        """A checkpoint's file: it is there when this returns. `blobs` are sealed. StorageError."""
        name = f"{CHECKPOINTS}/{manifest.id}"
        header = self._header_of(manifest.id).pack()
        seal = self.sealer.file(header, name)
        first = seal.seal(Box.MANIFEST, 0, compress(manifest.encode(), _LEVEL))
        second = seal.seal(Box.MAPS, 0, maps)
        lengths = _LENGTHS.pack(len(first), len(second))
        self._write(name, [header, lengths, first, second, *blobs])

    def seal_blob(self, checkpoint_id: str, number: int, data: bytes) -> bytes:
        """A blob as `write_checkpoint` takes it."""
        name = f"{CHECKPOINTS}/{checkpoint_id}"
        seal = self.sealer.file(self._header_of(checkpoint_id).pack(), name)
        return seal.seal(Box.BLOB, number, compress(data, _LEVEL))

    def read_base(self, base_id: bytes) -> Maps:
        """Maps that others differ from. Raises DamagedError."""
        name = self.base_name(base_id)
        try:
            data = self.backend.read(name)
        except MissingError as exc:
            raise damaged(f"{name} is missing", "a checkpoint's maps rest on it") from exc
        header = self.header(Kind.MAPS, base_id)
        header.require(data, name)
        seal = self.sealer.file(header.pack(), name)
        return self._decode(seal.open(Box.MAPS, 0, data[HEADER_BYTES:]), name)

    def base_name(self, base_id: bytes) -> str:
        """The object that such maps are."""
        return f"{MAPS}/{base_id.hex()}"

    def write_base(self, base_id: bytes, maps: bytes) -> int:
        """A file of maps: it is there when this returns; its size. Raises StorageError."""
        name = self.base_name(base_id)
        header = self.header(Kind.MAPS, base_id).pack()
        return self._write(name, [header, self.sealer.file(header, name).seal(Box.MAPS, 0, maps)])

    def _write(self, name: str, parts: Iterable[bytes]) -> int:
        data = b"".join(parts)
        writer = self.backend.write(name)
        try:
            writer.write(data)
            writer.publish()
        finally:
            writer.discard()
        return len(data)

    def _header_of(self, checkpoint_id: str) -> Header:
        return self.header(Kind.CHECKPOINT, bytes.fromhex(checkpoint_id))

    def _begin(self, checkpoint_id: str) -> bytes:
        name = f"{CHECKPOINTS}/{checkpoint_id}"
        data = self.backend.read(name, 0, _FIRST_BYTES)
        self._header_of(checkpoint_id).require(data, f"checkpoint {checkpoint_id}")
        if len(data) < HEADER_BYTES + _LENGTHS.size:
            raise damaged(f"checkpoint {checkpoint_id} is damaged", "it ends too early")
        return data

    def _places(self, checkpoint_id: str, data: bytes) -> tuple[int, int, int]:
        """Where the maps are, how long, and where the blobs begin."""
        first, second = _LENGTHS.unpack_from(data, HEADER_BYTES)
        start = HEADER_BYTES + _LENGTHS.size + first
        return start, second, start + second

    def _manifest(self, checkpoint_id: str, data: bytes) -> Manifest:
        name = f"{CHECKPOINTS}/{checkpoint_id}"
        start = HEADER_BYTES + _LENGTHS.size
        end, _, _ = self._places(checkpoint_id, data)
        sealed = data[start:end]
        if end > len(data):
            sealed = self.backend.read(name, start, end - start)
        seal = self.sealer.file(data[:HEADER_BYTES], name)
        plain = unpack(seal.open(Box.MANIFEST, 0, sealed), None, name)
        return Manifest.decode(checkpoint_id, plain)

    def _blob(self, checkpoint_id: str, number: int, blob: BlobFacts, start: int) -> bytes:
        name = f"{CHECKPOINTS}/{checkpoint_id}"
        seal = self.sealer.file(self._header_of(checkpoint_id).pack(), name)
        sealed = self.backend.read(name, start, blob.stored_bytes)
        return unpack(seal.open(Box.BLOB, number, sealed), blob.size_bytes, name)

    def _decode(self, data: bytes, name: str) -> Maps:
        try:
            (length,) = _LENGTH.unpack_from(data)
            words = json.loads(data[_LENGTH.size : _LENGTH.size + length])
            maps = Maps()
            if words["base"] is not None:
                maps = self.read_base(bytes.fromhex(words["base"]))
                maps.base = bytes.fromhex(words["base"])
            maps.packs += [bytes.fromhex(pack) for pack in words["packs"]]
            maps.areas = dict(
                self._areas(words["areas"], data[_LENGTH.size + length :], maps, name)
            )
        except DamagedError:
            raise
        except (struct.error, ValueError, TypeError, KeyError) as exc:
            raise damaged(f"{name} is damaged", f"its maps make no sense: {exc}") from exc
        return maps

    def _areas(
        self, areas: list[Any], data: bytes, maps: Maps, name: str
    ) -> Iterable[tuple[str, AreaMap]]:
        at = 0
        for area, size_bytes, chunk_bytes, length in areas:
            base = base_refs(maps, area, chunk_bytes, -(-size_bytes // chunk_bytes))
            refs = decode(data[at : at + length], base, name, len(maps.packs))
            yield area, AreaMap(size_bytes, chunk_bytes, refs)
            at += length


def encode_maps(maps: Maps, base: Maps | None) -> bytes:
    """Maps as bytes, as their difference to `base`, whose packs they list first."""
    areas, parts = [], []
    for name, area in maps.areas.items():
        before = base_refs(base or Maps(), name, area.chunk_bytes, len(area.refs))
        part = encode(area.refs, before)
        areas.append((name, area.size_bytes, area.chunk_bytes, len(part)))
        parts.append(part)
    words = {
        "base": maps.base.hex() if base and maps.base else None,
        "packs": [pack.hex() for pack in maps.packs[len(base.packs) if base else 0 :]],
        "areas": areas,
    }
    head = json.dumps(words, separators=(",", ":")).encode()
    return b"".join((_LENGTH.pack(len(head)), head, *parts))


def base_refs(base: Maps, name: str, chunk_bytes: int, chunks: int) -> Refs:
    """An area of the base, as large as the one that differs from it; zeroes where it has none."""
    area = base.areas.get(name)
    if area is None or area.chunk_bytes != chunk_bytes:
        return np.zeros(chunks, dtype=np.uint64)
    return resized(area.refs, chunks)
