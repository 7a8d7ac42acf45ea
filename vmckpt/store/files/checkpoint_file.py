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
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from vmckpt.errors import RefusedError
from vmckpt.store.backends.backend import Backend, MissingError
from vmckpt.store.backends.cached import read_twice, uncached
from vmckpt.store.compression import compress, unpack
from vmckpt.store.errors import damaged
from vmckpt.store.files.decoding import count, decoding, id_of, json_of, listed, mapping, row, text
from vmckpt.store.files.header import HEADER_BYTES, FileKind, Header
from vmckpt.store.files.manifest import MOST_PACKS, MOST_PARTS, BlobFacts, Manifest, area_shape
from vmckpt.store.files.maps import Refs, decode, encode, require_memory, resized
from vmckpt.store.sealing.seal import Box, Sealer

CHECKPOINTS, MAPS = "checkpoints", "maps"
_LENGTHS = struct.Struct(">II")
_LENGTH = struct.Struct(">I")
_LEVEL = 3
# Nearly always includes the whole manifest.
_FIRST_BYTES = 16 << 10
# Limits: a larger file is not a valid checkpoint.
_MOST_MANIFEST_BYTES = 256 << 20
_MOST_MAPS_BYTES = 2 << 30


@dataclass(slots=True)
class AreaMap:
    """Where an area's chunks are."""

    size_bytes: int
    chunk_bytes: int
    refs: Refs


@dataclass(slots=True)
class Maps:
    """All areas of a checkpoint, and the packs that they refer to by number."""

    base: bytes | None = None
    packs: list[bytes] = field(default_factory=list)
    areas: dict[str, AreaMap] = field(default_factory=dict)


