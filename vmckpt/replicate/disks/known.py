"""The known content of the standby's copy of a disk, so that only differences are sent."""

import hashlib
from collections.abc import Callable
from functools import cache

BLOCK_BYTES = 64 << 10
DIGEST_BYTES = 32
# No content has this digest.
_UNKNOWN = bytes(DIGEST_BYTES)


def blocks_of(size_bytes: int) -> int:
    """How many blocks a disk has; the last one may be short."""
    return -(-size_bytes // BLOCK_BYTES)


def digest_of(block: bytes | memoryview) -> bytes:
    """The digest of one block's content."""
    return hashlib.sha256(block).digest()


@cache
def zero_digest(length_bytes: int) -> bytes:
    """The digest of a block of zeroes, which may be the short one at a disk's end."""
    return digest_of(bytes(length_bytes))


class KnownBlocks:
    """The digest of each block of one disk's copy, if known."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._digests = bytearray(DIGEST_BYTES * blocks_of(size_bytes))
        self._next_block = 0

    @property
    def complete(self) -> bool:
        """Whether all of it is known."""
        return self._next_block == blocks_of(self.size_bytes)

    def tell(self, first_block: int, digests: bytes) -> None:
        """Add the digests of some blocks. Raises ValueError unless they come in order."""
        end = first_block + len(digests) // DIGEST_BYTES
        if first_block != self._next_block or len(digests) % DIGEST_BYTES:
            raise ValueError(f"digests from block {first_block} on, not from {self._next_block}")
        if end > blocks_of(self.size_bytes):
            raise ValueError(f"digests up to block {end} of {blocks_of(self.size_bytes)}")
        self._digests[DIGEST_BYTES * first_block : DIGEST_BYTES * end] = digests
        self._next_block = end

    def differing(self, offset_bytes: int, data: bytes) -> list[tuple[int, int]]:
        """Where `data`, written at an offset, may change the copy: starts and ends on the disk.

        From now on the copy is assumed to hold all of it.
        """
        view = memoryview(data)
        return self._runs(
            offset_bytes,
            len(data),
            lambda start, end: digest_of(view[start - offset_bytes : end - offset_bytes]),
        )

    def differing_from_zero(self, offset_bytes: int, length_bytes: int) -> list[tuple[int, int]]:
        """Like `differing`, for zeroes."""
        return self._runs(offset_bytes, length_bytes, lambda start, end: zero_digest(end - start))

    def _runs(
        self, offset_bytes: int, length_bytes: int, digest: Callable[[int, int], bytes]
    ) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        at, end = offset_bytes, offset_bytes + length_bytes
        while at < end:
            block = at // BLOCK_BYTES
            start = block * BLOCK_BYTES
            block_end = min(start + BLOCK_BYTES, self.size_bytes)
            stop = min(block_end, end)
            is_whole = at == start and stop == block_end
            now = digest(at, stop) if is_whole else _UNKNOWN
            span = slice(DIGEST_BYTES * block, DIGEST_BYTES * (block + 1))
            if not is_whole or self._digests[span] != now:
                self._digests[span] = now
                if found and found[-1][1] == at:
                    found[-1] = (found[-1][0], stop)
                else:
                    found.append((at, stop))
            at = stop
        return found
