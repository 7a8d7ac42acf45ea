"""What guests, hooks, hosts and stores say reaches a terminal as text, and as nothing else."""

import ast
import io
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.core import GaugeMetricFamily
from rich.console import Console

import vmckpt
from vmckpt.cli.loop import warn
from vmckpt.cli.results import print_error, show
from vmckpt.errors import OperationFailedError
from vmckpt.events.types import Emit, Note, PhaseBegan, Progress
from vmckpt.metrics.families import add, render
from vmckpt.ui.drain_live import Screen
from vmckpt.ui.live import _Screen
from vmckpt.ui.progress import display
from vmckpt.ui.shown import lines, one_line
from vmckpt.ui.tables import fields, table

# Erases what stands above, goes back to the line's start, turns writing around, is a CSI by itself,
# ends the line, and is markup.
EVIL = "a\x1b[2J\rb\u202ec\u200bd\x9be\nerror: f\u2028g[bold red]h[/nothing]"
SHOWN = r"a\x1b[2J\rb\u202ec\u200bd\x9be\nerror: f\u2028g[bold red]h[/nothing]"


def is_plain(text: str) -> bool:
    return all(
        char == "\n" or unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Zl", "Zp")
        for char in text
    )


def test_what_is_no_text_is_escaped() -> None:
    assert one_line(EVIL) == SHOWN
    assert lines("a\n\tb\x1bc") == "a\n\tb\\x1bc"
    assert one_line("12 ms, naïve ✓ 漢字 …") == "12 ms, naïve ✓ 漢字 …"
    assert one_line("\ud800") == "\\ud800"


@given(st.text(st.characters()))
def test_whatever_is_said_one_line_comes_of_it(text: str) -> None:
    assert is_plain(one_line(text))
    assert "\n" not in one_line(text)
    assert is_plain(lines(text).replace("\t", ""))
    one_line(text).encode()


def test_tables_keep_their_lines() -> None:
    assert table(("name", "why"), [(EVIL, "x")]).count("\n") == 1
    assert fields([("a", EVIL), ("b", "x")]).count("\n") == 1
    assert is_plain(table(("name",), [(EVIL,)]) + fields([("a", EVIL)]))


def test_an_error_has_three_parts_whatever_is_in_them(capsys: pytest.CaptureFixture[str]) -> None:
    error = OperationFailedError(f"it {EVIL}", why=f"as {EVIL}", remedy=f"rm {EVIL}")
    print_error(error, as_json=False)
    out, err = capsys.readouterr()
    assert out == ""
    assert is_plain(err)
    begins = [line for line in err.splitlines() if not line.startswith("       ")]
    assert [line[:7] for line in begins] == ["error: ", "  why: ", "  do:  "]
    assert begins[2] == f"  do:  rm {SHOWN}"
    print_error(error, as_json=True)
    assert is_plain(capsys.readouterr().out)


def test_results_and_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    show({"name": EVIL}, f"name\n{one_line(EVIL)}\x1b", as_json=False)
    warn(EVIL)
    out, err = capsys.readouterr()
    assert out == f"name\n{SHOWN}\\x1b\n"
    assert err == f"{SHOWN}\n"
    show({"name": EVIL}, "", as_json=True)
    assert is_plain(capsys.readouterr().out)


def progress(status: str) -> Progress:
    fields = dict.fromkeys(Progress._fields, 0) | {"at_s": 0.0, "status": status, "eta_s": None}
    return Progress(**fields)  # type: ignore[arg-type]


def tell(emit: Emit) -> None:
    emit(PhaseBegan(0.0, EVIL))
    emit(PhaseBegan(0.0, EVIL))
    emit(Note(0.0, "code", EVIL))
    emit(progress(EVIL))


def test_events_as_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with display("title") as emit:
        tell(emit)
    err = capsys.readouterr().err
    assert is_plain(err)
    assert all(line.startswith("[") for line in err.splitlines())


def test_the_live_display_takes_nothing_for_markup() -> None:
    screen = _Screen("title")
    tell(screen.add)
    assert is_plain(drawn(screen))
    assert "[bold red]h[/nothing]" in drawn(screen)


def test_the_live_display_of_drains() -> None:
    from vmckpt.fleet.drain.events import Began, Ended, Noted

    screen = Screen("title")
    for happening in (Began("web", "a", "b"), Ended("web", "a", 1.0, EVIL), Noted(EVIL)):
        screen.add(happening)
    assert is_plain(drawn(screen))


def drawn(screen: object) -> str:
    console = Console(file=io.StringIO(), width=400, force_terminal=False)
    console.print(screen)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_label_of_a_metric_ends_where_it_ends() -> None:
    family = GaugeMetricFamily("vms", "VMs", labels=("vm",))
    add(family, ('a"} 7\nforged{vm="b\ud800\\',), 1)
    add(family, ("c",), float("nan"))
    said = render([family])
    assert said.splitlines()[2:] == [
        r'vms{vm="a\"} 7\nforged{vm=\"b?\\"} 1.0',
        'vms{vm="c"} NaN',
    ]
    said.encode()


# Each escapes what it prints, or prints words, JSON or metrics of our own alone.
PRINT = {
    "cli/confirm.py", "cli/demo.py", "cli/hidden/echo.py", "cli/hidden/observe.py",
    "cli/hidden/replica.py",
    "cli/loop.py", "cli/main.py", "cli/nouns/checkpoint/disks.py", "cli/nouns/guard.py",
    "cli/nouns/metrics.py", "cli/nouns/replicate/status.py", "cli/nouns/store/key.py",
    "cli/nouns/store/store.py", "cli/results.py",
    "cli/terminal.py", "ui/drain.py", "ui/progress.py",
}  # fmt: skip


def test_no_other_module_prints() -> None:
    package = Path(vmckpt.__file__).parent
    found = {
        str(path.relative_to(package))
        for folder in ("cli", "ui")
        for path in (package / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    }
    assert found <= PRINT, "use warn or show, or see that what others wrote is escaped"
