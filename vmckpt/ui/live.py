"""The live display: phases with their durations, a bar, the current figures."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from vmckpt.events.types import Emit, Event, JobProgress, Note, PhaseBegan, Progress
from vmckpt.ui.drawn import drawn
from vmckpt.ui.progress import PHASES
from vmckpt.ui.shown import one_line
from vmckpt.units import format_age, format_duration, format_rate, format_size

# The clocks of an operation and of its display start together, up to this difference.
_EARLY_S = 1.0


class _Screen:
    def __init__(self, title: str) -> None:
        self._title = title
        self._phases: list[PhaseBegan] = []
        self._notes: list[Note] = []
        self._progress: Progress | None = None
        self._job: JobProgress | None = None
        self._began_s = time.monotonic()
        self._done = False
        self._ended_s: float | None = None
        self._told_later = False

    def add(self, event: Event) -> None:
        # Earlier events are replayed, and their ends are not seen.
        self._told_later |= event.at_s - (time.monotonic() - self._began_s) > _EARLY_S
        match event:
            case PhaseBegan():
                self._phases.append(event)
            case Note():
                self._notes.append(event)
            case Progress():
                self._progress = event
            case JobProgress():
                self._job = event

    def finish(self) -> None:
        """Nothing is current from now on; remove the current figures."""
        self._done = True
        if not self._told_later:
            self._ended_s = time.monotonic() - self._began_s
        self._progress = self._job = None

    def __rich__(self) -> Group:
        parts: list[Text | Table] = [Text(self._title, style="bold")]
        ends_s = [phase.at_s for phase in self._phases[1:]] + [self._ended_s]
        for phase, end_s in zip(self._phases, ends_s, strict=False):
            words = PHASES.get(phase.phase, phase.phase)
            if end_s is None and not self._done:
                parts.append(Text(f" › {one_line(words)}", style="cyan"))
                continue
            took = "" if end_s is None else f"  {format_duration(end_s - phase.at_s)}"
            parts.append(Text(f" ✓ {one_line(words)}", style="green").append(took, "dim"))
        if self._progress:
            done = self._progress.total_bytes - self._progress.remaining_bytes
            parts += [_bar(done, self._progress.total_bytes), self._figures(self._progress)]
        if self._job:
            parts.append(_bar(self._job.done, self._job.total))
        parts += [Text(f" ! {one_line(note.text)}", style="yellow") for note in self._notes[-4:]]
        return Group(*parts)

    @staticmethod
    def _figures(progress: Progress) -> Table:
        downtime = progress.expected_downtime_ms
        rows = [
            ("phase", progress.status, "round", str(progress.round)),
            ("left", format_size(progress.remaining_bytes), "sent",
             format_size(progress.transferred_bytes)),
            ("link", format_rate(progress.throughput_bytes_per_s), "dirtied",
             format_rate(progress.dirty_rate_bytes_per_s)),
            ("downtime", "…" if downtime is None else f"{downtime} ms", "ETA",
             "…" if progress.eta_s is None else format_age(progress.eta_s)),
        ]  # fmt: skip
        if progress.throttle_percent or progress.postcopy_requests:
            throttled, requests = f"{progress.throttle_percent} %", str(progress.postcopy_requests)
            rows.append(("throttled", throttled, "pages asked", requests))
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", min_width=10)
        table.add_column(min_width=16)
        table.add_column(style="dim", min_width=8)
        table.add_column()
        for row in rows:
            # Not as plain text, which a table would parse as markup.
            table.add_row(*(Text(one_line(cell)) for cell in row))
        return table


def _bar(done: int, total: int) -> Table:
    # In a table, because a bar alone does not end its line.
    row = Table.grid()
    row.add_row(ProgressBar(max(total, 1), min(max(done, 0), total), width=60))
    return row


@contextmanager
def live_display(title: str) -> Iterator[Emit]:
    """Draw events during the block; the phases and their durations remain."""
    screen = _Screen(title)
    with drawn(screen):
        yield screen.add
        screen.finish()
