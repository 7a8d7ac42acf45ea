"""Pages that another process writes, found from outside it, and what they hold."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest

from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.lock import Owner, held
from vmckpt.memory import process_call
from vmckpt.memory.borrowed import descriptor_from
from vmckpt.memory.content import pages_content, ram_content
from vmckpt.memory.dirty_pages import DirtyPages, tracked
from vmckpt.memory.ram_file import PAGE_BYTES
from vmckpt.vm.dirty_rate import DirtyRate
from vmckpt.vm.observe_there import observe_there

pytestmark = pytest.mark.contract

PAGES = 1024
# Maps the file at the second page, as a QEMU may; writes or reads the pages it is told.
WRITER = """
import mmap, sys
file = open(sys.argv[1], "r+b")
ram = mmap.mmap(file.fileno(), 0)
print("ready", flush=True)
for line in sys.stdin:
    what, *pages = line.split()
    for page in map(int, pages):
        if what == "write":
            ram[page * 4096 + 7] = ram[page * 4096 + 7] ^ 1 | 2
        else:
            ram[page * 4096]
    print("done", flush=True)
"""


class Writer:
    """A process that maps a RAM file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.child = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    @property
    def pid(self) -> int:
        return self.child.pid

    def does(self, what: str, *pages: int) -> None:
        assert self.child.stdin
        self.child.stdin.write(f"{what} {' '.join(map(str, pages))}\n")
        self.child.stdin.flush()
        self._answer()

    def _answer(self) -> None:
        assert self.child.stdout
        assert self.child.stdout.readline()

    def descriptors(self) -> list[str]:
        return sorted(str(path.readlink()) for path in Path(f"/proc/{self.pid}/fd").iterdir())


@pytest.fixture
def writer() -> Iterator[Writer]:
    with NamedTemporaryFile(dir="/dev/shm", prefix="vk-test-") as file:
        file.truncate(PAGES * PAGE_BYTES)
        made = Writer(Path(file.name))
        try:
            yield made
        finally:
            made.child.kill()
            made.child.communicate()


def taken(pages: DirtyPages) -> list[int]:
    return list(pages.take().numbers())


def test_exactly_the_written_pages_are_found(writer: Writer) -> None:
    writer.does("write", 3, 4, 5)
    with tracked(writer.pid, writer.path) as pages:
        assert pages.count() == 0
        writer.does("write", 0, 4, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 1023)
        assert pages.count() == 14
        assert taken(pages) == [0, 4, *range(17, 28), 1023]
        assert taken(pages) == []
        # Neither a page looked at for the first time nor one that is looked at again was written.
        writer.does("read", 3, 4, 500, 501)
        assert taken(pages) == []
        writer.does("write", 4, 500)
        writer.does("write", 4)
        assert taken(pages) == [4, 500]


def test_pages_that_only_others_wrote_are_not_its_own(writer: Writer) -> None:
    with tracked(writer.pid, writer.path) as pages:
        with writer.path.open("r+b") as file:
            file.seek(9 * PAGE_BYTES)
            file.write(b"x" * PAGE_BYTES)
        writer.does("read", 9)
        assert taken(pages) == []


def test_nothing_stays_in_the_process_and_one_tracks_at_a_time(writer: Writer) -> None:
    before = writer.descriptors()
    for _ in range(3):
        with tracked(writer.pid, writer.path) as pages:
            writer.does("write", 1)
            with pytest.raises(OSError, match="busy"), tracked(writer.pid, writer.path):
                pass
            assert taken(pages) == [1]
        assert writer.descriptors() == before
    writer.does("write", 1)


def test_what_cannot_be_tracked_says_so(writer: Writer) -> None:
    with pytest.raises(FileNotFoundError), tracked(writer.pid, Path("/dev/shm/another")):
        pass
    os.kill(writer.pid, signal.SIGSTOP)
    os.waitpid(writer.pid, os.WUNTRACED)
    with pytest.raises(OSError, match="stopped"), tracked(writer.pid, writer.path):
        pass
    os.kill(writer.pid, signal.SIGCONT)
    writer.does("write", 1)
    writer.child.kill()
    writer.child.wait()
    with pytest.raises(FileNotFoundError), tracked(writer.pid, writer.path):
        pass


def test_a_call_in_a_process_disturbs_nothing_that_it_is_doing(writer: Writer) -> None:
    """It sleeps in read(2), which goes on; a call that fails says why."""
    before = writer.descriptors()
    for _ in range(10):
        made = descriptor_from(writer.pid, 290, 7, 0)  # eventfd2
        assert os.read(made, 8) == (7).to_bytes(8, "little")
        os.close(made)
    with pytest.raises(OSError, match="Invalid argument"):
        descriptor_from(writer.pid, 290, 7, 1 << 30)
    assert writer.descriptors() == before
    writer.does("write", 1)


def test_a_call_is_made_to_its_end_though_the_asker_has_died(writer: Writer) -> None:
    before = writer.descriptors()
    ours, theirs = socket.socketpair()
    ours.close()
    with theirs:
        words = [process_call.__file__, str(writer.pid), "290", "7", "0"]
        done = subprocess.run(
            [sys.executable, "-I", "-S", *words],
            stdin=theirs.fileno(),
            capture_output=True,
            timeout=20,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, b"")
    assert writer.descriptors() == before
    writer.does("write", 1)


def test_what_pages_hold_and_reading_gives_no_memory_to_holes(writer: Writer) -> None:
    text, noise = b"so it is written, ", os.urandom(PAGE_BYTES)
    with writer.path.open("r+b") as file:
        for page in range(128):
            file.seek(page * PAGE_BYTES)
            file.write(noise if page % 2 else (text * 300)[:PAGE_BYTES])
        file.seek(900 * PAGE_BYTES)
        file.write(bytes(64 * PAGE_BYTES))
    before = writer.path.stat().st_blocks
    found = ram_content(writer.path)
    assert writer.path.stat().st_blocks == before
    assert found.zero == pytest.approx(1 - 128 / PAGES)
    assert found.compressible == pytest.approx(64 / PAGES, abs=0.01)
    assert found.zero + found.compressible + found.incompressible == pytest.approx(1)
    with tracked(writer.pid, writer.path) as pages:
        writer.does("write", 1, 3, 5, 7, 900, 901, 1020, 1021)
        dirtied = pages_content(writer.path, pages.take())
    assert dirtied.incompressible == 0.5
    assert dirtied.compressible == 0.5


def test_a_host_elsewhere_is_asked_to_look_and_gives_way_too(
    writer: Writer, tmp_path: Path
) -> None:
    host, lock = LocalHost("a", tmp_path, "127.0.0.1"), tmp_path / "lock"

    def words(pid: int, ram_file: Path) -> list[str]:
        return [str(word) for word in (pid, ram_file, PAGES * PAGE_BYTES, 0.3, lock)]

    async def look() -> None:
        told = await observe_there(host, words(writer.pid, writer.path), 0.3)
        assert told
        found = DirtyRate.from_json(told)
        assert (found.source, found.ram_bytes) == ("page-tracking", PAGES * PAGE_BYTES)
        assert found.took_s >= 0.3
        with held(lock, Owner("r", "migrate to b", os.getpid(), 0.0)):
            assert await observe_there(host, words(writer.pid, writer.path), 0.3) is None
        with pytest.raises(FileNotFoundError):
            await observe_there(host, words(writer.pid, tmp_path / "none"), 0.3)
        with pytest.raises(OSError, match="did not track pages"):
            await observe_there(host, ["no", "such", "words"], 0.3)

    asyncio.run(look())
