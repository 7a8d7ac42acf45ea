"""Locks: one holder, named, and none once it is dead; with real processes."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from vmckpt.errors import BusyError, StorageError, VmLostError
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.lock import Owner, held, read_owner
from vmckpt.migrate.locks import locked
from vmckpt.migrate.shared_link import on_the_link
from vmckpt.vm.paths import lock_path

ME = Owner("20250101-120000-abcd", "migrate to b", os.getpid(), 1e9)
OTHER = Owner("-", "snapshot save", 1, 2e9)

HOLDER = """
import sys, time
from pathlib import Path
from vmckpt.hosts.lock import Owner, held
from vmckpt.hosts.processes.process import spawn
with held(Path(sys.argv[1]), Owner("r", "the holder's work", 4711, 1.0)):
    if len(sys.argv) > 2:
        print(spawn(["sleep", "60"], Path(sys.argv[2])).pid)
    print("held", flush=True)
    time.sleep(60)
"""


@contextmanager
def holder(*arguments: Path) -> "Iterator[subprocess.Popen[str]]":
    """Another process that holds the lock at the first of `arguments`."""
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER, *map(str, arguments)], stdout=subprocess.PIPE, text=True
    )
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        if child.stdout:
            child.stdout.close()


def said(child: "subprocess.Popen[str]") -> list[str]:
    """What the holder says until it holds the lock."""
    if child.stdout is None:
        return []
    lines = []
    while (line := child.stdout.readline().strip()) != "held":
        assert line, "the holder ended"
        lines.append(line)
    return lines


def test_a_held_lock_names_its_holder_to_whoever_asks_or_comes_second(tmp_path: Path) -> None:
    path = tmp_path / "web"
    with held(path, ME):
        assert read_owner(path) == ME
        with (
            pytest.raises(BusyError, match=r"migrate to b \(run 20250101-120000-abcd"),
            held(path, OTHER),
        ):
            pass
        # The one that was turned away took nothing with it.
        assert read_owner(path) == ME


def test_a_free_lock_has_no_owner_and_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "web"
    assert read_owner(path) is None
    with held(path, ME):
        assert path.stat().st_mode & 0o777 == 0o600
    assert read_owner(path) is None
    assert not path.exists()


def test_a_lock_is_freed_by_an_error_too(tmp_path: Path) -> None:
    path = tmp_path / "web"
    with pytest.raises(ZeroDivisionError), held(path, ME):
        raise ZeroDivisionError
    with held(path, OTHER):
        assert read_owner(path) == OTHER


def test_a_lock_of_another_process_is_held(tmp_path: Path) -> None:
    path = tmp_path / "web"
    with holder(path) as child:
        said(child)
        assert read_owner(path) == Owner("r", "the holder's work", 4711, 1.0)
        with pytest.raises(BusyError, match="the holder's work"), held(path, ME):
            pass


def test_a_lock_dies_with_its_holder(tmp_path: Path) -> None:
    path = tmp_path / "web"
    with holder(path) as child:
        said(child)
        child.send_signal(signal.SIGKILL)
        child.wait()
        # Its file is still there.
        assert path.exists()
        assert read_owner(path) is None
        with held(path, ME):
            assert read_owner(path) == ME


def test_what_a_holder_started_does_not_hold_its_lock(tmp_path: Path) -> None:
    # A QEMU outlives the command that started it.
    path = tmp_path / "web"
    with holder(path, tmp_path / "log") as child:
        (pid,) = map(int, said(child))
        try:
            child.send_signal(signal.SIGKILL)
            child.wait()
            with held(path, ME):
                os.kill(pid, 0)
        finally:
            os.kill(pid, signal.SIGKILL)


def test_a_longer_owner_before_leaves_no_rest(tmp_path: Path) -> None:
    path = tmp_path / "web"
    path.write_text("x" * 5000)
    with held(path, ME):
        assert read_owner(path) == ME


def test_a_holder_that_has_not_written_its_name_yet_is_a_holder(tmp_path: Path) -> None:
    path = tmp_path / "web"
    with held(path, ME):
        os.truncate(path, 0)
        owner = read_owner(path)
        assert owner is not None
        assert "just begun" in owner.action
        with pytest.raises(BusyError, match="another operation"), held(path, OTHER):
            pass


def test_on_a_full_disk_a_lock_is_held_by_somebody_without_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "web"

    def full(fd: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with held(path, ME):
        owner = read_owner(path)
        assert owner is not None
        assert "just begun" in owner.action
        with pytest.raises(BusyError, match="another operation"), held(path, OTHER):
            pass
    assert not path.exists()


def test_a_name_that_cannot_be_written_for_another_reason_gives_the_lock_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "web"

    def broken(fd: int, data: bytes, offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pwrite", broken)
    with pytest.raises(OSError, match="Input/output"), held(path, ME):
        pass
    assert read_owner(path) is None


def test_a_disk_that_fails_as_a_lock_is_given_back_does_not_keep_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was done seemed to have failed, and a scheduler held the VM from then on."""

    def unlink(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    path = tmp_path / "web"
    with held(path, ME):
        monkeypatch.setattr(Path, "unlink", unlink)
    monkeypatch.undo()
    assert read_owner(path) is None
    with held(path, OTHER):
        assert read_owner(path) == OTHER


def test_looking_never_makes_an_operation_fail(tmp_path: Path) -> None:
    path = tmp_path / "web"
    # A dead holder's file: the onlooker opens it whenever no one holds it.
    path.touch()
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            read_owner(path)

    onlooker = threading.Thread(target=look)
    onlooker.start()
    try:
        for _ in range(150):
            path.touch()
            with held(path, ME):
                pass
    finally:
        ended.set()
        onlooker.join()


# Whoever finds the witness there is a second holder.
CONTENDER = """
import os, sys, time
from pathlib import Path
from vmckpt.errors import BusyError
from vmckpt.hosts.lock import Owner, held
path, taken, doubled = Path(sys.argv[1]), 0, 0
witness = path.with_name("witness")
print("ready", flush=True)
sys.stdin.readline()
until_s = time.monotonic() + 0.7
while time.monotonic() < until_s:
    try:
        with held(path, Owner("-", "contend", os.getpid(), 0.0)):
            taken += 1
            try:
                os.close(os.open(witness, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                doubled += 1
            else:
                witness.unlink()
    except BusyError:
        pass
print(taken, doubled)
"""


def test_there_are_never_two_holders(tmp_path: Path) -> None:
    # The file is removed at each end: the race is between its removal and the next opening.
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CONTENDER, str(tmp_path / "web")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    # All at once: each waits for its line.
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    counts = [tuple(map(int, child.communicate()[0].split())) for child in children]
    assert sum(doubled for _, doubled in counts) == 0
    assert all(taken for taken, _ in counts)


def test_who_waits_hears_how_to_end_what_does_not_end_by_itself(tmp_path: Path) -> None:
    by = ME._replace(action="replicate to b", ended_by="vmckpt replicate stop web")
    with held(tmp_path / "web", by), pytest.raises(BusyError) as busy, held(tmp_path / "web", ME):
        pass
    assert "replicate to b" in busy.value.why
    assert busy.value.remedy == "end it first: vmckpt replicate stop web"


class Slow(LocalHost):
    """A host that takes its time to give a lock back, as one does over a slow link."""

    @asynccontextmanager
    async def lock(self, path: Path, owner: Owner) -> AsyncIterator[None]:
        async with super().lock(path, owner):
            try:
                yield
            finally:
                await asyncio.sleep(0.1)


def test_a_cancellation_while_locks_are_given_back_does_not_take_back_what_is_done(
    tmp_path: Path,
) -> None:
    host = Slow("a", tmp_path, "127.0.0.1")

    async def moved(held: asyncio.Event) -> str:
        async with locked("web", (host,), "migrate", "r1"):
            held.set()
        return "it has moved"

    async def interrupted() -> str:
        held = asyncio.Event()
        task = asyncio.create_task(moved(held))
        await held.wait()
        task.cancel()
        return await task

    assert asyncio.run(interrupted()) == "it has moved"
    assert not lock_path(tmp_path, "web").exists()


def test_a_cancellation_while_a_migration_leaves_the_link_does_not_hide_how_it_ended(
    tmp_path: Path,
) -> None:
    source, target = (Slow(name, tmp_path / name, "127.0.0.1") for name in "ab")

    async def moved(counted: asyncio.Event) -> None:
        async with on_the_link(source, target, "r1", 60, lambda *_: None):
            counted.set()
            raise VmLostError("'web' is lost", why="both ends are gone", remedy="-")

    async def interrupted() -> None:
        counted = asyncio.Event()
        task = asyncio.create_task(moved(counted))
        await counted.wait()
        task.cancel()
        await task

    with pytest.raises(VmLostError):
        asyncio.run(interrupted())
    assert not list(tmp_path.glob("*/links/*/*"))


def test_a_lock_that_cannot_be_made_is_the_storages_error(tmp_path: Path) -> None:
    """In a drain it was taken for a bug of vmckpt's, and its VM's outcome for unknown."""
    path = tmp_path / "locks/web"
    path.parent.mkdir()
    path.symlink_to(tmp_path / "elsewhere")

    async def take() -> None:
        host = LocalHost("a", tmp_path, "127.0.0.1")
        with pytest.raises(StorageError, match="cannot write"):
            async with host.lock(path, Owner("r", "migrate", 1, 0.0)):
                raise AssertionError

    asyncio.run(take())
