"""What a guest writes is found and copied, whichever way the kernel allows: one suite for each."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ram_writer import PAGES, Writer, writing
from vmckpt.hosts.processes.kernel import PageTracking, page_tracking
from vmckpt.memory.dirty_pages import Mapping
from vmckpt.memory.private.guest_ram import GuestRam
from vmckpt.memory.ram_file import PAGE_BYTES, Span
from vmckpt.memory.soft_dirty import is_sound
from vmckpt.memory.tracker import Tracker, tracking

pytestmark = pytest.mark.contract

# Debian 12's own kernel has no PAGEMAP_SCAN: tests/machines runs this in a machine that has it.
OLD_KERNEL = "VMCKPT_TEST_OLD_KERNEL" in os.environ
BY_KERNEL = PageTracking.SOFT_DIRTY if OLD_KERNEL else PageTracking.PROTECTION


@pytest.fixture
def writer() -> Iterator[Writer]:
    with writing() as made:
        yield made


@pytest.fixture(params=[BY_KERNEL, PageTracking.COMPARISON])
def tracker(request: pytest.FixtureRequest, writer: Writer) -> Iterator[Tracker]:
    writer.does("write", 3, 4, 5)
    with tracking(writer.pid, GuestRam(writer.path), request.param) as made:
        assert made.name == request.param.value
        yield made


def numbers(spans: list[Span]) -> list[int]:
    return [page for a, b in spans for page in range(a // PAGE_BYTES, b // PAGE_BYTES)]


def test_exactly_the_written_pages_are_found(writer: Writer, tracker: Tracker) -> None:
    assert tracker.count() == 0
    writer.does("write", 0, 4, 17, 18, 63, 64, 65, PAGES - 1)
    assert tracker.count() == 8
    assert numbers(tracker.take_spans()) == [0, 4, 17, 18, 63, 64, 65, PAGES - 1]
    writer.does("read", 3, 4, 500)
    assert tracker.take_spans() == []
    writer.does("write", 4, 500)
    assert numbers(tracker.take_spans()) == [4, 500]


def test_runs_are_one_span_each(writer: Writer, tracker: Tracker) -> None:
    writer.does("write", *range(10, 200), 300)
    assert tracker.take_spans() == [
        (10 * PAGE_BYTES, 200 * PAGE_BYTES),
        (300 * PAGE_BYTES, 301 * PAGE_BYTES),
    ]


def test_copies_and_what_is_found_later_are_all_there_is(writer: Writer, tracker: Tracker) -> None:
    """Whenever pages are copied: who applies copies in their order has the file in the end."""
    replica = bytearray(PAGES * PAGE_BYTES)

    def apply(spans: list[Span]) -> None:
        data, at = tracker.copy(spans), 0
        for start, end in spans:
            replica[start:end] = data[at : at + end - start]
            at += end - start

    apply(tracker.extents())
    for round_ in range(4):
        writer.does("write", 7, 8, 100 + round_)
        spans = tracker.take_spans()
        before = writer.path.read_bytes()
        writer.does("write", 7, 9)  # between looking and copying
        apply(spans)
        with writer.path.open("r+b") as file:
            file.write(before)  # and back
    apply(tracker.take_spans())
    assert numbers(tracker.take_spans()) == []
    differing = [
        page
        for page in range(PAGES)
        if replica[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]
        != writer.path.read_bytes()[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]
    ]
    assert differing == []


def test_comparing_gives_no_memory_to_holes_and_finds_new_ones(writer: Writer) -> None:
    with tracking(writer.pid, GuestRam(writer.path), PageTracking.COMPARISON) as tracker:
        writer.does("write", *range(64))
        assert len(numbers(tracker.take_spans())) == 64
        blocks = writer.path.stat().st_blocks
        assert tracker.take_spans() == []
        assert writer.path.stat().st_blocks == blocks
        punch(writer.path, 10, 2)
        assert numbers(tracker.take_spans()) == [10, 11]
        assert not any(tracker.copy([(10 * PAGE_BYTES, 12 * PAGE_BYTES)]))


def punch(path: Path, page: int, count: int) -> None:
    """Take memory away from pages, as a balloon does."""
    words = ["fallocate", "-p", "-o", str(page * PAGE_BYTES), "-l", str(count * PAGE_BYTES)]
    assert os.spawnvp(os.P_WAIT, words[0], [*words, str(path)]) == 0


def test_writes_of_others_are_compared_too(writer: Writer) -> None:
    with tracking(writer.pid, GuestRam(writer.path), PageTracking.COMPARISON) as tracker:
        with writer.path.open("r+b") as file:
            file.seek(9 * PAGE_BYTES)
            file.write(b"x" * PAGE_BYTES)
        assert numbers(tracker.take_spans()) == [9]


def test_the_kernel_is_asked_which_way_there_is() -> None:
    assert page_tracking() is BY_KERNEL


@pytest.mark.parametrize("how", PageTracking)
def test_a_file_that_its_qemu_has_stretched_is_not_tracked(
    writer: Writer, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is done with it takes memory by its size, as root; and it may be mapped to its end."""
    os.truncate(writer.path, 1 << 40)
    if how is PageTracking.PROTECTION:
        end = Mapping(0, PAGE_BYTES, (1 << 40) - PAGE_BYTES)
        monkeypatch.setattr("vmckpt.memory.dirty_pages.find_mappings", lambda *_: (end,))
    with (
        pytest.raises(OSError) as refused,
        tracking(writer.pid, GuestRam(writer.path), how, 32 << 20),
    ):
        pass
    assert refused.value.errno == errno.EFBIG


@pytest.mark.parametrize("how", [BY_KERNEL, PageTracking.COMPARISON])
def test_what_a_file_in_huge_pages_has_more_is_no_memory(writer: Writer, how: str) -> None:
    """It consists of whole ones; a checkpoint of such a VM ended as if by a bug."""
    ram_bytes = (PAGES - 10) * PAGE_BYTES
    writer.does("write", PAGES - 11, PAGES - 5)
    with tracking(writer.pid, GuestRam(writer.path), how, ram_bytes) as tracker:
        assert numbers(tracker.extents()) == [PAGES - 11]
        writer.does("write", *range(PAGES - 20, PAGES))
        assert numbers(tracker.take_spans()) == list(range(PAGES - 20, PAGES - 10))
        assert tracker.take_spans() == []


def test_a_second_one_is_told_that_the_first_is_there(writer: Writer) -> None:
    with tracking(writer.pid, GuestRam(writer.path), BY_KERNEL) as tracker:
        with (
            pytest.raises(OSError) as refused,
            tracking(writer.pid, GuestRam(writer.path), BY_KERNEL),
        ):
            pass
        assert refused.value.errno == errno.EBUSY
        writer.does("write", 12)
        assert numbers(tracker.take_spans()) == [12]


def test_marks_are_not_trusted_where_they_can_get_lost(writer: Writer, tmp_path: Path) -> None:
    assert is_sound(writer.path)
    elsewhere = tmp_path / "ram"
    elsewhere.touch()
    assert not is_sound(elsewhere)
