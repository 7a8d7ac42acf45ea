"""What every file of a store begins with.

    offset 0   b"\\x89VMCKPT\\n"
           8   version of the format    unsigned 16 bit, big-endian as all numbers in heads
          10   kind                     one byte: B bundle, C checkpoint, D damage, I pin, M maps,
                                    P pack
          11   1: encrypted             one byte
          12   zero                     4 bytes
          16   the store's id           16 bytes
          32   salt                     16 bytes, at random

No checksum: the keys of all that follows come from these bytes and the file's name in the store
(`store/sealing/seal.py`).
"""

import os
import struct
from enum import Enum
from typing import NamedTuple

from vmckpt.store.errors import damaged

MAGIC = b"\x89VMCKPT\n"
VERSION = 1
SALT_BYTES = 16
_HEADER = struct.Struct(">8sHcB4x16s16s")
HEADER_BYTES = _HEADER.size


class FileKind(Enum):
    """The kind of a file."""

    BUNDLE = b"B"
    CHECKPOINT = b"C"
    DAMAGE = b"D"
    MAPS = b"M"
    PACK = b"P"
    PIN = b"I"


class Header(NamedTuple):
    """A file's header without its salt."""

    kind: FileKind
    encrypted: bool
    store: bytes

    def new(self) -> bytes:
        """A new file's header, with a new salt."""
        return self._pack(os.urandom(SALT_BYTES))

    def read(self, data: bytes, name: str) -> bytes:
        """Read the header at the start of `data`. Raises DamagedError if it is not valid."""
        found = data[:HEADER_BYTES]
        if len(found) == HEADER_BYTES and found == self._pack(found[-SALT_BYTES:]):
            return found
        why = "its header is not what was written"
        if len(found) == HEADER_BYTES:
            magic, version, *_ = _HEADER.unpack(found)
            if magic == MAGIC and version > VERSION:
                why = f"it has format {version}, and this vmckpt reads {VERSION}"
        raise damaged(f"{name} cannot be read", why)

    def _pack(self, salt: bytes) -> bytes:
        encrypted = int(self.encrypted)
        return _HEADER.pack(MAGIC, VERSION, self.kind.value, encrypted, self.store, salt)