class CheckpointFiles:
    """Reads and writes both kinds of file."""

    def __init__(self, backend: Backend, sealer: Sealer, store_id: bytes) -> None:
        self.backend, self.sealer = backend, sealer
        self.store_id = store_id

    def header(self, kind: FileKind) -> Header:
        """The header of such a file in this store."""
        return Header(kind, self.sealer.encrypted, self.store_id)

    def read_manifest(self, checkpoint_id: str) -> Manifest:
        """A checkpoint's manifest. Raises MissingError, DamagedError."""
        return read_twice(self.backend, lambda: _File(self, checkpoint_id).manifest())

    def read_maps(self, checkpoint_id: str) -> Maps:
        """A checkpoint's maps, with their base. Raises MissingError, DamagedError."""

        def read() -> Maps:
            file = _File(self, checkpoint_id)
            return self._decode(file.maps(), file.name)

        return read_twice(self.backend, read)

    def read_blob(self, manifest: Manifest, name: str) -> bytes:
        """A blob. Raises KeyError, MissingError, DamagedError."""
        for number, blob in enumerate(manifest.blobs):
            if blob.name == name:
                return read_twice(self.backend, partial(self._read_blob, manifest, number))
        raise KeyError(name)

    def _read_blob(self, manifest: Manifest, number: int) -> bytes:
        return _File(self, manifest.id).blob(manifest, number)

    def read_all(self, checkpoint_id: str) -> tuple[Manifest, Maps]:
        """Read and verify every byte of a checkpoint's file. Raises MissingError, DamagedError."""
        return read_twice(self.backend, lambda: self._read_all(checkpoint_id))

    def _read_all(self, checkpoint_id: str) -> tuple[Manifest, Maps]:
        file = _File(self, checkpoint_id)
        manifest, maps = file.manifest(), self._decode(file.maps(), file.name)
        for number in range(len(manifest.blobs)):
            file.blob(manifest, number)
        end = file.blobs_at + sum(blob.stored_bytes for blob in manifest.blobs)
        if self.backend.read_end(file.name, 0)[1] != end:
            raise damaged(f"{file.name} is damaged", "it is longer than its manifest says")
        require_agreement(manifest, maps)
        return manifest, maps

    def new_checkpoint(self, checkpoint_id: str) -> "NewCheckpointFile":
        """Begin a checkpoint's file."""
        return NewCheckpointFile(self, checkpoint_id)

    def read_base(self, base_id: bytes) -> Maps:
        """Maps that others are based on. Raises DamagedError."""
        return read_twice(self.backend, lambda: self._read_base(base_id))

    def _read_base(self, base_id: bytes) -> Maps:
        name = self.base_name(base_id)
        try:
            data = self.backend.read(name, 0, _MOST_MAPS_BYTES)
        except MissingError as exc:
            raise damaged(f"{name} is missing", "a checkpoint's maps rest on it") from exc
        header = self.header(FileKind.MAPS).read(data, name)
        seal = self.sealer.file(header, name)
        maps = self._decode(seal.open(Box.MAPS, 0, data[HEADER_BYTES:]), name, based=True)
        maps.base = base_id
        return maps

    def checkpoint_name(self, checkpoint_id: str) -> str:
        """A checkpoint's object name."""
        return f"{CHECKPOINTS}/{checkpoint_id}"

    def base_name(self, base_id: bytes) -> str:
        """The object name of base maps."""
        return f"{MAPS}/{base_id.hex()}"

    def write_base(self, base_id: bytes, maps: bytes) -> int:
        """Write a base durably; returns its size. Raises StorageError."""
        name = self.base_name(base_id)
        header = self.header(FileKind.MAPS).new()
        return self.write(name, [header, self.sealer.file(header, name).seal(Box.MAPS, 0, maps)])

    def write(self, name: str, parts: Iterable[bytes]) -> int:
        """Write a file durably; returns its size. Raises StorageError."""
        data = b"".join(parts)
        writer = self.backend.write(name)
        try:
            writer.write(data)
            writer.publish()
        finally:
            writer.discard()
        return len(data)

    def _decode(self, data: bytes, name: str, *, based: bool = False) -> Maps:
        with decoding(name):
            (length,) = _LENGTH.unpack_from(data)
            head = json_of(data[_LENGTH.size : _LENGTH.size + length])
            head = mapping(head, of=("base", "packs", "areas"))
            maps = Maps()
            if head["base"] is not None:
                if based:
                    raise ValueError("a base rests on another base")
                maps = self.read_base(id_of(head["base"]))
            maps.packs += [id_of(pack) for pack in listed(head["packs"], MOST_PACKS)]
            areas = listed(head["areas"], MOST_PARTS)
            maps.areas = dict(self._areas(areas, data[_LENGTH.size + length :], maps, name))
            return maps

    def _areas(
        self, areas: list[Any], data: bytes, maps: Maps, name: str
    ) -> Iterable[tuple[str, AreaMap]]:
        at = total = 0
        for written in areas:
            area, size, chunk, length = row(written, 4)
            size_bytes, chunk_bytes = area_shape(size, chunk)
            end = at + count(length, len(data) - at)
            chunks = -(-size_bytes // chunk_bytes)
            total += chunks
            require_memory(total, name)
            base = base_refs(maps, text(area), chunk_bytes, chunks)
            refs = decode(data[at:end], base, name, len(maps.packs))
            yield area, AreaMap(size_bytes, chunk_bytes, refs)
            at = end


class _File:
    """A checkpoint's file, to read. It and its methods raise MissingError, DamagedError."""

    def __init__(self, files: CheckpointFiles, checkpoint_id: str) -> None:
        self.name, self._id = f"{CHECKPOINTS}/{checkpoint_id}", checkpoint_id
        self._files = files
        self._begin = files.backend.read(self.name, 0, _FIRST_BYTES)
        header = files.header(FileKind.CHECKPOINT).read(self._begin, self.name)
        if len(self._begin) < HEADER_BYTES + _LENGTHS.size:
            raise damaged(f"{self.name} is damaged", "it ends too early")
        manifest, maps = _LENGTHS.unpack_from(self._begin, HEADER_BYTES)
        if manifest > _MOST_MANIFEST_BYTES or maps > _MOST_MAPS_BYTES:
            raise damaged(f"{self.name} is damaged", "it has lengths that no checkpoint has")
        self._manifest_at = HEADER_BYTES + _LENGTHS.size
        self._maps_at = self._manifest_at + manifest
        self.blobs_at = self._maps_at + maps
        self._seal = files.sealer.file(header, self.name)

    def manifest(self) -> Manifest:
        """What the catalogue says."""
        sealed = self._read(self._manifest_at, self._maps_at)
        sealed = self._seal.open(Box.MANIFEST, 0, sealed)
        plain = unpack(sealed, None, self.name, _MOST_MANIFEST_BYTES)
        return Manifest.decode(self._id, plain)

    def maps(self) -> bytes:
        """The maps, encoded."""
        return self._seal.open(Box.MAPS, 0, self._read(self._maps_at, self.blobs_at))

    def blob(self, manifest: Manifest, number: int) -> bytes:
        """The blob of that number."""
        start = self.blobs_at + sum(blob.stored_bytes for blob in manifest.blobs[:number])
        blob = manifest.blobs[number]
        sealed = self._read(start, start + blob.stored_bytes)
        return unpack(self._seal.open(Box.BLOB, number, sealed), blob.size_bytes, self.name)

    def _read(self, start: int, end: int) -> bytes:
        if end <= len(self._begin):
            return self._begin[start:end]
        return self._files.backend.read(self.name, start, end - start)


class NewCheckpointFile:
    """An unfinished checkpoint file; nothing is written before `write`."""

    def __init__(self, files: CheckpointFiles, checkpoint_id: str) -> None:
        self._files, self.name = files, f"{CHECKPOINTS}/{checkpoint_id}"
        self._header = files.header(FileKind.CHECKPOINT).new()
        self._seal = files.sealer.file(self._header, self.name)
        self.blobs: list[BlobFacts] = []
        self._boxes: list[bytes] = []

    def add_blob(self, name: str, data: bytes) -> None:
        """Add a blob."""
        box = self._seal.seal(Box.BLOB, len(self._boxes), compress(data, _LEVEL))
        self.blobs.append(BlobFacts(name, len(data), len(box)))
        self._boxes.append(box)

    def write(self, manifest: Manifest, maps: bytes) -> None:
        """Write it durably. Raises ThereAlreadyError if another exists; StorageError."""
        first = self._seal.seal(Box.MANIFEST, 0, compress(manifest.encode(), _LEVEL))
        second = self._seal.seal(Box.MAPS, 0, maps)
        lengths = _LENGTHS.pack(len(first), len(second))
        try:
            self._files.write(self.name, [self._header, lengths, first, second, *self._boxes])
        except RefusedError:
            # Object storage may have stored it and been asked again because its answer was lost.
            if not self.is_there():
                raise

    def is_there(self) -> bool:
        """Whether the object of its name is this one: each has its own salt. Raises
        StorageError.
        """
        with uncached(self._files.backend), suppress(MissingError):
            return self._files.backend.read(self.name, 0, len(self._header)) == self._header
        return False


def require_agreement(manifest: Manifest, maps: Maps) -> None:
    """Raises DamagedError unless manifest and maps have the same areas."""
    reply = {area.name: (area.size_bytes, area.chunk_bytes) for area in manifest.areas}
    mapped = {name: (area.size_bytes, area.chunk_bytes) for name, area in maps.areas.items()}
    if reply != mapped:
        raise damaged(
            f"{CHECKPOINTS}/{manifest.id} is damaged", "its manifest and its maps are of two shapes"
        )


def encode_maps(maps: Maps, base: Maps | None) -> bytes:
    """Encode maps as their difference to `base`, whose packs they list first."""
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
    """An area of the base, resized to the one based on it; zeroes if the base lacks it."""
    area = base.areas.get(name)
    if area is None or area.chunk_bytes != chunk_bytes:
        return np.zeros(chunks, dtype=np.uint64)
    return resized(area.refs, chunks)
