"""Boxes: authenticated data that is valid only in its own position.

A file's key is derived from the store's key, the file's header (half of it is salt) and its name; a
box's nonce is its kind and number. So a box is valid in one position only, no key and nonce repeat,
and a header with one flipped bit opens nothing. A tag is 16 bytes: keyed BLAKE3, or AES-256-GCM's
if the store is encrypted.
"""

import struct
from enum import IntEnum
from hmac import compare_digest
from typing import Protocol

from blake3 import blake3

from vmckpt.store.backends.backend import Buffer
from vmckpt.store.errors import damaged

TAG_BYTES = 16
HASH_BYTES = 16
_NONCE = struct.Struct(">B3xQ")


class Box(IntEnum):
    """The kind of a box's content."""

    FRAME = 1
    HASHES = 2
    TABLE = 3
    TRAILER = 4
    MANIFEST = 5
    MAPS = 6
    BLOB = 7
    KEY = 8
    PIN = 9
    DAMAGED = 10
    LIST = 11


class Seal(Protocol):
    """Makes and opens the boxes of one file."""

    def seal(self, box: Box, number: int, data: Buffer) -> bytes:
        """Seal `data` in a box, which is TAG_BYTES longer."""

    def open(self, box: Box, number: int, sealed: Buffer) -> bytes:
        """Open a box. Raises DamagedError."""


class Sealer:
    """The keys of a store, derived from its secret of 32 bytes."""

    def __init__(self, secret: bytes, *, encrypted: bool) -> None:
        self.encrypted = encrypted
        self._chunk_key = _derive(secret, b"names of chunks")
        self._file_key = _derive(secret, b"keys of files")

    def file(self, header: bytes, name: str) -> Seal:
        """The seal of the file of that name."""
        key = _derive(self._file_key, header + name.encode())
        return _Encrypted(key, name) if self.encrypted else _Clear(key, name)

    def hashes(self, data: memoryview, chunk_bytes: int) -> bytes:
        """The chunks' names, HASH_BYTES each.

        Keyed by a secret of the store: no guest can construct two pages with one name.
        """
        key = self._chunk_key
        return b"".join(
            [
                blake3(data[at : at + chunk_bytes], key=key).digest(HASH_BYTES)
                for at in range(0, len(data), chunk_bytes)
            ]
        )


class _Clear:
    def __init__(self, key: bytes, what: str) -> None:
        self._key, self._what = key, what

    def seal(self, box: Box, number: int, data: Buffer) -> bytes:
        return b"".join((data, self._tag(box, number, data)))

    def open(self, box: Box, number: int, sealed: Buffer) -> bytes:
        view = memoryview(sealed)
        data, tag = view[:-TAG_BYTES], view[-TAG_BYTES:]
        if len(view) < TAG_BYTES or not compare_digest(self._tag(box, number, data), tag):
            raise _broken(self._what, box, number)
        return bytes(data)

    def _tag(self, box: Box, number: int, data: Buffer) -> bytes:
        # The nonce comes last, so that large data is not copied.
        return blake3(data, key=self._key).update(_NONCE.pack(box, number)).digest(TAG_BYTES)


class _Encrypted:
    def __init__(self, key: bytes, what: str) -> None:
        # The import is slow, and most stores do not need it.
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._aead, self._what, self._invalid = AESGCM(key), what, InvalidTag

    def seal(self, box: Box, number: int, data: Buffer) -> bytes:
        return self._aead.encrypt(_NONCE.pack(box, number), data, None)

    def open(self, box: Box, number: int, sealed: Buffer) -> bytes:
        try:
            return self._aead.decrypt(_NONCE.pack(box, number), sealed, None)
        except (self._invalid, ValueError) as exc:
            raise _broken(self._what, box, number) from exc


def keyed_tag(secret: bytes, what: bytes, data: bytes) -> bytes:
    """32 bytes that only a holder of the secret can compute, for one purpose."""
    return blake3(data, key=_derive(secret, what)).digest(32)


def _broken(what: str, box: Box, number: int) -> Exception:
    return damaged(f"{what} is damaged", f"{box.name.lower()} {number} is not what was written")


def _derive(key: bytes, what: bytes) -> bytes:
    return blake3(what, key=key).digest(32)
