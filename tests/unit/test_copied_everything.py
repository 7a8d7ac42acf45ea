"""What the passes of a capture copy, by a tracker that plays its part."""

import asyncio
from collections.abc import Sequence
from typing import Any, cast

from vmckpt.epoch.capture import Capture
from vmckpt.epoch.epoch import Pages
from vmckpt.memory.ram_file import PAGE_BYTES, Span
from vmckpt.qemu.monitor import Monitor


def page(number: int, count: int = 1) -> Span:
    return (number * PAGE_BYTES, (number + count) * PAGE_BYTES)


class Tracker:
    """A RAM of which page 5 was written, and is being moved when its extents are listed."""

    name, needs_stop, others = "none", False, None

    def take_spans(self, spared: Sequence[Span] = ()) -> list[Span]:
        return [page(1), page(5)]

    def extents(self) -> list[Span]:
        return [page(0, 3)]

    def copy(self, spans: Sequence[Span]) -> bytes:
        return b"".join(bytes(end - start) for start, end in spans)

    def count(self) -> int:
        return 0


class Devices:
    """Counts how often other memory is copied."""

    taken = 0

    def take_memory(self) -> None:
        self.taken += 1

    def is_known(self) -> bool:
        return True


class Running:
    """A monitor whose guest runs."""

    label = "web"

    async def ask(self, *_: object, **__: object) -> Any:
        return {"running": True, "status": "running"}


def capture_of(devices: Devices) -> Capture:
    monitor = cast("Monitor", Running())
    return Capture(1, monitor, cast("Any", None), tracker=Tracker(), devices=cast("Any", devices))


def test_everything_includes_what_was_written_since_tracking_began() -> None:
    copied: list[Span] = []

    async def take(pages: Pages) -> None:
        copied.extend(pages.spans)

    asyncio.run(capture_of(Devices()).everything(take, 2 * PAGE_BYTES))
    assert copied == [page(0, 2), page(2), page(5)]


def test_passes_copy_other_memory_too_so_that_the_pause_need_not() -> None:
    devices = Devices()
    spans, _ = asyncio.run(capture_of(devices).early())
    assert (spans, devices.taken) == ([page(1), page(5)], 1)
