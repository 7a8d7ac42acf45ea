"""What a person sees of a drain."""

import pytest
from rich.console import Console

from vmckpt.events.types import Note, PhaseBegan, Progress
from vmckpt.fleet.drain.events import Began, Ended, Noted, Planned, Progressed
from vmckpt.fleet.drain.plan import DrainPlan
from vmckpt.forecast.drain.crowding import LearnedCrowding
from vmckpt.forecast.drain.fleet import MoveCost, PlannedMove
from vmckpt.forecast.drain.timetable import timetable
from vmckpt.ui.drain import display, planned
from vmckpt.ui.drain_live import MOST_ROWS, Screen


def plan(count: int = 2, *, known: bool = True) -> DrainPlan:
    cost = MoveCost(1.0, 2.0, 0.5)
    table = timetable([PlannedMove(f"vm{n:02}", "a", "b", cost) for n in range(count)])
    band_s = table.band_s() if known else None
    return DrainPlan(
        table, (), (), {"c": "it is down"}, band_s, LearnedCrowding(0.0, 0.06), ("a note",), {}
    )


def seen(screen: Screen) -> str:
    console = Console(width=120, force_terminal=False)
    with console.capture() as drawn:
        console.print(screen)
    return drawn.get()


def test_a_plan_is_a_table_with_its_total_and_what_is_to_be_known() -> None:
    text = planned(plan())
    assert "vm00  a -> b  0 us    3.50 s  3.50 s" in text
    assert "2 VMs, 2 at a time: 5.50 s (" in text
    assert text.endswith("note: a note\nnote: c gets none: it is down")
    assert "?" in planned(plan(known=False))
    assert "duration unknown" in planned(plan(known=False))
    assert planned(plan(0)).startswith("no VM moves")


def test_every_vm_has_a_line_and_what_goes_wrong_is_seen() -> None:
    screen = Screen("draining a")
    assert "looking at hosts and guests" in seen(screen)
    screen.add(Planned(plan()))
    screen.add(Began("vm00", "a", "b"))
    screen.add(Progressed("vm00", PhaseBegan(0.1, "transfer")))
    screen.add(
        Progressed("vm00", Progress(0.2, "active", 1, 100, 50, 50, 1e6, 0.0, None, 0, 0, None))
    )
    screen.add(Ended("vm01", "a", 1.0, "no room"))
    screen.add(Noted("c does not answer"))
    text = seen(screen)
    assert "draining a  1 of 2" in text
    assert "sending memory" in text
    assert "✗ no room" in text
    assert "! c does not answer" in text


def test_of_many_those_under_way_are_seen() -> None:
    screen = Screen("draining a")
    screen.add(Planned(plan(40)))
    screen.add(Began("vm39", "a", "b"))
    lines = [line for line in seen(screen).splitlines() if " vm" in line]
    assert len(lines) == MOST_ROWS
    assert "vm39" in lines[0]


def test_without_a_terminal_there_is_a_line_for_each_thing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with display("draining a") as show:
        show(Planned(plan()))
        show(Began("vm00", "a", "b"))
        show(Progressed("vm00", PhaseBegan(0.1, "turn")))
        show(Progressed("vm00", Note(0.1, "clock", "its clock")))
        show(
            Progressed("vm00", Progress(0.2, "active", 1, 100, 50, 50, 1e6, 0.0, None, 0, 0, None))
        )
        show(Ended("vm00", "b", 2.0))
        show(Ended("vm01", "a", 1.0, "no room"))
    lines = [line.partition("] ")[2] for line in capsys.readouterr().err.splitlines()]
    assert lines[1:] == [
        "vm00: a -> b",
        "vm00: waiting for its turn on the link",
        "vm00: note: its clock",
        "vm00: runs on b, after 2.00 s",
        "vm01: stays on a: no room",
    ]
