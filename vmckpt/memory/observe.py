"""Observes for a while which pages a process dirties, at a limited cost to the process."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from vmckpt.memory.content import Content, Piece, pages_content, ram_content, ram_layout
from vmckpt.memory.dirty_pages import DirtyPages, PageSet, tracked_at
from vmckpt.memory.private.guest_ram import GuestRam, ram_of
from vmckpt.memory.ram_file import read_only
from vmckpt.memory.windows import Dirtied, DirtyHistory, Windows

TICK_S = 0.05
# The approximate cost of a first write to a protected page, and the share of one processor's time
# that it may take in total: above it, pages stay unprotected for longer, and windows begin less
# often.
FAULT_S, FAULT_SHARE = 1e-5, 0.03
# The minimum number of windows, however long they get.
LEAST_WINDOWS = 4
# Resolution of the reported time series, and the most memory used for it.
COURSE_SPANS, COURSE_BYTES = 32, 256 << 20
# How many times a long window is sampled, and the maximum share of its time for that.
SAMPLES, SAMPLING_SHARE = 16, 0.05


class DirtyWindow(NamedTuple):
    """A completed window: when it began, its length, and the number of pages dirtied in it."""

    at_s: float
    length_s: float
    pages: int


class Observation(NamedTuple):
    """The observations of `took_s` seconds. `faults`: how many the guest had because of it.

    `dirtied` is None if there were none.
    """

    took_s: float
    samples: Mapping[int, list[Dirtied]]
    windows: tuple[DirtyWindow, ...]
    working_set_pages: int
    faults: int
    ram: Content
    dirtied: Content | None
    layout: tuple[Piece, ...]
    course: DirtyHistory


async def observe(
    pid: int,
    ram: GuestRam,
    for_s: float,
    go_on: Callable[[], Awaitable[bool]],
    ram_bytes: int | None = None,
) -> Observation | None:
    """The pages of its guest's RAM that `pid` dirties, for `for_s` seconds; leaves nothing behind.

    None as soon as `go_on` returns false; it is called about 20 times a second. Raises OSError as
    `ram_of` and `tracked_at` do, ProcessLookupError when the process ends meanwhile.
    """
    with ram_of(pid, ram, ram_bytes, read_only) as (content, mappings):
        with tracked_at(pid, mappings) as pages:
            seen = await _watch(pages, for_s, go_on)
        if seen is None:
            return None
        windows, listed = seen
        layout = ram_layout(content)
        dirtied = pages_content(content, windows.all) if windows.all.count else None
    if ram.private:
        # To read what a process never touched of its own memory allocates nothing.
        layout = tuple(piece._replace(hole=0.0) for piece in layout)
    return Observation(
        took_s=sum(window.length_s for window in listed),
        samples=windows.samples(),
        windows=tuple(listed),
        working_set_pages=windows.all.count,
        faults=sum(window.pages for window in listed),
        ram=ram_content(layout),
        dirtied=dirtied,
        layout=layout,
        course=windows.course(),
    )


async def _watch(
    pages: DirtyPages, for_s: float, go_on: Callable[[], Awaitable[bool]]
) -> tuple[Windows, list[DirtyWindow]] | None:
    spans = min(COURSE_SPANS, max(COURSE_BYTES // pages.set_bytes, 1))
    windows, listed, level = Windows(for_s / spans), list[DirtyWindow](), 0
    pages.take()
    began_s = opened_s = time.monotonic()
    while time.monotonic() - began_s < for_s:
        counts = await _parts(pages, opened_s, 2**level, go_on)
        if counts is None:
            return None
        for tick, count in counts.items():
            if tick.bit_count() == 1:
                windows.note(tick.bit_length() - 1, *count)
        dirtied = _taken(pages)
        now_s = time.monotonic()
        length_s = now_s - opened_s
        windows.add(level, length_s, dirtied, tuple(counts.values()))
        listed.append(DirtyWindow(opened_s - began_s, length_s, dirtied.count))
        opened_s = now_s
        costly = dirtied.count * FAULT_S / length_s > FAULT_SHARE
        if costly and 2 * TICK_S * 2**level <= for_s / LEAST_WINDOWS:
            level += 1
    return windows, listed


async def _parts(
    pages: DirtyPages, opened_s: float, ticks: int, go_on: Callable[[], Awaitable[bool]]
) -> dict[int, Dirtied] | None:
    """Wait for the end of a window; returns the counts of its first parts, by their length in
    ticks.

    Parts that are a power of two are counted, others as long as that is cheap.
    """
    counts, rested_s = dict[int, Dirtied](), 0.0
    for tick in range(1, ticks + 1):
        if not await _until(opened_s + TICK_S * tick, go_on):
            return None
        sampled_s = time.monotonic()
        is_wanted = sampled_s >= rested_s and tick % max(ticks // SAMPLES, 1) == 0
        if tick < ticks and (is_wanted or tick.bit_count() == 1):
            found, now_s = pages.count(), time.monotonic()
            counts[tick] = Dirtied(now_s - opened_s, found)
            rested_s = now_s + (now_s - sampled_s) / SAMPLING_SHARE
    return counts


async def _until(at_s: float, go_on: Callable[[], Awaitable[bool]]) -> bool:
    """Wait until then; False as soon as `go_on`, which is called at each tick, returns false."""
    while True:
        left_s = max(at_s - time.monotonic(), 0.0)
        await asyncio.sleep(min(left_s, TICK_S))
        if not await go_on():
            return False
        if left_s <= TICK_S:
            return True


def _taken(pages: DirtyPages) -> PageSet:
    try:
        return pages.take()
    except OSError as exc:
        # The pagemap of a process that has ended cannot be walked.
        raise ProcessLookupError(3, "the process has ended") from exc
