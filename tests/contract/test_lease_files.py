"""Leases in files: killed and stopped processes, a full disk, files that someone touched."""

import asyncio
import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from vmckpt.deadlines import retry
from vmckpt.errors import OutcomeUnknownError, StorageError
from vmckpt.lease import file_store
from vmckpt.lease.file_store import KEPT, MOST_WAITING, MOVED, FileStore
from vmckpt.lease.lease import Lease
from vmckpt.lease.record import LeaseRecord, LeaseSpan, encode
from vmckpt.lease.rule import Claimant
from vmckpt.lease.store import NONE_YET, ArbiterDownError, Versioned

SPAN = LeaseSpan(1.0)
FIRST = LeaseRecord(1, "a/1", 1, SPAN)

# Renews without end; says each version that it was told is there to stay.
WRITER = """
import asyncio, sys
from dataclasses import replace
from pathlib import Path
from vmckpt.lease.file_store import FileStore
from vmckpt.lease.record import LeaseRecord, LeaseSpan

async def play():
    store = FileStore(Path(sys.argv[1]), timeout_s=20.0)
    now = await store.read("web")
    while True:
        record = replace(now.record, attempt=now.record.attempt + 1)
        now = await store.replace("web", record, over=now.version)
        print(now.version, now.record.attempt, flush=True)

asyncio.run(play())
"""


def put(store: FileStore, attempt: int, over: int) -> Versioned:
    return asyncio.run(store.replace("web", LeaseRecord(1, "lab-a", attempt, SPAN), over=over))


def read(store: FileStore) -> Versioned:
    found = asyncio.run(store.read("web"))
    assert found is not None
    return found


def test_a_writer_may_be_killed_at_any_instant(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    now = put(store, 1, NONE_YET)
    chance = random.Random(1)
    written = 0
    for _ in range(10):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        # However slowly it writes: by some records' time, not by the clock's alone.
        lines = [writer.stdout.readline() for _ in range(chance.randint(1, 4))]
        time.sleep(chance.uniform(0, 0.03))
        writer.kill()
        lines += writer.stdout.readlines()
        writer.stdout.close()
        writer.wait()
        told = [int(line.split()[0]) for line in lines if line.endswith("\n")]
        written += len(told)
        found = read(store)
        # All that it was told of is there; at most one more, whose answer it did not live to see.
        assert found.version in (told[-1], told[-1] + 1)
        assert found.version == found.record.attempt
        assert found.version > now.version
        now = found
    assert written > 10
    assert put(store, now.version + 1, now.version).version == now.version + 1
    # A killed writer's part lies about for an hour.
    parts = [path for path in (tmp_path / "web.leases").iterdir() if path.suffix == ".part"]
    assert len(parts) <= 10
    for part in parts:
        os.utime(part, (time.time() - 7200, time.time() - 7200))
    last = put(store, now.version + 2, now.version + 1).version
    assert versions(tmp_path) == list(range(last - KEPT + 1, last + 1))
    assert len(list((tmp_path / "web.leases").iterdir())) == KEPT


# Stands still just before its record is put in place, until it is let go on.
STANDS_STILL = """
import asyncio, signal, sys, threading
from pathlib import Path
from vmckpt.lease.file_store import FileStore
from vmckpt.lease.record import LeaseRecord, LeaseSpan
link = Path.hardlink_to
def late(self, target):
    print("here", flush=True)
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    link(self, target)
Path.hardlink_to = late
store = FileStore(Path(sys.argv[1]), timeout_s=20.0)
record = LeaseRecord(2, "slow", 1, LeaseSpan(1.0))
found = asyncio.run(store.replace("web", record, over=int(sys.argv[2])))
print(found.version, found.record.holder, flush=True)
"""


@pytest.mark.parametrize("meanwhile", [0, 1, KEPT + 5])
def test_who_stands_still_blocks_nobody_and_takes_nothing_back(
    tmp_path: Path, meanwhile: int
) -> None:
    """With a lock and rename(2) it overwrote another's term once a server had ended its lock."""
    store = FileStore(tmp_path, timeout_s=20.0)
    put(store, 1, NONE_YET)
    slow = subprocess.Popen(
        [sys.executable, "-c", STANDS_STILL, str(tmp_path), "1"], stdout=subprocess.PIPE, text=True
    )
    assert slow.stdout is not None
    try:
        assert slow.stdout.readline() == "here\n"
        os.waitpid(slow.pid, os.WUNTRACED)
        for attempt in range(meanwhile):
            assert put(store, attempt + 2, attempt + 1).version == attempt + 2
        slow.send_signal(signal.SIGCONT)
        told = slow.stdout.readline().split()
        assert slow.wait(20) == 0
    finally:
        slow.kill()
        slow.wait()
        slow.stdout.close()
    found = read(store)
    assert found.version == max(2, meanwhile + 1)
    assert found.record.holder == ("lab-a" if meanwhile else "slow")
    assert told == [str(found.version), found.record.holder]
    assert versions(tmp_path)[-1] == found.version
    assert not list((tmp_path / "web.leases").glob(".*"))


def versions(directory: Path) -> list[int]:
    return sorted(int(path.name) for path in (directory / "web.leases").glob("[0-9]*"))


def test_an_answer_that_a_server_lost_does_not_make_the_writer_give_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = Path.hardlink_to

    def linked_twice(self: Path, target: Path) -> None:
        link(self, target)
        link(self, target)

    monkeypatch.setattr(Path, "hardlink_to", linked_twice)
    assert put(FileStore(tmp_path), 1, NONE_YET).version == 1


@pytest.mark.parametrize("fails", ["link", "list", "sync"])
def test_an_error_after_which_a_record_may_stand_there_is_no_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """A share that is mounted "soft": what took too long is an error here, and done on the server.

    A standby that had claimed the term took it for another's, and gave its guest up.
    """
    store = FileStore(tmp_path)
    primary = Lease(store, "web", Claimant("a/1"), LeaseSpan(0.1))
    standby = Lease(store, "web", Claimant("b/1", replica="b/1"), LeaseSpan(0.1))

    def late(self: Path, target: Path) -> None:
        os.link(target, self)
        raise OSError(errno.EIO, "Input/output error")

    def unlisted(_directory: Path) -> int:
        raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")

    async def main() -> None:
        await primary.take()
        await primary.record_in_sync("b/1")
        await standby.read()
        with monkeypatch.context() as patch:
            if fails == "link":
                patch.setattr(Path, "hardlink_to", late)
            elif fails == "list":
                patch.setattr(
                    Path, "hardlink_to", lambda self, target: _linked(patch, self, target)
                )
            else:
                patch.setattr(file_store, "_settle", lambda *_: unlisted(tmp_path))
            with pytest.raises(OutcomeUnknownError):
                await standby.claim()
        await standby.read()
        assert standby.held is not None
        assert standby.held.term == 2

    def _linked(patch: pytest.MonkeyPatch, path: Path, target: Path) -> None:
        os.link(target, path)
        patch.setattr(file_store, "_highest", unlisted)

    asyncio.run(main())


def test_a_refusal_is_none_that_may_have_been_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_path: Path, _target: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refused)
    with pytest.raises(StorageError, match="hard links"):
        put(FileStore(tmp_path), 1, NONE_YET)


