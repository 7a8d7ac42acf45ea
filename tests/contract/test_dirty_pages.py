"""Pages that another process writes, found from outside it, and what they hold."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from tests.ram_writer import PAGES, Writer, writing
from vmckpt.forecast.measure.dirty_rate import DirtyRate
from vmckpt.forecast.measure.there import observe_there
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.lock import Owner, held
from vmckpt.memory import process_call
from vmckpt.memory.borrowed import descriptor_from
from vmckpt.memory.content import PIECES, pages_content, ram_content, ram_layout
from vmckpt.memory.dirty_pages import (
    PARTS,
    DirtyPages,
    find_mappings,
    mappings_of,
    tracked_at,
    uses_kvm,
)
from vmckpt.memory.observe import TICK_S, observe
from vmckpt.memory.private.guest_ram import GuestRam
from vmckpt.memory.ram_file import PAGE_BYTES, Span, read_only

pytestmark = pytest.mark.contract


@pytest.fixture
def writer() -> Iterator[Writer]:
    with writing() as made:
        yield made


@contextmanager
def tracked(pid: int, ram_file: Path) -> Iterator[DirtyPages]:
    with tracked_at(pid, mappings_of(pid, ram_file, None)) as pages:
        yield pages


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


def test_a_page_is_counted_once_among_however_many() -> None:
    """The kernel tells some of more than 512 ranges twice."""
    every_other = range(0, 8 * PAGES, 2)
    with writing(8 * PAGES) as writer, tracked(writer.pid, writer.path) as pages:
        writer.does("write", *every_other)
        assert pages.count() == len(every_other)
        spans = pages.take_spans([(0, 8 * PAGES * PAGE_BYTES)])
        assert [start // PAGE_BYTES for start, _ in spans] == list(every_other)
        assert {end - start for start, end in spans} == {PAGE_BYTES}
        assert taken(pages) == list(every_other)
        assert pages.count() == 0


@pytest.mark.parametrize("every", [1, 2, 37, 1000])
def test_a_narrow_scan_finds_the_same_and_asks_about_what_was_written(every: int) -> None:
    """KVM forgets what it had mapped of all that a protecting scan is asked about."""
    count = 8 * PAGES
    with writing(count) as writer, tracked(writer.pid, writer.path) as pages:
        assert not uses_kvm(writer.pid)
        narrow = DirtyPages(pages._fd, pages._mappings, is_narrow=True)
        written = list(range(5, count, every))
        for _ in range(2):
            writer.does("write", *written)
            before = narrow.scanned_bytes
            assert taken(narrow) == written
            asked_pages = (narrow.scanned_bytes - before) / PAGE_BYTES
            if len(written) <= PARTS:
                assert asked_pages == len(written)
            assert asked_pages <= written[-1] + 1 - written[0]
            assert narrow.count() == 0
        assert taken(narrow) == []
        assert narrow.scanned_bytes - before == asked_pages * PAGE_BYTES
        # Of two written places far apart nothing between them.
        writer.does("write", 3, count - 2)
        before = narrow.scanned_bytes
        assert narrow.take_spans() == [
            (page * PAGE_BYTES, (page + 1) * PAGE_BYTES) for page in (3, count - 2)
        ]
        assert narrow.scanned_bytes - before == 2 * PAGE_BYTES


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
    text = b"so it is written, "
    with writer.path.open("r+b") as file:
        for page in range(128):
            file.seek(page * PAGE_BYTES)
            file.write(os.urandom(PAGE_BYTES) if page % 2 else (text * 300)[:PAGE_BYTES])
        file.seek(900 * PAGE_BYTES)
        file.write(bytes(64 * PAGE_BYTES))
    before = writer.path.stat().st_blocks
    with read_only(writer.path) as ram:
        layout = ram_layout(ram)
    found = ram_content(layout)
    assert writer.path.stat().st_blocks == before
    # Pieces of 16 pages: 0 to 127 are written, 900 to 963 hold zeroes.
    assert len(layout) == PIECES
    assert [(piece.hole, piece.content.zero) for piece in layout[7:9]] == [(0, 0), (1, 1)]
    assert (layout[56].hole, layout[56].content.zero) == pytest.approx((4 / 16, 1))
    assert (layout[57].hole, layout[57].content.zero) == (0, 1)
    assert layout[7].content.ratio == pytest.approx(0.5, abs=0.02)
    assert found.zero == pytest.approx(1 - 128 / PAGES)
    assert found.compressible == pytest.approx(64 / PAGES, abs=0.01)
    # A page of noise is all left, one of words that were there before hardly.
    assert found.ratio == pytest.approx(0.5, abs=0.02)
    assert found.zero + found.compressible + found.incompressible == pytest.approx(1)
    with tracked(writer.pid, writer.path) as pages:
        writer.does("write", 1, 3, 5, 7, 900, 901, 1020, 1021)
        with read_only(writer.path) as ram:
            dirtied = pages_content(ram, pages.take())
    assert dirtied.incompressible == 0.5
    assert dirtied.compressible == 0.5


def test_what_is_spared_counts_as_written_until_it_is_protected_again(writer: Writer) -> None:
    def pages(spans: list[Span]) -> list[int]:
        found: set[int] = set()
        for start, end in spans:
            found |= set(range(start // PAGE_BYTES, end // PAGE_BYTES))
        return sorted(found)

    spared = [(10 * PAGE_BYTES, 14 * PAGE_BYTES), (20 * PAGE_BYTES, 21 * PAGE_BYTES)]
    with tracked(writer.pid, writer.path) as dirty:
        writer.does("write", 9, 10, 11, 14, 20, 30)
        assert pages(dirty.take_spans(spared)) == [9, 10, 11, 14, 20, 30]
        # Not written since, but not protected either.
        assert pages(dirty.take_spans(spared)) == [10, 11, 20]
        writer.does("write", 9, 12, 20)
        assert pages(dirty.take_spans()) == [9, 10, 11, 12, 20]
        assert pages(dirty.take_spans()) == []
        writer.does("write", 10)
        assert pages(dirty.take_spans()) == [10]


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


def test_a_look_at_a_busy_process_gives_way_at_once(writer: Writer) -> None:
    """Its windows are long by then: what it pays for being watched is kept small."""
    asked_s: list[float] = []
    stopped = threading.Event()

    def write() -> None:
        while not stopped.is_set():
            writer.does("write", *range(PAGES))

    async def go_on() -> bool:
        asked_s.append(time.monotonic())
        return len(asked_s) < 60

    busy = threading.Thread(target=write)
    busy.start()
    try:
        assert asyncio.run(observe(writer.pid, GuestRam(writer.path), 30.0, go_on)) is None
    finally:
        stopped.set()
        busy.join()
    waits_s = sorted(after - before for before, after in pairwise(asked_s))
    # A busy machine may hold it up now and then.
    assert waits_s[-4] < 3 * TICK_S


def test_long_windows_are_looked_into(writer: Writer) -> None:
    """It writes all that it has for a while, and then nothing: both lie within one window."""
    began_s = time.monotonic()
    stopped = threading.Event()

    def write() -> None:
        while not stopped.is_set():
            if time.monotonic() - began_s < 1.2:
                writer.does("write", *range(PAGES))
            time.sleep(0.01)

    async def go_on() -> bool:
        return True

    busy = threading.Thread(target=write)
    busy.start()
    try:
        seen = asyncio.run(observe(writer.pid, GuestRam(writer.path), 3.2, go_on))
    finally:
        stopped.set()
        busy.join()
    assert seen
    course = seen.course
    looked = [(row[0], counts) for row, counts in zip(course.pages, course.counts, strict=True)]
    assert any(len(counts) > 4 for _, counts in looked)
    for pages, counts in looked:
        assert sorted(counts) == list(counts)
        assert [count.pages for count in counts] == sorted(count.pages for count in counts)
        assert all(count.pages <= pages for count in counts)


def test_of_a_process_that_dirties_nothing_nobody_knows_what_it_dirties(writer: Writer) -> None:
    async def go_on() -> bool:
        return True

    seen = asyncio.run(observe(writer.pid, GuestRam(writer.path), 0.3, go_on))
    assert seen is not None
    assert (seen.working_set_pages, seen.dirtied) == (0, None)


MAPS_ODDLY = """\
import mmap, os, sys, time
kept = []
for name in sys.argv[2:]:
    fd = os.open(os.path.join(sys.argv[1].encode(), bytes.fromhex(name)), os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 4096)
    kept.append(mmap.mmap(fd, 4096))
print(flush=True)
time.sleep(600)
"""


def test_what_a_process_maps_hides_nothing_that_it_maps(tmp_path: Path) -> None:
    """A QEMU that was broken into names files as it likes: as a line's end, or as the vDSO."""
    odd = [b"ram", b"x\rzz", b"\xff", b"y\x0c1-2 rw-s 0 0:0 0 x", b"[vdso]"]
    argv = [sys.executable, "-c", MAPS_ODDLY, str(tmp_path), *(name.hex() for name in odd)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout
            assert child.stdout.readline() == b"\n"
            (found,) = find_mappings(child.pid, tmp_path / "ram")
            assert found.end - found.start == 4096
            os.close(descriptor_from(child.pid, 290, 7, 0))  # eventfd2
        finally:
            child.kill()
