"""The command as a process: what its callers see when they look away."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

import pytest

from vmckpt.cli.main import report
from vmckpt.migrate import recorded
from vmckpt.migrate.recorded import dead_mans_switch

COMMAND = [sys.executable, "-m", "vmckpt.cli.entry"]


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_an_error_that_nobody_reads_keeps_its_exit_code(tmp_path: Path, more: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [*COMMAND, "vm", "show", "nobody", *more],
            env=os.environ | {"VMCKPT_STATE_DIR": str(tmp_path)},
            stdout=subprocess.DEVNULL,
            stderr=writing,
            timeout=30,
            check=False,
        )
    finally:
        os.close(writing)
    assert done.returncode == 3


def test_output_that_nobody_reads_ends_the_command(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [*COMMAND, "host", "list"],
            env=os.environ | {"VMCKPT_STATE_DIR": str(tmp_path)},
            stdout=writing,
            stderr=subprocess.PIPE,
            timeout=30,
            check=False,
        )
    finally:
        os.close(writing)
    assert done.returncode == 1
    assert done.stderr == b""


def test_what_a_terminal_cannot_show_ends_no_command(tmp_path: Path) -> None:
    """Words of a guest, or a tree of checkpoints, where the locale is Latin-1."""
    (tmp_path / "runs").mkdir()
    record = {"format": 1, "run": "r1", "operation": "migrate", "request": {"vm": "\u65e5\u672c"}}
    record["began_unix_s"] = 1e9
    (tmp_path / "runs/r1.json").write_text(json.dumps(record))
    done = subprocess.run(
        [*COMMAND, "runs", "list"],
        env=os.environ | {"VMCKPT_STATE_DIR": str(tmp_path), "PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert rb"\u65e5\u672c" in done.stdout


def asked_until_it_ends(
    command: "subprocess.Popen[str]", number: signal.Signals
) -> tuple[str, str]:
    """Its output. Asked once more where the first signal was lost.

    CPython looks for signals before it enters a system call, not at once with it: one that comes
    between the two waits for the next one if the call does not return, as the read of a FIFO that
    no one writes to. It was seen once, on a busy machine.
    """
    for _ in range(30):
        command.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            return command.communicate(timeout=1)
    raise TimeoutError("it does not end")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_whoever_asks_for_the_end_is_heard_before_there_is_work(
    tmp_path: Path, number: signal.Signals
) -> None:
    spec = tmp_path / "spec.toml"
    os.mkfifo(spec)
    with subprocess.Popen(
        [*COMMAND, "vm", "run", str(spec), "--json"],
        env=os.environ | {"VMCKPT_STATE_DIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as command:
        writing = -1
        try:
            while writing < 0 and command.poll() is None:
                with suppress(OSError):  # until it reads its spec, which has no end
                    writing = os.open(spec, os.O_WRONLY | os.O_NONBLOCK)
            out, err = asked_until_it_ends(command, number)
        finally:
            command.kill()
            os.close(writing)
    assert command.returncode == 130, err
    assert json.loads(out)["error"]["kind"] == "cancelled"
    assert "Traceback" not in err


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(
    ("words", "variables", "remedy"),
    [
        (["vm", "list"], [], "VMCKPT_STATE_DIR"),
        (["host", "add", "a", "ssh://127.0.0.1:1"], ["HOME={}"], "set USER and HOME"),
        (["host", "add", "a", "ssh://127.0.0.1:1"], ["VMCKPT_STATE_DIR={}"], "set USER and HOME"),
    ],
)
def test_a_user_without_an_account_is_told_what_to_set(
    tmp_path: Path, words: list[str], variables: list[str], remedy: str
) -> None:
    """As in a container that runs as any number."""
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, 54321, 54321)
    become = "setpriv --reuid=54321 --regid=54321 --clear-groups "
    become += "--inh-caps=+dac_read_search --ambient-caps=+dac_read_search env -i"
    argv = [*become.split(), *(one.format(home) for one in variables), *COMMAND, *words]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2, done.stderr
    assert remedy in done.stderr


@pytest.mark.parametrize("words", [["serve"], ["serve", "--json"]])
def test_a_far_side_without_a_connection_says_what_is_meant(
    tmp_path: Path, words: list[str]
) -> None:
    """As in a unit of systemd that lacks --scheduler: "vmckpt has a bug", after a traceback."""
    done = subprocess.run(
        [*COMMAND, *words],
        env=os.environ | {"VMCKPT_STATE_DIR": str(tmp_path)},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout[:1] in ("", "{")) == (2, True)
    assert "vmckpt serve --scheduler" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_state_directory_is_not_relative_to_where_one_is(tmp_path: Path) -> None:
    """`vmckpt has a bug`, or a second, empty state in each directory."""
    become = ("setpriv", "--reuid=54321", "--regid=54321", "--clear-groups")
    rights = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search", "env", "-i",
              f"PYTHONPATH={os.environ.get('PYTHONPATH', '')}")  # fmt: skip
    for given, code in ((["HOME=home"], 2), (["XDG_STATE_HOME=state", f"HOME={tmp_path}"], 0)):
        done = subprocess.run(
            [*become, *rights, *given, *COMMAND, "vm", "list"],
            cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        assert ("VMCKPT_STATE_DIR" in done.stderr) is (code == 2)


@pytest.mark.parametrize(
    ("words", "starter", "code"),
    [
        (["settle-groups"], None, 0),
        (["migrate", "--recover", "web", "--insist"], "4194303", 3),
        (["migrate", "--recover", "web"], None, 2),
    ],
    ids=["hidden", "dead-man's switch", "operator"],
)
def test_a_malformed_configuration_stops_no_recovery(
    tmp_path: Path, words: list[str], starter: str | None, code: int
) -> None:
    """The guest of the process that died may be paused."""
    (tmp_path / "vmckpt").mkdir()
    (tmp_path / "vmckpt/config.toml").write_text("malformed")
    env = {"VMCKPT_STATE_DIR": str(tmp_path / "state"), "XDG_CONFIG_HOME": str(tmp_path)}
    if starter is not None:
        env["VMCKPT_STARTER"] = starter
    done = subprocess.run(
        [*COMMAND, *words], env=os.environ | env, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == code, done.stderr
    assert (b"config.toml cannot be used" in done.stderr) is (code == 2)


def test_a_configuration_that_cannot_be_looked_for_is_none(tmp_path: Path) -> None:
    """As where `sudo -u USER` keeps a HOME that the user may not search."""
    given = {"VMCKPT_STATE_DIR": str(tmp_path), "XDG_CONFIG_HOME": f"/{'too-long' * 40}"}
    done = subprocess.run(
        [*COMMAND, "migrate", "web", "nowhere"],
        env=os.environ | given,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, "nowhere" in done.stderr) == (3, True), done.stderr


def test_the_dead_mans_switch_takes_any_name_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libvirt has domains whose names begin with a dash."""
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path))
    commands = list[Sequence[str]]()

    def armed(command: Sequence[str], _: Path) -> AbstractContextManager[None]:
        commands.append(command)
        return nullcontext()

    async def main() -> None:
        async with dead_mans_switch("-web", "r"):
            pass

    monkeypatch.setattr(recorded, "armed", armed)
    asyncio.run(main())
    done = subprocess.run(commands[0], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "-web" in done.stdout) == (3, True), done.stderr


def test_a_bug_is_told_of_though_its_traceback_cannot_be_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a full disk the report of one bug was another one's traceback."""
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    assert report(KeyError("x")) == 1
    said = capsys.readouterr().err
    assert "vmckpt has a bug" in said
    assert "report it with what it says" in said
