"""Memory of another process, by address: what it holds."""

import ctypes
import errno
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from vmckpt.memory.dirty_pages import Mapping
from vmckpt.memory.ram_file import Span

_MOST_PARTS = 1024  # UIO_MAXIOV
MOST_READ_BYTES = 1 << 30  # of one call; the kernel ends one at 2 GiB
_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t


class _Part(ctypes.Structure):
    """struct iovec."""

    _fields_ = [("start", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def read_memory(pid: int, spans: Sequence[Span]) -> bytes:
    """The content of spans of addresses of process `pid`, in sequence. Raises OSError."""
    buffer = bytearray(sum(end - start for start, end in spans))
    ours = ctypes.addressof(ctypes.c_char.from_buffer(buffer)) if buffer else 0
    at = 0
    for some in _calls(spans):
        length = sum(end - start for start, end in some)
        theirs = (_Part * len(some))(*(_Part(start, end - start) for start, end in some))
        into = _Part(ours + at, length)
        read = _libc.process_vm_readv(pid, ctypes.byref(into), 1, theirs, len(some), 0)
        if read != length:
            code = ctypes.get_errno() if read < 0 else errno.EFAULT
            raise OSError(code, f"process_vm_readv: {os.strerror(code)}")
        at += length
    return bytes(buffer)


def laid_out(spans: Sequence[Span], offset: int = 0) -> tuple[Mapping, ...]:
    """Spans of addresses as one image, one after the other, the first one at `offset`."""
    offsets = accumulate((end - start for start, end in spans), initial=offset)
    return tuple(Mapping(*span, at) for span, at in zip(spans, offsets, strict=False))


def addresses_of(mappings: Sequence[Mapping], spans: Iterable[Span]) -> list[Span]:
    """Where spans of the image are in the process. It is called in pauses."""
    shifts = [one.start - one.offset for one in mappings]
    if len(mappings) == 1:
        (shift,) = shifts
        return [(start + shift, end + shift) for start, end in spans]
    ends = [one.offset + one.end - one.start for one in mappings]
    found, last = list[Span](), len(ends) - 1
    for start, end in spans:
        at = bisect_right(ends, start)
        while at < last and end > ends[at]:
            found.append((start + shifts[at], ends[at] + shifts[at]))
            start, at = ends[at], at + 1  # noqa: PLW2901 - the rest is in the next block
        found.append((start + shifts[at], end + shifts[at]))
    return found


def _calls(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """The spans of each call, in sequence: no more, and no longer, than the kernel takes."""
    some, left = list[Span](), MOST_READ_BYTES
    for start, end in spans:
        at = start
        while at < end:
            some.append((at, min(end, at + left)))
            left -= some[-1][1] - at
            at = some[-1][1]
            if not left or len(some) == _MOST_PARTS:
                yield some
                some, left = [], MOST_READ_BYTES
    if some:
        yield some