def test_a_record_of_an_older_vmckpt_goes_on_and_is_not_replaced_by_it(tmp_path: Path) -> None:
    single = tmp_path / "web.lease"
    single.write_text("7\n" + encode(LeaseRecord(3, "lab-a", 7, SPAN)))
    store = FileStore(tmp_path)
    assert read(store).version == 7
    assert put(store, 1, 6).version == 7
    assert single.read_text().startswith("7")
    whole = single.read_bytes()
    for damaged in (b"\xb7" + whole[1:], b"7" * 5000 + whole[1:], whole.replace(b"a", b"\xe1")):
        single.write_bytes(damaged)
        with pytest.raises(StorageError, match=str(single)):
            read(store)
    single.write_bytes(whole)
    assert put(store, 8, 7).version == 8
    assert read(store).record.attempt == 8
    assert single.read_text() == MOVED


def test_a_disk_that_is_full_changes_nothing(tmp_path: Path) -> None:
    # No file may grow: what a full disk says, without one.
    store = FileStore(tmp_path)
    first = put(store, 1, NONE_YET)
    script = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10));" + WRITER
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert "StorageError: cannot write the lease of 'web'" in done.stderr
    assert done.stdout == ""
    assert read(store) == first
    assert [path.name for path in (tmp_path / "web.leases").iterdir()] == ["0" * 19 + "1"]


def test_a_directory_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = FileStore(tmp_path / "file")
    with pytest.raises(StorageError, match="Not a directory"):
        put(store, 1, NONE_YET)
    with pytest.raises(ArbiterDownError, match="Not a directory"):
        asyncio.run(store.read("web"))


