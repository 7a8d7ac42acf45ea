"""Options of lists, and those of every command."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
import typer.main

from vmckpt.cli import main
from vmckpt.cli.options.listing import Form, ListOptions, asks_for_json
from vmckpt.cli.tree.verbosity import add_verbosity
from vmckpt.errors import UsageError
from vmckpt.events.trace import flags, untrace
from vmckpt.events.types import Note
from vmckpt.ui.progress import display
from vmckpt.ui.verbosity import Verbosity, is_plain, is_quiet, set_verbosity

pytestmark = pytest.mark.unit
HEADER = ("name", "last done", "disks")
ROWS = [("web", "now", "/a.qcow2")]


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    yield
    set_verbosity(Verbosity.USUAL)
    untrace()


def shown(capsys: pytest.CaptureFixture[str], listing: ListOptions) -> str:
    listing.layout().show({"vms": ["web"]}, HEADER, ROWS, wide=("disks",))
    return capsys.readouterr().out


def test_a_table_leaves_out_wide_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, ListOptions()) == "NAME  LAST DONE\nweb   now\n"
    wide = "NAME  LAST DONE  DISKS\nweb   now        /a.qcow2\n"
    assert shown(capsys, ListOptions(form=Form.wide)) == wide
    assert shown(capsys, ListOptions(form=Form.table)) == "NAME  LAST DONE\nweb   now\n"


def test_columns_are_chosen_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = "DISKS     LAST DONE\n/a.qcow2  now\n"
    assert shown(capsys, ListOptions(columns="disks,Last-Done")) == wanted
    with pytest.raises(UsageError) as refused:
        ListOptions(columns="name,size").layout().show({}, HEADER, [])
    assert refused.value.what == "there is no column 'size'"
    assert refused.value.why == "the columns are name, last-done, disks"


def test_json_is_the_same_by_either_option(capsys: pytest.CaptureFixture[str]) -> None:
    for listing in (ListOptions(json=True), ListOptions(form=Form.json)):
        assert json.loads(shown(capsys, listing)) == {"vms": ["web"]}


@pytest.mark.parametrize(
    "listing",
    [ListOptions(json=True, columns="name"), ListOptions(form=Form.wide, json=True)],
)
def test_json_is_no_table(listing: ListOptions) -> None:
    with pytest.raises(UsageError):
        listing.layout().show({}, HEADER, [])


def test_instead_of_an_empty_table(capsys: pytest.CaptureFixture[str]) -> None:
    ListOptions().layout().show({}, HEADER, [], none="there is no lab")
    assert capsys.readouterr().out == "there is no lab\n"


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("vm list --json", True), ("vm list -o json", True), ("vm list --output=json", True),
        ("vm list -ojson", True), ("vm list -o wide", False), ("vm rm json", False),
    ],
)  # fmt: skip
def test_errors_are_json_too(words: str, wanted: bool) -> None:
    assert asks_for_json(words.split()) is wanted


def leaves(group: click.Group) -> Iterator[click.Command]:
    for command in group.commands.values():
        if isinstance(command, click.Group):
            yield from leaves(command)
        else:
            yield command


def test_every_command_has_the_common_options_once() -> None:
    root = typer.main.get_group(main.command_line([]))
    for command in (root, *leaves(root)):
        names = [name for one in command.params for name in one.opts]
        assert [names.count(name) for name in ("-q", "--quiet", "-v", "--verbose")] == [1] * 4


def ran(*words: str) -> SimpleNamespace:
    """How verbose a command is that was given these words."""
    found = SimpleNamespace()

    @click.command("go")
    def go() -> None:
        found.quiet, found.plain, found.flags = is_quiet(), is_plain(), flags()

    root = click.Group("root", commands={"go": go})
    add_verbosity(root)
    root(list(words), standalone_mode=False)
    return found


def test_before_and_after_the_command() -> None:
    assert ran("go") == SimpleNamespace(quiet=False, plain=False, flags=[])
    for words in (("-q", "go"), ("go", "--quiet")):
        assert ran(*words) == SimpleNamespace(quiet=True, plain=False, flags=[])
    for words in (("-v", "go"), ("go", "--verbose")):
        assert ran(*words) == SimpleNamespace(quiet=False, plain=True, flags=["-v"])
    assert ran("go", "-vvv").flags == ["-vv"]
    assert ran("go") == SimpleNamespace(quiet=False, plain=False, flags=[])
    for both in (["go", "-q", "-v"], ["go", "-v", "-q"], ["-v", "go", "-q"]):
        with pytest.raises(UsageError):
            ran(*both)


def test_progress_and_notes_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    for verbosity, said in ((Verbosity.USUAL, True), (Verbosity.QUIET, False)):
        set_verbosity(verbosity)
        with display("web: a -> b") as emit:
            emit(Note(0.1, "method", "auto selected precopy"))
        assert bool(capsys.readouterr().err) is said


def test_a_trace_goes_to_stderr(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path))
    from vmckpt.events.trace import trace_command

    ran("-v", "go")
    trace_command("web on a", "stop")
    assert capsys.readouterr().err.endswith(" web on a: stop\n")
