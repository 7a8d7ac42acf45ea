"""What a command prints: text or one JSON object on stdout, errors as what / why / what to do."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import typer
from typer.testing import CliRunner

from vmckpt import __version__
from vmckpt.cli.main import command_line
from vmckpt.cli.output import end_running, print_error, run, show
from vmckpt.errors import (
    CancelledByUserError,
    NotFoundError,
    OutcomeUnknownError,
    RefusedError,
    UsageError,
    VmckptError,
)
from vmckpt.events.record import RunRecord

REFUSED = RefusedError("'web' cannot migrate to b", why="no room", remedy="free some")


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    yield
    end_running()


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path))
    return tmp_path


def command(*arguments: str) -> str:
    """What `vmckpt ARGUMENTS` prints on stdout; it has to end well. Raises what it raises."""
    result = CliRunner().invoke(command_line(arguments), arguments, standalone_mode=False)
    if result.exception:
        raise result.exception
    assert result.exit_code == 0
    return result.stdout


def test_a_result_is_text_or_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    show({"vm": "web", "rounds": 3}, "web runs on b", as_json=False)
    assert capsys.readouterr().out == "web runs on b\n"
    show({"vm": "web", "rounds": 3}, "web runs on b", as_json=True)
    assert json.loads(capsys.readouterr().out) == {"vm": "web", "rounds": 3}


def test_an_error_says_what_why_and_what_to_do_on_stderr(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert print_error(REFUSED, as_json=False) == 4
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "error: 'web' cannot migrate to b\n  why: no room\n  do:  free some\n"


def test_an_error_is_one_json_object_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_error(REFUSED, as_json=True) == 4
    out, err = capsys.readouterr()
    assert json.loads(out) == {
        "error": {
            "kind": "refused",
            "what": "'web' cannot migrate to b",
            "why": "no room",
            "remedy": "free some",
            "exit_code": 4,
        }
    }
    assert err.startswith("error: ")


def test_work_gives_its_result_and_its_errors() -> None:
    async def work(error: VmckptError | None) -> str:
        if error:
            raise error
        return "done"

    assert run(work(None)) == "done"
    with pytest.raises(RefusedError):
        run(work(REFUSED))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_cancels_the_work_which_says_what_that_came_to(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    async def work(*, explains: bool) -> None:
        os.kill(os.getpid(), number)
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            if explains:
                raise CancelledByUserError("undone", why="asked", remedy="none") from None
            raise

    with pytest.raises(CancelledByUserError):
        run(work(explains=True))
    with pytest.raises(click.exceptions.Abort):
        run(work(explains=False))
    assert "stopping: what was begun" in capsys.readouterr().err


def test_every_command_has_help() -> None:
    def walk(group: click.Group, *path: str) -> list[tuple[str, ...]]:
        paths = []
        for name, each in group.commands.items():
            deeper = isinstance(each, click.Group)
            paths += walk(each, *path, name) if deeper else [(*path, name)]  # type: ignore[arg-type]
        return paths

    group = typer.main.get_command(command_line([]))
    assert isinstance(group, click.Group)
    paths = walk(group)
    assert ("migrate",) in paths
    assert ("vm", "run") in paths
    for path in paths:
        assert "Usage:" in command(*path, "--help")


def test_the_version_is_the_packages() -> None:
    assert command("--version") == f"vmckpt {__version__}\n"


def test_empty_lists_are_lists(state: Path) -> None:
    nothing: Any = {"vms": [], "silent": [], "unanswered": [], "arrivals": []}
    assert json.loads(command("vm", "list", "--json")) == nothing
    assert json.loads(command("runs", "list", "--json")) == {"runs": []}
    hosts: Any = json.loads(command("host", "list", "--json"))["hosts"]
    assert [(host["name"], host["state_dir"]) for host in hosts] == [("local", str(state))]
    assert command("vm", "list").split() == ["NAME", "HOST", "STATE", "VCPUS", "MEMORY", "MACHINE"]


def test_a_host_is_listed_with_all_that_its_entry_says(state: Path) -> None:
    entry = {"migration_address": "192.0.2.7", "migration_ports": [50000, 50009]}
    entry |= {"address": "ssh://vmckpt@far:2222", "state_dir": "/var/lib/vmckpt", "bridge": "br0"}
    _enter(state, "far", entry | {"kind": "ssh"})
    [here, far] = json.loads(command("host", "list", "--json"))["hosts"]
    assert far.items() > entry.items()
    assert (here["address"], here["migration_ports"]) == (None, None)
    assert "ssh://vmckpt@far:2222" in command("host", "list")


def test_certificates_are_shown_of_all_hosts_or_of_those_named(state: Path) -> None:
    entry = {"kind": "local", "state_dir": str(state / "a"), "migration_address": "192.0.2.7"}
    for name in ("a", "b"):
        _enter(state, name, entry)

    def shown(*names: str) -> list[str]:
        hosts = json.loads(command("pki", "show", *names, "--json"))["hosts"]
        return [host["host"] for host in hosts]

    assert shown() == ["local", "a", "b"]
    assert shown("b") == ["b"]
    assert shown("b", "local") == ["b", "local"]
    with pytest.raises(NotFoundError):
        shown("c")


def _enter(state: Path, name: str, entry: dict[str, Any]) -> None:
    (state / "hosts").mkdir(exist_ok=True)
    (state / "hosts" / f"{name}.json").write_text(json.dumps(entry))


@pytest.mark.usefixtures("state")
@pytest.mark.parametrize(
    "arguments",
    [
        ("vm", "show", "nobody"),
        ("vm", "start", "nobody"),
        ("vm", "stop", "nobody"),
        ("vm", "rm", "nobody"),
        ("vm", "console", "nobody"),
        ("migrate", "nobody", "local"),
        ("migrate", "nobody", "local", "--dry-run"),
        # A limit alone is no plan: without a forecast it goes with any method.
        ("migrate", "nobody", "local", "--max-downtime", "1s", "--compress", "xbzrle"),
        ("migrate", "nobody", "local", "--plan", "--max-downtime", "1s"),
        ("migrate", "--recover", "nobody"),
        ("snapshot", "save", "nobody", "one"),
        ("snapshot", "list", "nobody"),
        ("host", "check", "nowhere"),
        ("runs", "show", "20250101-000000-abcd"),
    ],
)
def test_what_is_not_there_is_not_found(arguments: tuple[str, ...]) -> None:
    with pytest.raises(NotFoundError):
        command(*arguments)


@pytest.mark.usefixtures("state")
@pytest.mark.parametrize(
    "arguments",
    [
        ("migrate", "web"),
        ("migrate", "web", "b", "--max-downtime", "300"),
        ("migrate", "web", "b", "--max-downtime", "1h"),
        ("migrate", "nobody", "local", "--plan", "--compress", "xbzrle"),
        ("migrate", "nobody", "local", "--max-slowdown", "5%", "--compress", "xbzrle"),
        ("migrate", "web", "--recover", "--dry-run"),
        ("migrate", "web", "b", "--bandwidth", "fast"),
        ("migrate", "web", "b", "--timeout", "soon"),
        ("vm", "run", "missing.toml"),
        ("runs", "show", "../secret"),
    ],
)
def test_a_bad_request_is_refused_before_anything_is_asked(arguments: tuple[str, ...]) -> None:
    with pytest.raises(UsageError):
        command(*arguments)


@pytest.mark.usefixtures("state")
@pytest.mark.parametrize(
    "arguments", [("migrate", "web", "b", "--method", "magic"), ("nonsense",), ("vm", "show")]
)
def test_a_bad_command_line_is_said_by_the_parser(arguments: tuple[str, ...]) -> None:
    with pytest.raises(click.UsageError):
        command(*arguments)


def test_runs_are_listed_and_shown(state: Path) -> None:
    record = RunRecord("20250101-120000-abcd", "migrate", {"vm": "web", "source": "a"}, 1e9)
    record.save(state / "runs")
    (listed,) = json.loads(command("runs", "list", "--json"))["runs"]
    assert (listed["run"], listed["vm"], listed["outcome"]) == (record.run, "web", "cut off")
    shown = json.loads(command("runs", "show", record.run, "--json"))
    assert shown["request"] == {"vm": "web", "source": "a"}
    assert record.run in command("runs", "list")


def test_an_unknown_outcome_has_an_exit_code_of_its_own() -> None:
    unknown = OutcomeUnknownError("nobody knows", why="silence", remedy="ask")
    assert print_error(unknown, as_json=False) == 9
