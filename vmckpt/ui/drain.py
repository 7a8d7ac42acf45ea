"""Progress of a drain: a live display in a terminal, otherwise plain lines."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from vmckpt.events.types import Event, Note, PhaseBegan
from vmckpt.fleet.drain.events import Began, DrainEvent, Ended, Noted, Planned, Progressed, Show
from vmckpt.fleet.drain.plan import DrainPlan
from vmckpt.ui.progress import PHASES
from vmckpt.ui.shown import one_line
from vmckpt.ui.tables import table
from vmckpt.ui.verbosity import is_plain, is_quiet
from vmckpt.units import counted, format_duration


@contextmanager
def display(title: str) -> Iterator[Show]:
    """Show the progress on stderr during the block: live on a terminal, otherwise as lines."""
    if is_quiet():
        yield lambda _: None
        return
    if is_plain() or not sys.stderr.isatty():
        yield _plain_lines()
        return
    from vmckpt.ui.drain_live import live_display

    with live_display(title) as show:
        yield show


def planned(plan: DrainPlan) -> str:
    """The timetable, and its total."""
    spans = plan.table.spans
    rows = [
        (
            move.vm,
            f"{move.source} -> {move.destination}",
            format_duration(spans[move.vm].begin_s),
            format_duration(spans[move.vm].end_s),
            format_duration(move.cost.alone_s),
        )
        for move in sorted(plan.table.moves, key=lambda move: spans[move.vm].begin_s)
    ]
    known = plan.band_s is not None
    rows = rows if known else [(*row[:2], "?", "?", "?") for row in rows]
    lines = [table(("vm", "hosts", "begins", "ends", "alone"), rows)] if rows else []
    lines.append(total(plan))
    lines += [f"note: {one_line(note)}" for note in plan.notes]
    lines += [f"note: {host} gets none: {one_line(why)}" for host, why in plan.closed.items()]
    return "\n".join(lines)


def total(plan: DrainPlan) -> str:
    """The forecast of the whole drain, in one line."""
    moves = plan.table.moves
    if not moves:
        return "no VM moves"
    if plan.band_s is None:
        return f"{counted(len(moves), 'VM')}, {plan.table.at_once} at a time; duration unknown"
    low, middle, high = (format_duration(value) for value in plan.band_s)
    return (
        f"{counted(len(moves), 'VM')}, {plan.table.at_once} at a time: {middle} ({low} to {high}); "
        f"at least {format_duration(plan.table.bound_s)}"
    )


def words(event: Event) -> str | None:
    """A phase of a move in words."""
    match event:
        case PhaseBegan():
            return PHASES.get(event.phase, event.phase)
        case Note():
            return f"note: {event.text}"
    return None


def _plain_lines() -> Show:
    began_s = time.monotonic()

    def show(happening: DrainEvent) -> None:
        match happening:
            case Planned(plan):
                text = total(plan)
            case Began(vm, source, destination):
                text = f"{vm}: {source} -> {destination}"
            case Progressed(vm, event):
                line = words(event)
                if line is None:
                    return
                text = f"{vm}: {line}"
            case Ended(vm, where, took_s, ""):
                text = f"{vm}: runs on {where}, after {format_duration(took_s)}"
            case Ended(vm, where, _, why):
                text = f"{vm}: stays on {where}: {why}"
            case Noted(text):
                pass
        print(f"[{time.monotonic() - began_s:7.2f}s] {one_line(text)}", file=sys.stderr, flush=True)

    return show
