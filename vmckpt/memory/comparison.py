"""Which pages of a guest's RAM file were written, found by comparing all of it. On every kernel.

A copy of the file is kept, as it was found last: a page that differs from it was written, by any
process. It costs as much memory again, and each look reads all of both. What is copied out is the
copy: a page that was found differing is not read again, so that one that is written and restored
meanwhile is the same page for the reader of the copy as here.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from vmckpt.memory.ram_file import PAGE_BYTES, RamFile, Span, mapped
from vmckpt.memory.runs import runs

# What is compared at once stays in the processor's cache.
_CHUNK_BYTES = 64 * PAGE_BYTES
_WORDS = PAGE_BYTES // 8


class Comparison:
    """The pages that differ from the copy; the copy is what `copy` gives."""

    name = "comparison"
    # Whatever was written by the next look is found then, in flight or not.
    needs_stop = False

    def __init__(self, ram: RamFile) -> None:
        self._ram = ram
        self._now = np.frombuffer(ram.view, np.uint64)
        # Zero, and without memory until it is written to, as the file is.
        self._copy = np.zeros(ram.size_bytes // 8, np.uint64)
        self._held = list[Span]()
        self.take_spans()

    def count(self) -> int:
        """How many were written since they were last taken. Reads all; changes nothing."""
        return sum(end - start for start, end in self._differing()) // PAGE_BYTES

    def take_spans(self, spared: Sequence[Span] = ()) -> list[Span]:
        """The same as spans of the file, in bytes, and the copy is as the file is from here on.

        Nothing is `spared`: there is no fault to spare a guest.
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
        """The spans of the copy that may be other than zero."""
        return self._held

    def copy(self, spans: Sequence[Span]) -> bytes:
        """What they held when they were last taken, one after the other."""
        return b"".join([self._copy[start // 8 : end // 8].data for start, end in spans])

    def let_go(self) -> None:
        """Of the file's memory, before the file is closed."""
        del self._now

    def _differing(self) -> Iterator[Span]:
        """Ascending; runs may touch."""
        # Looking at a hole would give it memory: only where there was some is it seen to.
        for start, end in _union(self._held, self._ram.extents()):
            for at in range(start, end, _CHUNK_BYTES):
                words = slice(at // 8, min(end, at + _CHUNK_BYTES) // 8)
                changed = self._now[words] != self._copy[words]
                if changed.any():
                    pages = changed.reshape(-1, _WORDS).any(axis=1)
                    yield from ((at + a, at + b) for a, b in runs(pages))


def _union(ours: Sequence[Span], theirs: Sequence[Span]) -> Iterator[Span]:
    """What is in either, ascending, apart from one another."""
    begun: Span | None = None
    for start, end in sorted([*ours, *theirs]):
        if begun is not None and start <= begun[1]:
            begun = begun[0], max(begun[1], end)
            continue
        if begun is not None:
            yield begun
        begun = start, end
    if begun is not None:
        yield begun


@contextmanager
def compared(ram_file: Path, ram_bytes: int | None = None) -> Iterator[Comparison]:
    """Compare it for the block. At its beginning every page counts as not written.

    Raises OSError.
    """
    with mapped(ram_file, ram_bytes) as ram:
        comparison = Comparison(ram)
        try:
            yield comparison
        finally:
            comparison.let_go()
