"""zstd, for what a store keeps: small and large, by several threads."""

import threading

import zstandard

from vmckpt.store.errors import damaged, too_large

_per_thread = threading.local()


def compress(data: bytes | bytearray, level: int) -> bytes:
    """zstd, with the size of what it was."""
    name = f"compressor_{level}"
    compressor = getattr(_per_thread, name, None)
    if compressor is None:
        compressor = zstandard.ZstdCompressor(level=level)
        setattr(_per_thread, name, compressor)
    packed: bytes = compressor.compress(data)
    return packed


def unpack(
    data: bytes, size: int | None, name: str, most: int = 1 << 30, *, fitting: int = 1 << 62
) -> bytes:
    """The inverse; `size` is what it has to be, `fitting` what this machine has room for.

    Raises DamagedError, UnreadableError.
    """
    try:
        expected = zstandard.frame_content_size(data)
        if expected != size if size is not None else not 0 <= expected <= most:
            raise damaged(f"{name} is damaged", f"a part of it is {expected} bytes")
        if expected > fitting:
            raise too_large(name, f"a part of it is {expected} bytes")
        decompressor = getattr(_per_thread, "decompressor", None)
        if decompressor is None:
            decompressor = _per_thread.decompressor = zstandard.ZstdDecompressor()
        plain: bytes = decompressor.decompress(data)
    except MemoryError as exc:
        raise too_large(name, f"a part of it is {expected} bytes") from exc
    except zstandard.ZstdError as exc:
        raise damaged(f"{name} is damaged", f"zstd: {exc}") from exc
    return plain
