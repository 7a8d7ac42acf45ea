"""zstd compression for the store: small and large data, in several threads."""

import threading

import zstandard

from vmckpt.store.errors import damaged, too_large

_per_thread = threading.local()


def compress(data: bytes | bytearray, level: int) -> bytes:
    """Compress; the frame includes the original size."""
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
    """Decompress; `size` is the required size, `fitting` what this machine has memory for.

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
