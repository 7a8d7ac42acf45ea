"""The live display: phases with their times, a bar, the figures of the moment."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from vmckpt.events.types import Emit, Event, JobProgress, Note, PhaseBegan, Progress
from vmckpt.ui.progress import PHASES
from vmckpt.units import format_duration, format_rate, format_size


class _Screen:
    def __init__(self, title: str) -> None:
        self._title = title
        self._phases: list[PhaseBegan] = []
        self._notes: list[Note] = []
        self._progress: Progress | None = None
        self._job: JobProgress | None = None

    def add(self, event: Event) -> None:
        match event:
            case PhaseBegan():
                self._phases.append(event)
            case Note():
                self._notes.append(event)
            case Progress():
                self._progress = event
            case JobProgress():
                self._job = event

    def __rich__(self) -> Group:
        parts: list[Text | Table | ProgressBar] = [Text(self._title, style="bold")]
        for number, phase in enumerate(self._phases):
            current = number == len(self._phases) - 1
            words = PHASES.get(phase.phase, phase.phase)
            mark, style = ("›", "cyan") if current else ("✓", "green")
            parts.append(
                Text(f" {mark} {words}", style=style).append(f"  {phase.at_s:.2f} s", "dim")
            )
        if self._progress:
            parts += [self._bar(self._progress), self._figures(self._progress)]
        if self._job:
            parts.append(ProgressBar(max(self._job.total, 1), self._job.done, width=60))
        parts += [Text(f" ! {note.text}", style="yellow") for note in self._notes[-4:]]
        return Group(*parts)

    @staticmethod
    def _bar(progress: Progress) -> ProgressBar:
        done = progress.total_bytes - progress.remaining_bytes
        return ProgressBar(max(progress.total_bytes, 1), max(done, 0), width=60)

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
             "…" if progress.eta_s is None else format_duration(progress.eta_s)),
        ]  # fmt: skip
        if progress.throttle_percent or progress.postcopy_requests:
            throttled, asked = f"{progress.throttle_percent} %", str(progress.postcopy_requests)
            rows.append(("throttled", throttled, "pages asked", asked))
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", min_width=10)
        table.add_column(min_width=16)
        table.add_column(style="dim", min_width=8)
        for row in rows:
            table.add_row(*row)
        return table


@contextmanager
def live_display(title: str) -> Iterator[Emit]:
    """Draw events on stderr, 8 times a second, for the block; the last picture stays."""
    screen = _Screen(title)
    with Live(screen, console=Console(stderr=True), refresh_per_second=8):
        yield screen.add
