"""Finds the written pages of a guest's RAM file by comparing all of it. Works on every kernel.

It keeps a copy of the file's last state: a page that differs was written, by any process. It takes
as much memory again, and each scan reads both completely. What is copied out is the copy: a page
that was found to differ is not read again, so that one that is written and restored meanwhile is
the same page for the reader of the copy as here.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from vmckpt.memory.ram_file import PAGE_BYTES, RamFile, Span, mapped
from vmckpt.memory.runs import runs, union

# A chunk stays in the processor's cache while it is compared.
_CHUNK_BYTES = 64 * PAGE_BYTES
_WORDS = PAGE_BYTES // 8


class Comparison:
    """The pages that differ from the copy; `copy` returns the copy."""

    name = "comparison"
    # A write before the next scan is found then, in flight or not.
    needs_stop = False
    others = None

    def __init__(self, ram: RamFile) -> None:
        self._ram = ram
        self._now = np.frombuffer(ram.view, np.uint64)
        # Zero, and without memory until it is written, like the file.
        self._copy = np.zeros(ram.size_bytes // 8, np.uint64)
        self._held = list[Span]()
        self.take_spans()

    def count(self) -> int:
        """How many were written since they were last taken. Reads everything; changes nothing."""
        return sum(end - start for start, end in self._differing()) // PAGE_BYTES

    def take_spans(self, spared: Sequence[Span] = ()) -> list[Span]:
        """The written pages as spans of the file, in bytes; updates the copy to the file's content.

        Ignores `spared`: there is no fault to spare a guest.
        """
        spans = list[Span]()
        for start, end in self._differing():
            words = slice(start // 8, end // 8)
            self._copy[words] = self._now[words]
            touches = spans and spans[-1][1] == start
            spans.append((spans.pop()[0] if touches else start, end))
        self._held = self._ram.extents()
        return spans

    def extents(self) -> list[Span]:
        """The spans of the copy that may be nonzero."""
        return self._held

    def copy(self, spans: Sequence[Span]) -> bytes:
        """Their content when they were last taken, in sequence."""
        return b"".join([self._copy[start // 8 : end // 8].data for start, end in spans])

    def release(self) -> None:
        """Release the file's memory, before the file is closed."""
        del self._now

    def _differing(self) -> Iterator[Span]:
        """Differing spans, ascending; they may touch."""
        # Reading a hole would allocate it: compare only where there was memory.
        for start, end in union(self._held, self._ram.extents()):
            for at in range(start, end, _CHUNK_BYTES):
                words = slice(at // 8, min(end, at + _CHUNK_BYTES) // 8)
                changed = self._now[words] != self._copy[words]
                if changed.any():
                    pages = changed.reshape(-1, _WORDS).any(axis=1)
                    yield from ((at + a, at + b) for a, b in runs(pages))


@contextmanager
def compared(ram_file: Path, ram_bytes: int | None = None) -> Iterator[Comparison]:
    """Track the file by comparison for the block. Initially every page counts as not written.

    Raises OSError.
    """
    with mapped(ram_file, ram_bytes) as ram:
        comparison = Comparison(ram)
        try:
            yield comparison
        finally:
            comparison.release()
