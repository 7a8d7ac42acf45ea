"""A drain's live display: the action and the remaining work of every VM."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from vmckpt.events.types import Event, Progress
from vmckpt.fleet.drain.events import Began, DrainEvent, Ended, Noted, Planned, Progressed, Show
from vmckpt.fleet.drain.plan import DrainPlan
from vmckpt.ui.drain import total, words
from vmckpt.ui.drawn import drawn
from vmckpt.ui.shown import one_line
from vmckpt.units import format_duration, format_rate

# Waiting and finished VMs are only counted if there are more.
MOST_ROWS, MOST_SAID = 16, 4


@dataclass(slots=True)
class _Row:
    source: str
    destination: str
    state: str = "waiting"
    style: str = "dim"
    progress: Progress | None = None
    is_over: bool = False

    @property
    def is_under_way(self) -> bool:
        return not self.is_over and self.state != "waiting"


class Screen:
    """The current content of the display."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._plan: DrainPlan | None = None
        self._rows: dict[str, _Row] = {}
        self._said: list[str] = []
        self._began_s = time.monotonic()

    def add(self, happening: DrainEvent) -> None:
        """Handle an event."""
        match happening:
            case Planned(plan):
                if self._plan is None:
                    self._plan, self._began_s = plan, time.monotonic()
                for move in plan.table.moves:
                    self._rows[move.vm] = _Row(move.source, move.destination)
            case Began(vm, source, destination):
                self._rows[vm] = _Row(source, destination, "asking both hosts", "cyan")
            case Progressed(vm, event):
                self._went(self._rows[vm], event)
            case Ended(vm, where, took_s, why):
                words = f"✗ {why}" if why else f"✓ {format_duration(took_s)}"
                row = self._rows.setdefault(vm, _Row(where, where))
                row.state, row.style, row.is_over = words, "red" if why else "green", True
                row.progress = None
            case Noted(text):
                self._said.append(text)

    @staticmethod
    def _went(row: _Row, event: Event) -> None:
        if isinstance(event, Progress):
            row.progress = event
        elif line := words(event):
            row.state = line

    def __rich__(self) -> Group:
        over = sum(row.is_over for row in self._rows.values())
        head = Text(self._title, style="bold")
        if self._plan is None:
            head.append(": looking at hosts and guests", style="dim")
        else:
            elapsed = format_duration(time.monotonic() - self._began_s)
            head.append(f"  {over} of {len(self._rows)}, {elapsed}", style="not bold")
        parts: list[Text | Table] = [head]
        if self._plan is not None:
            parts += [Text(f" {total(self._plan)}", style="dim"), self._table()]
        parts += [Text(f" ! {one_line(text)}", style="yellow") for text in self._said[-MOST_SAID:]]
        return Group(*parts)

    def _table(self) -> Table:
        grid = Table.grid(padding=(0, 2))
        rows = list(self._rows.items())
        if len(rows) > MOST_ROWS:
            # VMs in progress come first, then the last finished ones.
            order = sorted(rows, key=lambda one: (not one[1].is_under_way, not one[1].is_over))
            rows = order[:MOST_ROWS]
        for vm, row in rows:
            grid.add_row(
                Text(f" {vm}"),
                Text(f"{row.source} -> {row.destination}", style="dim"),
                Text(one_line(row.state), style=row.style),
                *_figures(row.progress),
            )
        return grid


def _figures(progress: Progress | None) -> tuple[ProgressBar | Text, Text]:
    if progress is None:
        return Text(), Text()
    done = progress.total_bytes - progress.remaining_bytes
    bar = ProgressBar(max(progress.total_bytes, 1), min(max(done, 0), progress.total_bytes), 20)
    return bar, Text(format_rate(progress.throughput_bytes_per_s), style="dim")


@contextmanager
def live_display(title: str) -> Iterator[Show]:
    """Draw the progress during the block; the final state remains."""
    screen = Screen(title)
    with drawn(screen):
        yield screen.add
