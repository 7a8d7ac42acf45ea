"""What a guard writes down, and what a health check means."""

import errno
import json
from pathlib import Path

import pytest

from vmckpt.errors import NotFoundError, StorageError, UsageError
from vmckpt.fleet.guard.health import CheckKind, parse_check
from vmckpt.fleet.guard.record import (
    GuardPhase,
    GuardProof,
    GuardRecord,
    GuardRequest,
    GuardWorker,
    OnFailure,
    Where,
    ended,
    forget,
    guards_dir,
    keep_room,
    load,
    load_all,
    of_vm,
    save,
)
from vmckpt.fleet.schedule.run import clock
from vmckpt.state import durable

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path))


def request(vm: str = "web") -> GuardRequest:
    return GuardRequest(
        vm=vm,
        command=("apt", "upgrade"),
        where=Where.GUEST,
        checks=("agent", "tcp:80"),
        address=None,
        watch_s=60.0,
        every_s=5.0,
        failures=3,
        command_timeout_s=None,
        on_failure=OnFailure.ASK,
        proof=GuardProof.READ,
        keep_s=86400.0,
        max_pause_s=0.01,
        after_rollback=("mail root",),
        store=None,
    )


def record(run: str, phase: GuardPhase, vm: str = "web") -> GuardRecord:
    return GuardRecord(run, request(vm), phase, 1.0)


def test_it_is_read_as_it_was_written() -> None:
    written = save(
        record("r1", GuardPhase.PREPARING),
        phase=GuardPhase.COMMAND,
        checkpoint="c1",
        worker=GuardWorker("local", "/r"),
    )
    assert load("r1") == written
    assert [path.name for path in guards_dir().iterdir()] == ["r1.json"]
    forget(written)
    forget(written)
    assert load_all().records == {}


def test_the_guard_of_a_vm_is_the_one_that_is_not_over() -> None:
    save(record("r1", GuardPhase.OPEN))
    save(record("r2", GuardPhase.KEPT))
    save(record("r3", GuardPhase.OPEN, "db"))
    assert of_vm("web").run == "r1"
    save(load("r1"), phase=GuardPhase.ROLLED_BACK)
    assert of_vm("web").run == "r2"
    with pytest.raises(NotFoundError, match="'mail' has no guard"):
        of_vm("mail")


@pytest.mark.parametrize("text", ["", "{", "{}", json.dumps({"request": {}, "worker": None})])
def test_a_damaged_one_is_named(text: str) -> None:
    save(record("r1", GuardPhase.OPEN))
    (guards_dir() / "r1.json").write_text(text)
    with pytest.raises(StorageError, match=r"r1\.json is damaged"):
        load("r1")


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "guards").write_text("no directory")
    with pytest.raises(StorageError, match="cannot make"):
        save(record("r1", GuardPhase.PREPARING))


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("agent", CheckKind.AGENT, ()),
        ("tcp:80", CheckKind.TCP, ("192.0.2.1", "80")),
        ("tcp:web.example:443", CheckKind.TCP, ("web.example", "443")),
        ("tcp:[2001:db8::1]:443", CheckKind.TCP, ("2001:db8::1", "443")),
        ("https://web/ok", CheckKind.HTTP, ("https://web/ok",)),
        ("curl -f 'a b'", CheckKind.COMMAND, ("curl", "-f", "a b")),
    ],
)
def test_a_check_says_what_it_asks(text: str, kind: CheckKind, words: tuple[str, ...]) -> None:
    assert parse_check(text, "192.0.2.1")[:2] == (kind, words)


@pytest.mark.parametrize("text", ["", "tcp:", "tcp:0", "tcp:http", "tcp:1.2.3.4:99999", "'a"])
def test_what_is_no_check_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a health check"):
        parse_check(text, None)


def test_a_damaged_record_keeps_no_other_guard_from_its_end() -> None:
    """`guard list`, and `rollback`, `commit` and `resume` of every VM, ended with its damage."""
    mine = save(record("r2", GuardPhase.OPEN))
    over = save(record("r3", GuardPhase.KEPT, "db"))
    (guards_dir() / "r1.json").write_text("{}")
    known = load_all()
    assert list(known.records.values()) == [mine, over]
    assert len(known.damaged) == 1
    assert of_vm("web") == mine
    for unsure in ("db", "other"):  # the damaged one may be its, and open
        with pytest.raises(StorageError):
            of_vm(unsure)


def test_how_it_ended_is_written_on_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was rolled back, as nothing said, was rolled back once more by `guard resume`."""
    mine = save(record("r1", GuardPhase.COMMAND))
    keep_room(mine)
    [room] = (path for path in guards_dir().iterdir() if path.stat().st_blocks * 512 >= 256 << 10)
    write = durable.replace

    def full(path: Path, text: str, **mode: int) -> None:
        if room.exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, text, **mode)

    monkeypatch.setattr(durable, "replace", full)
    over = save(mine, **ended(mine, GuardPhase.ROLLED_BACK, clock()))
    assert load("r1") == over
    with pytest.raises(StorageError, match="No space left"):  # no one keeps room for this one
        room.touch()
        save(record("r2", GuardPhase.COMMAND))


def test_a_guard_that_is_over_keeps_no_room() -> None:
    mine = save(record("r1", GuardPhase.COMMAND))
    keep_room(mine)
    over = save(mine, **ended(mine, GuardPhase.KEPT, clock()))
    assert [path.name for path in guards_dir().iterdir()] == ["r1.json"]
    forget(over)
    assert not list(guards_dir().iterdir())
