"""A guest's memory on its way into a checkpoint, read in passes while the guest runs."""

from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from vmckpt.checkpoint.store_thread import StoreThread
from vmckpt.epoch.budget import Budget
from vmckpt.epoch.capture import Capture
from vmckpt.epoch.epoch import Pages
from vmckpt.memory.ram_file import PAGE_BYTES, Span
from vmckpt.store.files.pack import Numbers
from vmckpt.store.transaction import AreaWriter

COPY_BYTES = 8 << 20
# Limit of memory that is copied but not stored yet: beyond it the passes wait for the store.
MOST_WAITING_BYTES = 512 << 20
# Up to this size, new pages are stored only after they have been read a second time.
MOST_LATER_BYTES = 256 << 20
# The share of the allowed pause that is reserved for work other than copying.
COPY_SHARE = 0.5
# The time to find and copy an isolated page.
PAGE_S = 4e-6


class MemoryPasses:
    """The passes over one guest's memory, into the area `ram` of its checkpoint.

    `passes` counts them; their pauses are added to `pauses_s`.
    """

    def __init__(
        self,
        ram: AreaWriter,
        store_calls: StoreThread,
        pauses_s: list[float],
        *,
        memory_bytes: int,
        max_pause_s: float,
    ) -> None:
        self._ram, self._store_calls = ram, store_calls
        self._memory_bytes, self._max_pause_s = memory_bytes, max_pause_s
        self.pauses_s, self.passes = pauses_s, 0

    async def everything(self, capture: Capture) -> list[Span]:
        """Read all memory; returns what is not stored yet, as the guest may write it again."""
        seen: list[Numbers] = []
        later: list[Numbers] = []

        async def take(pages: Pages) -> None:
            numbers = page_numbers(pages)
            seen.append(numbers)
            if sum(map(len, later)) * PAGE_BYTES < MOST_LATER_BYTES:
                lacking = await self._store_calls(partial(self._ram.lacks, pages.data))
                later.append(numbers[lacking])
                await self._put_chosen(pages, numbers, ~lacking)
            else:
                await self._store_calls(partial(self._ram.put, numbers, pages.data))

        self.pauses_s.append(await capture.everything(take, COPY_BYTES))
        present = np.concatenate(seen) if seen else np.empty(0, np.int64)
        empty = np.ones(self._memory_bytes // PAGE_BYTES, bool)
        empty[present] = False
        await self._store_calls(partial(self._ram.put_zero, np.flatnonzero(empty)))
        return spans_of(np.concatenate(later) if later else np.empty(0, np.int64))

    async def passes_until_it_fits(
        self, capture: Capture, new_pages: Sequence[Span]
    ) -> list[Pages]:
        """Copy new pages and later writes while the guest runs; returns them oldest first."""
        allowed_s = self._max_pause_s * COPY_SHARE
        budget, waiting = Budget(allowed_s, page_s=PAGE_S), list[Pages]()
        spans: Sequence[Span] = new_pages
        while spans or budget.wants_pass(capture.dirty_pages()):
            written, pause_s = await capture.early()
            if pause_s is not None:
                self.pauses_s.append(pause_s)
            self.passes += 1
            for copied in capture.copies([*spans, *written], COPY_BYTES):
                waiting = await self.spilled([*waiting, copied])
            spans = ()
        return waiting

    async def spilled(self, waiting: list[Pages]) -> list[Pages]:
        """The waiting pages; if there are too many, they are stored first."""
        if sum(len(one.data) for one in waiting) <= MOST_WAITING_BYTES:
            return waiting
        await self.put_newest(waiting)
        return []

    async def put_newest(self, waiting: Sequence[Pages]) -> None:
        """Store only the latest copy of each page."""
        done = np.zeros(self._memory_bytes // PAGE_BYTES, bool)
        for pages in reversed(waiting):
            numbers = page_numbers(pages)
            fresh = ~done[numbers]
            done[numbers] = True
            await self._put_chosen(pages, numbers, fresh)

    async def _put_chosen(self, pages: Pages, numbers: Numbers, chosen: NDArray[np.bool_]) -> None:
        if chosen.all():
            await self._store_calls(partial(self._ram.put, numbers, pages.data))
        elif chosen.any():
            rows = np.frombuffer(pages.data, np.uint8).reshape(-1, PAGE_BYTES)
            await self._store_calls(partial(self._ram.put, numbers[chosen], rows[chosen].tobytes()))


def spans_of(numbers: Numbers) -> list[Span]:
    """The byte ranges of pages in ascending order; adjacent pages are joined."""
    if not len(numbers):
        return []
    ends = np.flatnonzero(np.diff(numbers) != 1) + 1
    firsts = numbers[np.concatenate([[0], ends])] * PAGE_BYTES
    lasts = (numbers[np.concatenate([ends, [len(numbers)]]) - 1] + 1) * PAGE_BYTES
    return list(zip(firsts.tolist(), lasts.tolist(), strict=True))


def page_numbers(pages: Pages) -> Numbers:
    """The numbers of the pages, in the order of their contents."""
    parts = [
        np.arange(start // PAGE_BYTES, end // PAGE_BYTES, dtype=np.int64)
        for start, end in pages.spans
    ]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)
