"""Maps locate the chunks of an area. One per area of a checkpoint.

In memory a map is an array of 64-bit words by chunk number: 0 is a chunk of zeroes, otherwise the
number of a pack in the checkpoint's list, counted from 1, in the upper half, and a slot in the
lower.

On disk a map is its difference to a base (a base's: to zeroes), as runs of chunks that are
consecutive in one pack. Their columns are: gap to the previous run, length, pack, and slot minus
the one at which the previous run ended (zigzag-coded: 0, -1, 1, -2, ...), unsigned 32 bit each. The
columns' bytes are sorted by significance and compressed together. So two reads yield a complete
map, however many checkpoints came before, and an unchanged map costs nothing.
"""

import os

import numpy as np
from numpy.typing import NDArray

from vmckpt.store.compression import compress, unpack
from vmckpt.store.errors import damaged, too_large
from vmckpt.store.files.pack import Numbers

Refs = NDArray[np.uint64]
SLOT_BITS = 32
_SLOT_MASK = np.uint64((1 << SLOT_BITS) - 1)
_LEVEL = 9
_COLUMNS = 4
# Chunks whose words are computed at once.
_AT_ONCE = 1 << 20
_MEMORY_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def make_refs(pack: int, slots: Numbers) -> Refs:
    """The words for slots of one pack, by its number in the list (from 0)."""
    return slots.astype(np.uint64) | np.uint64((pack + 1) << SLOT_BITS)


def packs_of(refs: Refs) -> Numbers:
    """The packs' numbers (from 0; -1: zeroes)."""
    return (refs >> np.uint64(SLOT_BITS)).astype(np.int64) - 1


def slots_of(refs: Refs) -> Numbers:
    """The slots."""
    return (refs & _SLOT_MASK).astype(np.int64)


def resized(refs: Refs, chunks: int) -> Refs:
    """A copy for an area of that many chunks; new ones are zero."""
    new = np.zeros(chunks, dtype=np.uint64)
    kept = min(chunks, len(refs))
    new[:kept] = refs[:kept]
    return new


def require_memory(chunks: int, name: str) -> None:
    """Raises UnreadableError if this machine has no memory for maps of this many chunks."""
    if 24 * chunks > _MEMORY_BYTES // 2:  # the base, the difference to it, and the result
        raise too_large(name, f"it has areas of {chunks} chunks: more than fits in memory")


def encode(refs: Refs, base: Refs) -> bytes:
    """Encode the difference of `refs` to `base`, which has the same length."""
    changed = np.flatnonzero(refs != base)
    words = refs[changed]
    # A run continues while number and slot increase by one; a run of zeroes while they stay zero.
    step = np.where(words[1:] == 0, np.uint64(0), np.uint64(1))
    goes_on = (np.diff(changed) == 1) & (words[1:] == words[:-1] + step)
    starts = np.concatenate(([0], np.flatnonzero(~goes_on) + 1)) if len(changed) else changed
    lengths = np.diff(np.append(starts, len(changed)))
    firsts = changed[starts]
    gaps = firsts - np.concatenate(([0], (firsts + lengths)[:-1])) if len(firsts) else firsts
    packs = packs_of(words[starts]) + 1
    slots = slots_of(words[starts])
    expected = np.concatenate(([0], (slots + lengths)[:-1])) if len(slots) else slots
    jumps = slots - expected
    folded = np.where(jumps >= 0, 2 * jumps, -2 * jumps - 1)
    columns = np.concatenate([gaps, lengths, packs, folded]).astype("<u8")
    if len(columns) and int(columns.max()) >= 1 << 32:
        raise ValueError("a pack or an area is too large for its map")
    return compress(columns.astype("<u4").view(np.uint8).reshape(-1, 4).T.tobytes(), _LEVEL)


def decode(data: bytes, base: Refs, name: str, pack_count: int) -> Refs:
    """The inverse: a new array. Raises DamagedError; UnreadableError: not on this machine."""
    most = 4 * _COLUMNS * (len(base) + 1)
    raw = unpack(data, None, name, most, fitting=_MEMORY_BYTES // 16)
    if len(raw) % (4 * _COLUMNS):
        raise damaged(f"{name} is damaged", "a map ends too early")
    columns = np.frombuffer(raw, dtype=np.uint8).reshape(4, -1).T
    words = np.ascontiguousarray(columns).view("<u4").reshape(_COLUMNS, -1).astype(np.int64)
    gaps, lengths, packs, folded = words
    firsts = np.cumsum(gaps + lengths) - lengths
    ends = np.cumsum(np.where(folded & 1, -((folded + 1) >> 1), folded >> 1) + lengths)
    slots = ends - lengths
    if len(gaps) and (
        int((firsts + lengths).max()) > len(base)
        or int(packs.max()) > pack_count
        or int(slots.min()) < 0
        or int(ends.max()) > 1 << SLOT_BITS
    ):
        raise damaged(f"{name} is damaged", "a map refers to chunks that do not exist")
    refs = base.copy()
    done = np.cumsum(lengths)
    at = 0
    while at < len(lengths):
        # A few bytes may describe the whole area, so only a part of it is expanded at once.
        to = int(np.searchsorted(done, done[at] - lengths[at] + _AT_ONCE, side="right"))
        if to <= at + 1:
            first, last = int(firsts[at]), int(firsts[at] + lengths[at])
            word = (int(packs[at]) << SLOT_BITS) | int(slots[at])
            there = packs[at] != 0
            refs[first:last] = np.arange(word, word + last - first, dtype=np.uint64) if there else 0
        else:
            _fill(refs, *(column[at:to] for column in (firsts, lengths, packs, slots)))
        at = max(to, at + 1)
    return refs


def _fill(refs: Refs, firsts: Numbers, lengths: Numbers, packs: Numbers, slots: Numbers) -> None:
    """Write runs into an area's map."""
    total = int(lengths.sum())
    within = np.arange(total) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    values = np.repeat(slots, lengths) + within
    where = np.repeat(packs, lengths)
    values = np.where(where == 0, 0, values | (where << SLOT_BITS))
    refs[np.repeat(firsts, lengths) + within] = values.astype(np.uint64)
