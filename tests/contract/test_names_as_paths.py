"""A path where a name is meant: no command touches that file, which root's commands could."""

from pathlib import Path

import pytest

from tests.commands import vmckpt
from vmckpt.errors import UsageError
from vmckpt.fleet.guard import record as guards
from vmckpt.fleet.schedule import record as schedules
from vmckpt.hosts.inventory.inventory import local_host
from vmckpt.replicate.narration import events_file
from vmckpt.replicate.request import ServiceFiles
from vmckpt.vm.paths import file_name, lock_path, vm_dir

pytestmark = pytest.mark.contract
PATHS = ("/etc/passwd", "../../etc/passwd", "a/b", ".", "..", "", "a\0b", "x" * 201, "\ud800")
COMMANDS = (
    ("vm", "show", "{}"),
    ("migrate", "{}", "local"),
    ("migrate", "{}", "local", "--dry-run"),
    ("checkpoint", "create", "{}"),
    ("checkpoint", "create", "--group", "{},web", "--name", "x"),
    ("guard", "{}", "--", "true"),
    ("replicate", "status", "{}"),
    ("schedule", "rm", "{}"),
)


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words[:2]))
def test_no_command_removes_or_changes_a_file_that_is_given_as_a_name(
    short_path: Path, words: tuple[str, ...]
) -> None:
    files = [short_path / name for name in ("precious", "precious.lock", "precious.json")]
    for file in files:
        file.write_text("precious")
    name = str(files[0])
    done = vmckpt(short_path / "state", *(word.format(name) for word in words))
    assert done.returncode in {2, 3}, done.stderr
    assert "bug" not in done.stderr
    assert [file.read_text() for file in files] == ["precious"] * 3
    assert {path.name for path in short_path.iterdir()} <= {f.name for f in files} | {"state"}


@pytest.mark.parametrize("name", PATHS)
def test_a_name_is_one_file_in_its_directory(name: str, short_path: Path) -> None:
    state = short_path / "state"
    for refused in (
        lambda: file_name(name, "VM"),
        lambda: vm_dir(state, name),
        lambda: lock_path(state, name),
        lambda: ServiceFiles.of(local_host(), name),
        lambda: events_file(local_host(), name),
        lambda: schedules.load(name),
        lambda: schedules.lock_path(name),
        lambda: guards.load(name),
    ):
        with pytest.raises(UsageError, match="is not a name for a"):
            refused()


@pytest.mark.parametrize("name", ["web", "My domain (old)", "-x", "müller", "a.b", "x" * 200])
def test_names_of_domains_are_names_too(name: str) -> None:
    assert file_name(name, "VM") == name


@pytest.mark.parametrize("words", [("fork", "x", "--store=\udcff"), ("vm", "show", "\udcff")])
def test_what_is_no_utf_8_is_said_to_be_none(short_path: Path, words: tuple[str, ...]) -> None:
    done = vmckpt(short_path, *words)
    assert done.returncode == 2
    assert "is not text" in done.stderr


@pytest.mark.parametrize("words", [("store", "init", ""), ("checkpoint", "list", "--store", " ")])
def test_an_empty_place_is_not_the_directory_that_one_is_in(
    short_path: Path, words: tuple[str, ...]
) -> None:
    """As with a variable of the shell that is not set."""
    here = short_path / "here"
    here.mkdir()
    done = vmckpt(short_path / "state", *words, cwd=here)
    assert done.returncode == 2, done.stderr
    assert list(here.iterdir()) == []