def test_a_file_that_somebody_touched_grants_nothing(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    first = put(store, 1, NONE_YET)
    (path,) = (tmp_path / "web.leases").iterdir()
    whole = path.read_text()
    damaged = whole.encode().replace(b"lab-a", b"lab-\xe1")  # a bit of it flipped
    texts = ("", "x", whole[: len(whole) // 2], whole.replace("lab-a", "\0", 1))
    for data in (*map(str.encode, texts), damaged):
        path.write_bytes(data)
        with pytest.raises(StorageError, match=str(path)):
            read(store)
        with pytest.raises(StorageError, match=str(path)):
            put(store, 2, first.version)
    path.unlink()
    with pytest.raises(StorageError, match="is gone"):
        put(store, 2, first.version)
    path.write_text(whole)
    assert read(store) == first


def test_a_directory_that_gives_no_answer_for_hours_takes_no_thread_each_time(
    tmp_path: Path,
) -> None:
    (tmp_path / "web.leases").mkdir()
    pipe = tmp_path / "web.leases" / ("0" * 19 + "1")
    os.mkfifo(pipe)
    store, before = FileStore(tmp_path, timeout_s=0.002), threading.active_count()

    async def main() -> None:
        for _ in range(4 * MOST_WAITING):
            with pytest.raises(ArbiterDownError, match="did not answer"):
                await store.read("web")
        assert threading.active_count() <= before + MOST_WAITING
        # When the server is back it is asked as before.
        with pipe.open("w"):
            pipe.unlink()
        async with asyncio.timeout(20):
            while threading.active_count() > before:  # noqa: ASYNC110 - other threads' end
                await asyncio.sleep(0.01)
        # Two milliseconds may be too short for a busy machine.
        found = retry(lambda: store.read("web"), ArbiterDownError, every_s=0.01, within_s=20)
        assert await found is None

    asyncio.run(main())


def test_a_host_that_starts_no_thread_for_a_while_is_an_arbiter_without_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit of its processes, say: a standby that would end for it took the only guest along."""

    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    store = FileStore(tmp_path)

    async def main() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            for _ in range(MOST_WAITING):
                with pytest.raises(ArbiterDownError, match="can't start new thread"):
                    await store.read("web")
                with pytest.raises(ArbiterDownError, match="can't start new thread"):
                    await store.replace("web", FIRST, over=NONE_YET)
        for _ in range(2 * MOST_WAITING):
            asking = asyncio.ensure_future(store.read("web"))
            await asyncio.sleep(0)
            asking.cancel()
            await asyncio.wait({asking})
        async with asyncio.timeout(20):
            while await said_by(store) != "nothing":  # noqa: ASYNC110 - other threads' end
                await asyncio.sleep(0.01)

    asyncio.run(main())


async def said_by(store: FileStore) -> str:
    try:
        return str(await store.read("web") or "nothing")
    except ArbiterDownError as exc:
        return exc.why


def test_a_directory_that_gives_no_answer_is_not_waited_for(tmp_path: Path) -> None:
    # As a share whose server is gone: opening a pipe that no one writes to takes forever.
    (tmp_path / "web.leases").mkdir()
    pipe = tmp_path / "web.leases" / ("0" * 19 + "1")
    os.mkfifo(pipe)
    store = FileStore(tmp_path, timeout_s=0.1)
    with pytest.raises(ArbiterDownError, match=r"did not answer for 0\.1 s"):
        asyncio.run(store.read("web"))
    with pytest.raises(OutcomeUnknownError, match=r"did not answer for 0\.1 s"):
        put(store, 1, NONE_YET)
    # Let the threads that wait for it go.
    with pipe.open("w"):
        time.sleep(0.1)


def test_a_client_that_lists_a_directory_as_it_was_reads_the_newest_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system's client may, for a minute: the arbiter passed for one that forgot, and
    a take-over was tried over and over.
    """
    store, now = FileStore(tmp_path), NONE_YET
    for attempt in range(1, 4):
        now = put(store, attempt, now).version
    monkeypatch.setattr(file_store, "_highest", lambda _: 1)
    assert read(store).record.attempt == 3
    assert put(store, 4, now).version == now + 1
    assert put(store, 5, now).record.attempt == 4
    assert read(store).record.attempt == 4


def test_a_request_that_fails_loses_no_cancellation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those who try until the arbiter answers, and were cancelled in just that moment, went on for
    as long as it failed: a standby did not end, and kept the VM's lock.
    """

    async def fails(_work: object) -> None:
        raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))

    monkeypatch.setattr(file_store, "in_thread", fails)

    async def tries() -> None:
        store = FileStore(tmp_path)
        while True:
            with suppress(ArbiterDownError):
                await store.read("web")
            await asyncio.sleep(0)

    async def main() -> None:
        for moment in range(40):
            trying = asyncio.ensure_future(tries())
            for _ in range(moment):
                await asyncio.sleep(0)
            trying.cancel()
            await asyncio.wait({trying}, timeout=0.2)
            assert trying.done(), moment

    asyncio.run(main())
