"""Progress of a migration: a live display in a terminal, otherwise plain lines."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from vmckpt.events.types import Emit, Event, JobProgress, Note, PhaseBegan, Progress, ignore_event
from vmckpt.ui.shown import one_line
from vmckpt.ui.verbosity import is_plain, is_quiet
from vmckpt.units import format_age, format_rate, format_size

LINE_EVERY_S = 1.0
PHASES = {
    "prepare": "starting QEMU on the destination",
    "agree": "agreeing on encryption",
    "turn": "waiting for its turn on the link",
    "mirror": "copying disks",
    "hook-quiesce": "quiescing the device's users",
    "hook-lock": "locking the device's users",
    "hook-checkpoint": "saving the device's state",
    "hook-release": "releasing the device",
    "unplug": "unplugging the device",
    "transfer": "sending memory",
    "switchover": "switching over",
    "drain": "fetching the rest",
    "verify": "proving that it runs",
    "bring-back": "bringing the device's users back",
    "handover": "handing over",
    "release": "releasing the source",
}


@contextmanager
def display(title: str) -> Iterator[Emit]:
    """Show events on stderr during the block: live on a terminal, otherwise a line per second."""
    if is_quiet():
        yield ignore_event
        return
    if is_plain() or not sys.stderr.isatty():
        yield _plain_lines()
        return
    from vmckpt.ui.live import live_display

    with live_display(title) as emit:
        yield emit


def describe(progress: Progress) -> str:
    """One line of figures."""
    parts = [
        f"round {progress.round}",
        f"{format_size(progress.remaining_bytes)} left",
        f"{format_size(progress.transferred_bytes)} sent",
        format_rate(progress.throughput_bytes_per_s),
    ]
    if progress.dirty_rate_bytes_per_s:
        parts.append(f"dirtied {format_rate(progress.dirty_rate_bytes_per_s)}")
    if progress.expected_downtime_ms is not None:
        parts.append(f"downtime {progress.expected_downtime_ms} ms")
    if progress.throttle_percent:
        parts.append(f"guest throttled {progress.throttle_percent} %")
    if progress.postcopy_requests:
        parts.append(f"{progress.postcopy_requests} pages asked for")
    if progress.eta_s is not None:
        parts.append(f"ETA {format_age(progress.eta_s)}")
    return ", ".join(parts)


def _plain_lines() -> Emit:
    shown_s = 0.0

    def emit(event: Event) -> None:
        nonlocal shown_s
        match event:
            case PhaseBegan():
                text = PHASES.get(event.phase, event.phase)
            case Note():
                text = f"note: {event.text} [{event.code}]"
            case Progress() | JobProgress() if time.monotonic() - shown_s < LINE_EVERY_S:
                return
            case Progress():
                shown_s = time.monotonic()
                text = f"{event.status}: {describe(event)}"
            case JobProgress():
                shown_s = time.monotonic()
                text = f"{event.phase}: {100 * event.done // max(event.total, 1)} %"
        print(f"[{event.at_s:7.2f}s] {one_line(text)}", file=sys.stderr, flush=True)

    return emit
