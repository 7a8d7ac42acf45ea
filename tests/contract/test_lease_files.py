"""Leases in files: killed and stopped processes, a full disk, files that somebody touched."""

import asyncio
import fcntl
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vmckpt.errors import OutcomeUnknownError, StorageError
from vmckpt.lease.file_store import FileStore
from vmckpt.lease.record import Record, Span
from vmckpt.lease.store import NONE_YET, ArbiterDownError, Versioned

SPAN = Span(1.0)

# Renews without end; says each version that it was told is there to stay.
WRITER = """
import asyncio, sys
from dataclasses import replace
from pathlib import Path
from vmckpt.lease.file_store import FileStore
from vmckpt.lease.record import Record, Span

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
    return asyncio.run(store.replace("web", Record(1, "lab-a", attempt, SPAN), over=over))


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
    left = {path.name for path in tmp_path.iterdir()}
    assert {"web.lease", "web.lock"} <= left
    # A killed writer's part lies about for an hour.
    parts = [path for path in tmp_path.iterdir() if path.suffix == ".part"]
    assert len(parts) == len(left) - 2 <= 10
    for part in parts:
        os.utime(part, (time.time() - 7200, time.time() - 7200))
    put(store, now.version + 2, now.version + 1)
    assert {path.name for path in tmp_path.iterdir()} == {"web.lease", "web.lock"}


def test_a_stopped_process_that_holds_the_lock_blocks_until_it_is_killed(tmp_path: Path) -> None:
    put(FileStore(tmp_path), 1, NONE_YET)
    holder = subprocess.Popen(["flock", str(tmp_path / "web.lock"), "sleep", "60"])
    try:
        deadline_s = time.monotonic() + 20
        while not is_locked(tmp_path / "web.lock"):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        holder.send_signal(signal.SIGSTOP)
        with pytest.raises(ArbiterDownError, match=r"has held .*web\.lock all the time"):
            # The lock is waited for as long; a slow disk has as long again before it.
            put(FileStore(tmp_path, timeout_s=2.0), 2, 1)
        assert read(FileStore(tmp_path)).version == 1
    finally:
        # `sleep` has the lock's descriptor too.
        for pid in [*children(holder.pid), holder.pid]:
            os.kill(pid, signal.SIGKILL)
        holder.wait()
    assert put(FileStore(tmp_path, timeout_s=20.0), 2, 1).version == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["web.lease", "web.lock"]


def is_locked(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


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
    assert sorted(path.name for path in tmp_path.iterdir()) == ["web.lease", "web.lock"]


def test_a_directory_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = FileStore(tmp_path / "file")
    with pytest.raises(StorageError, match="File exists"):
        put(store, 1, NONE_YET)
    with pytest.raises(ArbiterDownError, match="Not a directory"):
        asyncio.run(store.read("web"))


def test_a_file_that_somebody_touched_grants_nothing(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    first = put(store, 1, NONE_YET)
    path = tmp_path / "web.lease"
    whole = path.read_text()
    for text in ("", "x", whole[: len(whole) // 2], whole.replace("lab-a", "\0", 1)):
        path.write_text(text)
        with pytest.raises(StorageError, match="holds no lease"):
            read(store)
        with pytest.raises(StorageError, match="holds no lease"):
            put(store, 2, first.version)
    path.unlink()
    with pytest.raises(StorageError, match="is gone"):
        put(store, 2, first.version)
    path.write_text(whole)
    assert read(store) == first


def test_a_directory_that_gives_no_answer_is_not_waited_for(tmp_path: Path) -> None:
    # As a share whose server is gone: opening a pipe that nobody writes to takes for ever.
    os.mkfifo(tmp_path / "web.lease")
    store = FileStore(tmp_path, timeout_s=0.1)
    with pytest.raises(ArbiterDownError, match=r"no answer for 0\.1 s"):
        asyncio.run(store.read("web"))
    with pytest.raises(OutcomeUnknownError, match=r"no answer for 0\.1 s"):
        put(store, 1, NONE_YET)
    # Let the threads that wait for it go.
    with (tmp_path / "web.lease").open("w"):
        time.sleep(0.1)
