"""`vmckpt top` as a process: what ends it, and what its terminal looks like afterwards."""

import json
import os
import pty
import signal
import subprocess
from pathlib import Path

import pytest

from tests.commands import COMMAND, vmckpt

pytestmark = pytest.mark.contract
# What a terminal is told to change to another screen, and back (xterm's 1049).
OTHER_SCREEN, BACK = b"\x1b[?1049h", b"\x1b[?1049l"


def environment(state: Path) -> dict[str, str]:
    return os.environ | {"VMCKPT_STATE_DIR": str(state), "TERM": "xterm"}


def test_one_look_and_what_is_no_interval(tmp_path: Path) -> None:
    def run(*words: str) -> "subprocess.CompletedProcess[str]":
        return vmckpt(tmp_path, "top", *words)

    facts = json.loads(run("--once", "--json").stdout)
    assert [(host["name"], host["free_bytes"] > 0) for host in facts["hosts"]] == [("local", True)]
    assert (facts["vms"], facts["silent"]) == ([], [])
    assert run("--once").stdout.endswith("no VMs\n")
    wrong = run("--every", "often")
    assert (wrong.returncode, "often" in wrong.stderr) == (2, True)
    restless = run("--every", "0s")
    assert (restless.returncode, "the least" in restless.stderr) == (2, True)
    (tmp_path / "guards").mkdir()
    (tmp_path / "guards/damaged.json").write_text("{")
    facts = json.loads(run("--once", "--json").stdout)
    assert [host["name"] for host in facts["hosts"]] == ["local"]
    assert ["damaged" in one["what"] + one["why"] for one in facts["silent"]] == [True]


def test_programs_get_a_line_for_each_look(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*COMMAND, "top", "--json", "--every", "100ms"],
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
    ) as looking:
        assert looking.stdout is not None
        first, second = (json.loads(looking.stdout.readline()) for _ in range(2))
        assert second["at_unix_s"] > first["at_unix_s"]
        looking.send_signal(signal.SIGINT)
        looking.stdout.read()
        assert looking.wait(60) == 0


def test_a_terminal_gets_its_screen_back(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        with subprocess.Popen(
            [*COMMAND, "top", "--every", "100ms"],
            env=environment(tmp_path),
            stdout=theirs,
            stderr=theirs,
        ) as looking:
            os.close(theirs)
            said = b""
            while b"no VMs" not in said:
                said += terminal.read(65536)
            assert OTHER_SCREEN in said
            looking.send_signal(signal.SIGINT)
            rest = b""
            try:
                while data := terminal.read(65536):
                    rest += data
            except OSError:
                pass  # the other end is closed
            assert looking.wait(60) == 0
        assert BACK in rest
        assert b"Traceback" not in rest
