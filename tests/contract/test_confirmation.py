"""What removes or rewinds asks a person at a terminal first, and acts at once for programs."""

import io
import json
import os
import pty
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from tests.commands import COMMAND, vmckpt
from tests.guest_like import memory, save
from tests.unit.test_checkpoint_tree import facts
from tests.unit.test_guard_records import record as guard_record
from vmckpt.cli.confirm import confirm, line_of
from vmckpt.cli.stop_requests import StopRequestedError, listen, signals
from vmckpt.errors import CancelledByUserError, UsageError
from vmckpt.fleet.guard.record import GuardPhase
from vmckpt.fleet.guard.record import load as load_guard
from vmckpt.fleet.guard.record import save as save_guard
from vmckpt.store.open import create_store, open_store

QUESTION = b"Proceed? [y/N] "
Point = tuple[Path, str]


@pytest.fixture
def point(tmp_path: Path) -> Point:
    """A state directory, and the id of the one checkpoint in it."""
    with create_store(str(tmp_path / "checkpoints")) as store:
        return tmp_path, save(store, memory(16, 1), facts=facts("before").to_json()).id


def is_there(point: Point) -> bool:
    with open_store(str(point[0] / "checkpoints")) as store:
        return point[1] in store.ids()


def at_a_terminal(
    state: Path,
    answer: bytes | signal.Signals,
    *words: str,
    question: bytes = QUESTION,
    output: int | None = None,
) -> tuple[int, str]:
    """The exit code and all that the terminal showed of a command that gets this answer.

    `output`: where its standard output goes instead.
    """
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [*COMMAND, *words],
        env=os.environ | {"VMCKPT_STATE_DIR": str(state)},
        stdin=theirs,
        stdout=theirs if output is None else output,
        stderr=theirs,
    ) as command:
        os.close(theirs)
        said, answered = b"", False
        try:
            while data := os.read(ours, 4096):
                said += data
                if question in said and not answered:
                    answered = True
                    if isinstance(answer, signal.Signals):
                        command.send_signal(answer)
                    else:
                        os.write(ours, answer)
        except OSError:
            pass  # the command has ended
        os.close(ours)
        code = command.wait(60)
    assert "Traceback" not in said.decode()
    return code, said.decode()


@pytest.mark.parametrize("answer", [b"n\n", b"\x04", signal.SIGINT])
def test_without_a_yes_nothing_is_removed(point: Point, answer: bytes | signal.Signals) -> None:
    code, said = at_a_terminal(point[0], answer, "checkpoint", "rm", "before")
    assert code == 130, said
    assert f"before ({point[1][:12]}) of vm" in said
    assert is_there(point)


def test_a_yes_removes(point: Point) -> None:
    code, said = at_a_terminal(point[0], b"y\n", "checkpoint", "rm", "before")
    assert (code, "removed: before" in said) == (0, True)
    assert not is_there(point)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def asked(
    monkeypatch: pytest.MonkeyPatch, answer: str, *, yes: bool = False, as_json: bool = False
) -> str:
    """What a person at a terminal sees of a question that gets this answer."""
    shown = Terminal()
    ours, theirs = pty.openpty()
    try:
        with os.fdopen(theirs) as stdin:
            os.write(ours, answer.encode() or b"\x04")
            monkeypatch.setattr("sys.stdin", stdin)
            monkeypatch.setattr("sys.stderr", shown)
            confirm("It is lost.", yes=yes, as_json=as_json)
    finally:
        os.close(ours)
    return shown.getvalue()


@pytest.mark.parametrize("answer", ["\n", "maybe\n", "no\n", "yes please\n", ""])
def test_only_a_yes_is_one(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    with pytest.raises(CancelledByUserError):
        asked(monkeypatch, answer)
    for accepted in ("y\n", "YES\n", " y \n"):
        assert asked(monkeypatch, accepted) == "It is lost.\nProceed? [y/N] "


def test_it_may_be_told_not_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(monkeypatch, "", yes=True) == ""
    assert asked(monkeypatch, "", as_json=True) == ""


def test_yes_is_an_option(point: Point) -> None:
    code, said = at_a_terminal(point[0], b"", "checkpoint", "rm", "before", "-y")
    assert (code, QUESTION.decode() in said) == (0, False)
    assert not is_there(point)


def test_without_a_terminal_it_acts_at_once(point: Point) -> None:
    done = vmckpt(point[0], "checkpoint", "rm", "before", "--json")
    assert json.loads(done.stdout) == {"removed": [point[1]]}
    assert not is_there(point)


def test_a_question_that_would_not_be_seen_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    monkeypatch.setattr("sys.stderr", io.StringIO())
    with pytest.raises(UsageError) as told:
        confirm("It is lost.", yes=False, as_json=False)
    assert "--yes" in told.value.remedy


def test_going_back_in_place_names_what_is_lost(point: Point) -> None:
    words = ("checkpoint", "restore", "before", "--in-place", "--host", "local")
    code, said = at_a_terminal(point[0], b"n\n", *words)
    assert code == 130
    assert "vm goes back to before" in said
    assert "is lost" in said


def test_taking_a_lab_down_names_its_vms(tmp_path: Path) -> None:
    (tmp_path / "lab/lab-a/vms/web").mkdir(parents=True)
    code, said = at_a_terminal(tmp_path, b"n\n", "lab", "down")
    assert (code, "web" in said) == (130, True)
    assert (tmp_path / "lab").exists()


@pytest.mark.timeout(60)
def test_a_guards_question_is_seen_wherever_its_commands_output_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It went into the same file, and the guard waited for an answer."""
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path))
    save_guard(guard_record("r", GuardPhase.COMMAND))
    words, asked = ("guard", "resume", "r"), b"roll back? [y/n/later] "
    to = subprocess.DEVNULL
    code, said = at_a_terminal(tmp_path, signal.SIGINT, *words, question=asked, output=to)
    assert (code, "the guard of 'web' is open" in said) == (9, True)
    save_guard(guard_record("r", GuardPhase.COMMAND))
    code, _ = at_a_terminal(tmp_path, b"n\n", *words, question=asked, output=to)
    assert (code, load_guard("r").phase) == (0, GuardPhase.KEPT)


def test_a_signal_that_does_not_interrupt_the_wait_for_an_answer_ends_it() -> None:
    """It came just before the wait, or another thread got it: Ctrl-C had no effect."""
    before, (reads, writes) = signal.getsignal(signal.SIGINT), os.pipe()
    is_over = threading.Event()

    def other_thread() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)
        if not is_over.wait(2.0):
            os.write(writes, b"y\n")

    listen()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    thread = threading.Thread(target=other_thread)
    thread.start()
    try:
        with os.fdopen(reads) as stdin, pytest.raises(StopRequestedError):
            line_of(stdin)
            pytest.fail("the answer was waited for")
    finally:
        for number in signals():
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, before)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        is_over.set()
        thread.join()
        os.close(writes)
