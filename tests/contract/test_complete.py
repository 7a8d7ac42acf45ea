"""What a shell is given to complete, of commands and of names."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vmckpt.cli.tree.names import CHECKPOINTS, VMS, remember, remember_new

pytestmark = pytest.mark.contract
SHELLS = {"bash": "complete_bash", "zsh": "complete_zsh", "fish": "complete_fish"}


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path))
    (tmp_path / "vms/web-1").mkdir(parents=True)
    (tmp_path / "hosts").mkdir()
    (tmp_path / "schedules").mkdir()
    (tmp_path / "schedules/weekly.json").write_text("{}")
    entry = {"kind": "ssh", "address": "ssh://h2.invalid", "state_dir": "/x",
             "migration_address": "192.0.2.1"}  # fmt: skip
    (tmp_path / "hosts/h2.json").write_text(json.dumps(entry))
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/20261127T101500-web.json").write_text("{}")
    remember(VMS, ["web-2", "db"])
    remember(CHECKPOINTS, ["nightly"])
    remember_new(CHECKPOINTS, "before")
    return tmp_path


def completed(line: str, shell: str = "bash") -> list[str]:
    words = line.split(" ")
    asked = {
        "_VMCKPT_COMPLETE": SHELLS[shell],
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    done = subprocess.run(
        [sys.executable, "-m", "vmckpt.cli.entry"],
        env={**os.environ, **asked}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("vmckpt migrate w", ["web-1", "web-2"]),
        ("vmckpt migrate web-1 ", ["h2", "local"]),
        ("vmckpt check web-1 local h", ["h2"]),
        ("vmckpt checkpoint restore ", ["before", "nightly"]),
        ("vmckpt checkpoint rm before n", ["nightly"]),
        ("vmckpt fork --host h", ["h2"]),
        ("vmckpt fork ", ["before", "db", "nightly", "web-1", "web-2"]),
        ("vmckpt runs show ", ["20261127T101500-web"]),
        ("vmckpt schedule rm ", ["weekly"]),
        ("vmckpt mig", ["migrate"]),
        ("vmckpt store key ro", ["rotate"]),
        ("vmckpt snap", []),
        ("vmckpt migrate web-1 h2 --max-d", ["--max-downtime"]),
    ],
)
def test_bash_is_given_names(state: Path, line: str, names: list[str]) -> None:
    assert completed(line) == names


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_are_given_names(state: Path, shell: str) -> None:
    assert "web-2" in " ".join(completed("vmckpt migrate w", shell))


def test_nothing_is_there_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path / "none"))
    assert completed("vmckpt vm show ") == []
    assert completed("vmckpt checkpoint show ") == []


@pytest.mark.parametrize(
    "name",
    ["a$(x)", r"a\$(x)", r"a\`x`", "a;x", "a x", "a'x", 'a"x', "a*", "~a", "-a", "a\x1b[0m"],
)
@pytest.mark.parametrize("shell", SHELLS)
def test_no_name_is_a_command_of_the_shell(state: Path, name: str, shell: str) -> None:
    """Others choose names of VMs and checkpoints; a shell puts them into its line as they are."""
    remember(CHECKPOINTS, [name, "\u00fc-1_.x:y@z"])
    found = " ".join(completed("vmckpt checkpoint restore ", shell))
    assert "\u00fc-1_.x" in found
    assert not re.search(r"\ba", found.replace("_arguments", ""))


def test_names_that_cannot_be_written_end_no_command(tmp_path: Path) -> None:
    """Half a character, which JSON can have; and any that the locale has not."""
    code = (
        "from vmckpt.cli.tree.names import VMS, remember, remembered;"
        r"remember(VMS, ['\u65e5', 'a\ud800', 'web']); print(ascii(remembered(VMS)))"
    )
    done = subprocess.run(
        [sys.executable, "-X", "utf8=0", "-c", code],
        env=os.environ
        | {"VMCKPT_STATE_DIR": str(tmp_path), "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout == r"['\u65e5', 'web']" + "\n", done.stderr


def test_the_same_names_are_not_written_again(state: Path) -> None:
    kept = state / "completion" / VMS
    before = kept.stat().st_ino
    remember(VMS, ["web-2", "db", "db"])
    assert kept.stat().st_ino == before
    remember(VMS, ["db"])
    assert kept.read_text() == "db\n"
