"""Runs of pages with a property."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from vmckpt.memory.ram_file import PAGE_BYTES, Span


def runs(pages: NDArray[np.bool_]) -> Iterator[Span]:
    """The runs of set flags, ascending, in bytes from the first page on."""
    edges = np.flatnonzero(np.diff(pages, prepend=False, append=False)) * PAGE_BYTES
    yield from zip(edges[0::2].tolist(), edges[1::2].tolist(), strict=True)


def union(ours: Sequence[Span], theirs: Sequence[Span]) -> Iterator[Span]:
    """The union of both, ascending and disjoint."""
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
