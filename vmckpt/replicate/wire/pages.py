"""Guest pages on the wire: zero pages by number, changed words of a page, or the whole page.

A PAGES payload is 32 bytes of numbers and two sections (`sections`):

    counts     runs of zero pages, of patched ones, of full ones   3 x unsigned 32 bit, big-endian
               zero                                                4 bytes
    sum        of the 64-bit words of patched and full pages       unsigned 64 bit, big-endian
    words      how many all patches change                         unsigned 64 bit, big-endian
    section 1  runs: first pages, then lengths                     unsigned 32 bit, little-endian
               a bit per word of each patched page: has it changed
               the changed words as they are now
    section 2  full pages

A patch has the new words, not an XOR with the old ones: it may be applied twice, and words of
text pack better (measured: 0.015 of the raw size instead of 0.025; counters are the reverse,
0.028 and 0.013). Pages that the standby already has unchanged cost nothing.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vmckpt.replicate.wire.errors import damaged, protocol_violation
from vmckpt.replicate.wire.frames import Buffer
from vmckpt.replicate.wire.sections import Packer, unpack

PAGE_BYTES = 4096
WORDS = PAGE_BYTES // 8
# A batch stays in the processor's cache while it is encoded.
BATCH_PAGES = 256
# A larger batch is invalid.
MOST_PAGES = 1 << 16
# A page is sent whole if more than a third of it changed.
MOST_PATCHED_WORDS = WORDS // 3
_HEAD = struct.Struct(">III4xQQ")

Numbers = NDArray[np.int64]
# Pages by words: shape (pages, 512).
Words = NDArray[np.uint64]


def as_words(memory: Buffer) -> Words:
    """Whole pages of memory as words, without a copy."""
    return np.frombuffer(memory, dtype="<u8").reshape(-1, WORDS)


def nonzero_pages(memory: Buffer) -> int:
    """How many pages are not zero: those that cost a link more than their number."""
    contents = as_words(memory)
    return len(contents) - int(np.count_nonzero(_zero(contents)))


class Shadow:
    """The primary's copy of the guest memory that the standby has, page by page.

    Initially it is zero everywhere, like a replica's new file. It takes memory as its pages become
    nonzero.
    """

    def __init__(self, ram_pages: int) -> None:
        self.words: Words = np.zeros((ram_pages, WORDS), dtype="<u8")


class Encoder:
    """Makes PAGES payloads. Each builds on those before: the standby applies them in order.

    Without a `shadow` every page is sent whole. The packers may be given the link's speed.
    """

    def __init__(self, shadow: Shadow | None) -> None:
        self.shadow = shadow
        self.patches, self.wholes = Packer(), Packer()

    def batches(self, numbers: Numbers, contents: Words) -> Iterator[tuple[int, list[Buffer]]]:
        """For pages, by number, and their contents in the same order: how many are sent, and
        payloads.

        No number may come twice.
        """
        for at in range(0, len(numbers), BATCH_PAGES):
            end = at + BATCH_PAGES
            pages, payload = self._encode(numbers[at:end], contents[at:end])
            if pages:
                yield pages, payload

    def _encode(self, numbers: Numbers, contents: Words) -> tuple[int, list[Buffer]]:
        zero = _zero(contents)
        if self.shadow is None:
            changed = np.zeros((0, WORDS), dtype=bool)
            same = patched = np.zeros(len(numbers), dtype=bool)
        else:
            rows = _as_rows(numbers)
            changed, same, patched = _compare(self.shadow.words[rows], contents)
            patched &= ~zero
            self.shadow.words[rows] = contents
        whole = ~(zero | same | patched)
        zero &= ~same
        kinds = [numbers[chosen] for chosen in (zero, patched, whole)]
        pages = sum(map(len, kinds))
        if not pages:
            return 0, []
        if patched.all():
            bits, words = changed, contents[changed]
        else:
            bits = changed[patched[: len(changed)]]
            words = contents[patched][bits]
        wholes = contents if whole.all() else contents[whole]
        sums = np.add.reduce(contents, axis=1)
        runs = [_runs(chosen) for chosen in kinds]
        tables = np.concatenate([firsts for firsts, _ in runs] + [lengths for _, lengths in runs])
        head = _HEAD.pack(
            *(len(firsts) for firsts, _ in runs),
            int(np.add.reduce(sums[patched | whole])),
            len(words),
        )
        patch = [_bytes(tables.astype("<u4")), _bytes(np.packbits(bits)), _bytes(words)]
        return pages, [head, *self.patches.pack(patch), *self.wholes.pack([_bytes(wholes)])]


def _zero(contents: Words) -> NDArray[np.bool_]:
    """Which pages are zero: only those that begin with zeroes are examined."""
    zero: NDArray[np.bool_] = contents[:, 0] == 0
    if zero.any():
        zero[zero] = np.bitwise_or.reduce(contents[zero], axis=1) == 0
    return zero


def _as_rows(numbers: Numbers) -> Numbers | slice:
    """The positions of pages; consecutive ones as a slice, which avoids a copy."""
    first, last = int(numbers[0]), int(numbers[-1])
    if last - first == len(numbers) - 1 and (np.diff(numbers) == 1).all():
        return slice(first, last + 1)
    return numbers


def _compare(
    before: Words, contents: Words
) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]:
    """Which words changed; and for each page, whether none did and whether few enough did."""
    changed = contents != before
    # Eight flags at a time: sums of 64 fit in a byte.
    counts = changed.view(np.uint64).sum(axis=1).view(np.uint8).reshape(-1, 8).sum(axis=1)
    return changed, counts == 0, (counts > 0) & (counts <= MOST_PATCHED_WORDS)


@dataclass(frozen=True, slots=True)
class PageBatch:
    """One decoded PAGES payload; nothing of it is applied yet.

    `zero` and `whole` are numbers of pages, `contents` the contents of the whole ones. In the pages
    `patched` the words marked in `changed` are now `words`.
    """

    zero: Numbers
    patched: Numbers
    changed: NDArray[np.bool_]
    words: NDArray[np.uint64]
    whole: Numbers
    contents: Words
    sum: int

    @property
    def pages(self) -> int:
        """How many pages it covers."""
        return len(self.zero) + len(self.patched) + len(self.whole)

    @property
    def held_bytes(self) -> int:
        """How much memory it takes until it is applied."""
        return (
            sum(
                array.nbytes
                for array in (self.zero, self.patched, self.changed, self.words, self.whole)
            )
            + self.contents.nbytes
        )

    def apply(self, replica: Words) -> None:
        """Write it to guest memory that holds all that was sent before. Idempotent.

        Raises DamagedError if the memory did not hold that: the replica is unusable.
        """
        replica[self.zero] = 0
        replica[self.whole] = self.contents
        at = np.flatnonzero(self.changed)
        replica.reshape(-1)[self.patched[at // WORDS] * WORDS + at % WORDS] = self.words
        found = int(np.add.reduce(replica[self.patched], axis=None))
        found += int(np.add.reduce(self.contents, axis=None))
        if found % (1 << 64) != self.sum:
            del replica  # a traceback would keep the memory mapped
            raise damaged(
                "the replica differs from what the primary expects", "its pages' sum differs"
            )


def decode(payload: memoryview, ram_pages: int) -> PageBatch:
    """Decode a PAGES payload for a guest with so many pages. Raises WireError."""
    if len(payload) < _HEAD.size:
        raise protocol_violation(
            "a payload of pages ends too early", f"it has {len(payload)} bytes"
        )
    *counts, total, changed_words = _HEAD.unpack_from(payload)
    patch, wholes = unpack(payload[_HEAD.size :], 2)
    runs = sum(counts)
    if max(counts) > MOST_PAGES or len(patch) < 8 * runs or len(wholes) % PAGE_BYTES:
        raise protocol_violation(
            "a payload of pages is malformed", f"{len(patch)} bytes for {runs} runs"
        )
    tables = np.frombuffer(patch[: 8 * runs], dtype="<u4").astype(np.int64)
    ends = np.cumsum(counts)[:-1]
    zero, patched, whole = (
        _numbers(firsts, lengths, ram_pages)
        for firsts, lengths in zip(
            np.split(tables[:runs], ends), np.split(tables[runs:], ends), strict=True
        )
    )
    at = 8 * runs + len(patched) * (WORDS // 8)
    changed = np.unpackbits(np.frombuffer(patch[8 * runs : at], dtype=np.uint8)).view(bool)
    words = patch[at:]
    contents = as_words(wholes)
    if (
        len(changed) != len(patched) * WORDS
        or len(words) != 8 * changed_words
        or np.count_nonzero(changed) != changed_words
        or len(contents) != len(whole)
    ):
        raise protocol_violation("a payload of pages is malformed", "its parts do not fit together")
    return PageBatch(
        zero, patched, changed, np.frombuffer(words, dtype="<u8"), whole, contents, total
    )


def _runs(numbers: Numbers) -> tuple[Numbers, Numbers]:
    """First pages and lengths of the runs in `numbers`."""
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    starts = np.concatenate(([0], breaks)) if len(numbers) else breaks[:0]
    return numbers[starts], np.diff(np.append(starts, len(numbers)))


def _numbers(firsts: Numbers, lengths: Numbers, ram_pages: int) -> Numbers:
    """The pages of runs. Raises WireError if the guest has no such pages, or there are too many."""
    total = int(lengths.sum())
    if total > MOST_PAGES or (len(firsts) and int((firsts + lengths).max()) > ram_pages):
        raise protocol_violation(
            "a payload names pages that are not there", f"the guest has {ram_pages}"
        )
    if not lengths.all():  # it would be kept, and count as no page
        raise protocol_violation("a payload of pages is malformed", "a run in it has no page")
    offsets = firsts - (np.cumsum(lengths) - lengths)
    return np.repeat(offsets, lengths) + np.arange(total)


def _bytes(array: NDArray[np.generic]) -> memoryview:
    return np.ascontiguousarray(array).data.cast("B") if array.size else memoryview(b"")
