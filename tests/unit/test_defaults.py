"""Defaults of options from files and the environment: which one counts, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer.main

from vmckpt.cli.main import COMMANDS, NOUNS, command_line, main
from vmckpt.cli.tree import defaults
from vmckpt.errors import UsageError
from vmckpt.state import config_files

pytestmark = pytest.mark.unit
KNOWN = (*COMMANDS, *NOUNS)
Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    monkeypatch.setattr(config_files, "SYSTEM_FILE", tmp_path / "etc.toml")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))

    def written(which: str, text: str) -> Path:
        path = tmp_path / ("etc.toml" if which == "etc" else "vmckpt/config.toml")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return written


def given(word: str) -> dict[str, Any]:
    return defaults.default_map(typer.main.get_group(command_line([word])), KNOWN)


def test_the_environment_comes_before_the_users_file_and_that_before_the_systems(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not config_files.are_there("migrate")
    assert given("migrate") == {}
    write("etc", '[migrate]\nbandwidth = "1GB/s"\nparallel = 2\ntls = "require"\n')
    write("user", '[migrate]\nbandwidth = "2GB/s"\nparallel = 4\n[vm.stop]\ntimeout = "5s"\n')
    monkeypatch.setenv("VMCKPT_MIGRATE_PARALLEL", "8")
    assert config_files.are_there("migrate")
    assert set(given("migrate")["migrate"].values()) == {"2GB/s", "8", "require"}
    assert given("vm") == {"vm": {"stop": {"timeout": "5s"}}}


def test_a_variable_alone_is_enough(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VMCKPT_CHECKPOINT_CREATE_TAG", "by=ops 'why=a test'")
    assert (config_files.are_there("checkpoint"), config_files.are_there("vm")) == (True, False)
    assert given("checkpoint")["checkpoint"]["create"]["tag"] == ["by=ops", "why=a test"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[migrat]\n", "there is no command 'migrat'"),
        ("[migrate]\nbandwith = 1\n", "`migrate` has no option --bandwith"),
        ("[migrate]\njson = true\n", "`migrate` has no option --json"),
        ("[migrate]\ninsist = true\n", "`migrate` has no option --insist"),
        ("[migrate]\nbandwidth = [1]\n", "bandwidth of migrate is not one value"),
        ("[migrate]\nbandwidth = {a = 1}\n", "bandwidth of migrate is not one value"),
        ("migrate = 5\n", "`migrate` is not a table"),
        ("migrate\n", "Expected '='"),
        ("\xff", "Invalid"),
        ("#" * (1 << 20) + "\n", "it has more than 1 MiB"),
    ],
)
def test_what_no_command_has_is_refused(write: Write, text: str, why: str) -> None:
    write("user", text)
    with pytest.raises(UsageError) as caught:
        given("migrate")
    assert why in caught.value.why


@pytest.mark.parametrize(
    ("table", "option"),
    [
        ("replicate.failover", "primary-is-dead"),
        ("replicate.stop", "standby-is-dead"),
        ("checkpoint.restore", "host"),
        ("vm.run", "silent-hosts-are-off"),
        ("vm.stop", "host"),
        ("vm.rm", "host"),
    ],
)
def test_no_default_says_that_a_silent_host_runs_no_guest(
    write: Write, monkeypatch: pytest.MonkeyPatch, table: str, option: str
) -> None:
    word = table.partition(".")[0]
    monkeypatch.setenv(f"VMCKPT_{table}_{option}".upper().translate(str.maketrans(".-", "__")), "1")
    assert given(word) == {}
    write("user", f'[{table}]\n{option} = "1"\n')
    with pytest.raises(UsageError) as caught:
        given(word)
    assert f"has no option --{option} to set" in caught.value.why


def test_a_command_that_is_not_asked_is_not_looked_at(write: Write) -> None:
    write("user", '[checkpoint.creat]\nstore = "x"\n')
    assert given("migrate") == {}
    with pytest.raises(UsageError, match=r"config\.toml cannot be used"):
        given("checkpoint")


@pytest.mark.parametrize("mode", [0o666, 0o664])
def test_a_file_that_others_may_write_is_refused(write: Write, mode: int) -> None:
    """It may name a command that is run: --key-command."""
    write("user", '[migrate]\nbandwidth = "1GB/s"\n').chmod(mode)
    with pytest.raises(UsageError) as caught:
        given("migrate")
    assert "another user may write it" in caught.value.why


def test_a_list_in_a_variable_that_is_malformed_is_refused(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VMCKPT_CHECKPOINT_CREATE_TAG", "why=it's")
    with pytest.raises(UsageError, match=r"\$VMCKPT_CHECKPOINT_CREATE_TAG cannot be used"):
        given("checkpoint")


@pytest.mark.parametrize(
    "words", [("checkpoint", "list"), ("checkpoint", "list", "--help"), ("--help",)]
)
def test_a_default_of_one_command_stands_in_the_way_of_no_other(
    write: Write,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
) -> None:
    write("user", '[checkpoint.create]\nname = "nightly"\n[vm.stop]\ntimeout = "5s"\n')
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr("sys.argv", ["vmckpt", *words])
    assert main() == 0, capsys.readouterr().err
