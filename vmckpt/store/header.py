"""What every file of a store begins with.

    offset 0   b"\\x89VMCKPT\\n"
           8   version of the format    unsigned 16 bit, big-endian as all numbers in heads
          10   kind                     one byte: C checkpoint, M maps, P pack
          11   1: encrypted             one byte
          12   generation               unsigned 32 bit; how often a pack was rewritten
          16   the store's id           16 bytes
          32   the file's id            16 bytes

No checksum: the keys of all that follows come from these bytes (`sealing/seal.py`).
"""

import struct
from enum import Enum
from typing import NamedTuple

from vmckpt.store.errors import damaged

MAGIC = b"\x89VMCKPT\n"
VERSION = 1
_HEADER = struct.Struct(">8sHcBI16s16s")
HEADER_BYTES = _HEADER.size


class Kind(Enum):
    """What a file is."""

    CHECKPOINT = b"C"
    MAPS = b"M"
    PACK = b"P"


class Header(NamedTuple):
    """What stands at a file's beginning."""

    kind: Kind
    encrypted: bool
    store: bytes
    id: bytes
    generation: int = 0

    def pack(self) -> bytes:
        """As bytes."""
        return _HEADER.pack(
            MAGIC,
            VERSION,
            self.kind.value,
            self.encrypted,
            self.generation,
            self.store,
            self.id,
        )

    def require(self, data: bytes, name: str) -> None:
        """Raises DamagedError unless `data` begins with this header."""
        if data[:HEADER_BYTES] == self.pack():
            return
        why = "its header is not what was written"
        if len(data) >= HEADER_BYTES:
            magic, version, *_ = _HEADER.unpack_from(data)
            if magic == MAGIC and version > VERSION:
                why = f"it has format {version}, and this vmckpt reads {VERSION}"
        raise damaged(f"{name} cannot be read", why)
