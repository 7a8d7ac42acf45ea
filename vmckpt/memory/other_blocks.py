"""Memory of a QEMU that is not its guest's RAM file: of graphics cards, and ROMs.

It has no file that another process could map, so it is read by process_vm_readv(2). Its pages are
found together with those of the RAM file: in offsets behind the file's end.
"""

import ctypes
import errno
import os
from collections.abc import Iterator, Sequence

from vmckpt.memory.dirty_pages import Mapping
from vmckpt.memory.ram_file import Span

_MOST_PARTS = 1024  # UIO_MAXIOV
_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t


class _Part(ctypes.Structure):
    """struct iovec."""

    _fields_ = [("start", ctypes.c_void_p), ("length", ctypes.c_size_t)]


class OtherBlocks:
    """Spans of addresses in process `pid`, as one image: its offsets begin at `behind`."""

    def __init__(self, pid: int, spans: Sequence[Span], behind: int) -> None:
        self._pid, self._behind, self._written = pid, behind, list[Span]()
        self.mappings, at = list[Mapping](), behind
        for start, end in spans:
            self.mappings.append(Mapping(start, end, at))
            at += end - start
        self.size_bytes = at - behind

    def noted(self, spans: list[Span]) -> list[Span]:
        """Note which of these are written pages of this image: they come last. Returns the rest."""
        last = len(spans)
        while last and spans[last - 1][0] >= self._behind:
            last -= 1
            start, end = spans[last]
            self._written.append((start - self._behind, end - self._behind))
        return spans[:last]

    def take_spans(self) -> list[Span]:
        """The spans of the image that were written since the last time; some may overlap."""
        taken, self._written = self._written, []
        return taken

    def copy(self, spans: Sequence[Span]) -> bytes:
        """The current content of the spans, in sequence. Raises OSError."""
        buffer = bytearray(sum(end - start for start, end in spans))
        at, address = 0, ctypes.addressof(ctypes.c_char.from_buffer(buffer)) if buffer else 0
        parts = list(self._addresses(spans))
        for first in range(0, len(parts), _MOST_PARTS):
            some = parts[first : first + _MOST_PARTS]
            length = sum(end - start for start, end in some)
            theirs = (_Part * len(some))(*(_Part(start, end - start) for start, end in some))
            ours = _Part(address + at, length)
            read = _libc.process_vm_readv(self._pid, ctypes.byref(ours), 1, theirs, len(some), 0)
            if read != length:
                code = ctypes.get_errno() if read < 0 else errno.EFAULT
                raise OSError(code, f"process_vm_readv: {os.strerror(code)}")
            at += length
        return bytes(buffer)

    def _addresses(self, spans: Sequence[Span]) -> Iterator[Span]:
        """Where they are in the process."""
        for start, end in spans:
            for mapping in self.mappings:
                shift = mapping.start - (mapping.offset - self._behind)
                first, last = max(start + shift, mapping.start), min(end + shift, mapping.end)
                if first < last:
                    yield first, last
