"""Memory of another process, by address: what it holds, and which of it was ever touched."""

import ctypes
import errno
import os
from collections.abc import Sequence

from vmckpt.memory.ram_file import Span

_MOST_PARTS = 1024  # UIO_MAXIOV
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
    for first in range(0, len(spans), _MOST_PARTS):
        some = spans[first : first + _MOST_PARTS]
        length = sum(end - start for start, end in some)
        theirs = (_Part * len(some))(*(_Part(start, end - start) for start, end in some))
        into = _Part(ours + at, length)
        read = _libc.process_vm_readv(pid, ctypes.byref(into), 1, theirs, len(some), 0)
        if read != length:
            code = ctypes.get_errno() if read < 0 else errno.EFAULT
            raise OSError(code, f"process_vm_readv: {os.strerror(code)}")
        at += length
    return bytes(buffer)
