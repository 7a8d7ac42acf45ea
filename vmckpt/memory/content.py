"""What guest pages hold: nothing, something that compresses, or noise.

Reads are preads of the RAM file: through a mapping a hole of a tmpfs file would be given memory.
"""

import os
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import zstandard

from vmckpt.memory.dirty_pages import PageSet
from vmckpt.memory.ram_file import PAGE_BYTES, Span, extents, open_fd

# The share of zero pages is then right within 1 % of all pages, in 19 of 20 cases.
SAMPLED_PAGES = 16384
# QEMU's channels compress as one stream what goes over them: a page by those before it.
COMPRESSED_PAGES, ZSTD_LEVEL = 4096, 1
# Memory is described in so many pieces.
PIECES = 64
# A page that shrinks to less than this part is called compressible.
COMPRESSIBLE_RATIO = 0.75
_ZERO_PAGE = bytes(PAGE_BYTES)


class Content(NamedTuple):
    """Parts of all pages, adding up to 1; `ratio` is what zstd leaves of the non-zero ones."""

    zero: float
    compressible: float
    incompressible: float
    ratio: float


class Piece(NamedTuple):
    """Of a piece of memory: what part the file does not hold yet, and what part is zero pages.

    Pages that it does not hold are zero pages too.
    """

    hole: float
    zero: float


def ram_content(ram_file: Path) -> Content:
    """What the whole file holds, from a sample; holes are zero pages. Raises OSError."""
    with open_fd(os.open(ram_file, os.O_RDONLY | os.O_CLOEXEC)) as fd:
        pages = os.fstat(fd).st_size // PAGE_BYTES
        present = _pages(extents(fd, pages * PAGE_BYTES))
        inside = sum(len(extent) for extent in present)
        found = _look(fd, _sample(present, inside))
    share = inside / pages if pages else 0.0
    return Content(
        1 - share * (1 - found.zero),
        share * found.compressible,
        share * found.incompressible,
        found.ratio,
    )


def ram_layout(ram_file: Path) -> tuple[Piece, ...]:
    """What equal pieces of the file are, in order: as much as a forecast wants. Raises OSError."""
    with open_fd(os.open(ram_file, os.O_RDONLY | os.O_CLOEXEC)) as fd:
        pages = os.fstat(fd).st_size // PAGE_BYTES
        present = _pages(extents(fd, pages * PAGE_BYTES))
        length = max(-(-pages // PIECES), 1)
        return tuple(
            _piece(fd, present, range(start, min(start + length, pages)))
            for start in range(0, pages, length)
        )


def _piece(fd: int, present: Sequence[range], piece: range) -> Piece:
    inside = [
        range(max(extent.start, piece.start), min(extent.stop, piece.stop))
        for extent in present
        if extent.start < piece.stop and extent.stop > piece.start
    ]
    held = [page for extent in inside for page in extent]
    looked = random.sample(held, min(len(held), SAMPLED_PAGES // PIECES))
    zero = sum(os.pread(fd, PAGE_BYTES, page * PAGE_BYTES) == _ZERO_PAGE for page in looked)
    hole = 1 - len(held) / len(piece)
    return Piece(hole, hole + (1 - hole) * zero / len(looked) if looked else 1.0)


def pages_content(ram_file: Path, chosen: PageSet) -> Content:
    """What the chosen pages hold, from a sample of them. Raises OSError."""
    numbers = list(chosen.numbers())
    if len(numbers) > SAMPLED_PAGES:
        numbers = sorted(random.sample(numbers, SAMPLED_PAGES))
    with open_fd(os.open(ram_file, os.O_RDONLY | os.O_CLOEXEC)) as fd:
        return _look(fd, numbers)


def _pages(spans: Iterable[Span]) -> list[range]:
    return [range(start // PAGE_BYTES, -(-end // PAGE_BYTES)) for start, end in spans]


def _sample(extents: Sequence[range], pages: int) -> Iterable[int]:
    if pages <= SAMPLED_PAGES:
        return [page for extent in extents for page in extent]
    chosen = sorted(random.sample(range(pages), SAMPLED_PAGES))
    numbers, before, extent = [], 0, iter(extents)
    current = next(extent)
    for place in chosen:
        while place - before >= len(current):
            before += len(current)
            current = next(extent)
        numbers.append(current[place - before])
    return numbers


def _look(fd: int, numbers: Iterable[int]) -> Content:
    looked = zero = 0
    kept: list[bytes] = []
    for number in numbers:
        page = os.pread(fd, PAGE_BYTES, number * PAGE_BYTES)
        looked += 1
        if page == _ZERO_PAGE:
            zero += 1
        else:
            kept.append(page)
    if not kept:
        return Content(1.0, 0.0, 0.0, 1.0)
    chosen = sorted(random.sample(range(len(kept)), min(COMPRESSED_PAGES, len(kept))))
    ratios = list(_ratios(kept[place] for place in chosen))
    compressible = sum(ratio < COMPRESSIBLE_RATIO for ratio in ratios) / len(ratios)
    filled = 1 - zero / looked
    return Content(
        zero / looked,
        filled * compressible,
        filled * (1 - compressible),
        sum(ratios) / len(ratios),
    )


def _ratios(pages: Iterable[bytes]) -> Iterator[float]:
    """What is left of each page when they go one after the other through one channel."""
    stream = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compressobj()
    for page in pages:
        left = len(stream.compress(page)) + len(stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))
        yield min(1.0, left / PAGE_BYTES)
