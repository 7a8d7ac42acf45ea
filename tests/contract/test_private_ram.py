"""RAM that a process has alone: which of its pages are written, what they hold, what is zero."""

import errno
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory

import pytest

from tests.ram_writer import CARD_PAGES, Writer, writing
from vmckpt.hosts.processes.kernel import PageTracking
from vmckpt.memory import dirty_pages
from vmckpt.memory.borrowed import descriptor_from
from vmckpt.memory.dirty_pages import find_mappings
from vmckpt.memory.private import guest_ram
from vmckpt.memory.private.guest_ram import GuestRam
from vmckpt.memory.ram_file import PAGE_BYTES, Span
from vmckpt.memory.tracker import Tracker, tracking

pytestmark = pytest.mark.contract
SIZE_BYTES = CARD_PAGES * PAGE_BYTES


@pytest.fixture
def writer() -> Iterator[Writer]:
    with writing() as made:
        yield made


def alone(writer: Writer) -> GuestRam:
    return GuestRam(None, ((writer.card, writer.card + SIZE_BYTES),))


def page(number: int, count: int = 1) -> Span:
    return (number * PAGE_BYTES, (number + count) * PAGE_BYTES)


def everything(tracker: Tracker) -> bytes:
    content = bytearray(SIZE_BYTES)
    for start, end in tracker.extents():
        content[start:end] = tracker.copy([(start, end)])
    return bytes(content)


def test_what_is_written_is_found_and_the_rest_is_zero(writer: Writer) -> None:
    writer.does("card", 0, 1, 9)
    with tracking(writer.pid, alone(writer), PageTracking.PROTECTION, SIZE_BYTES) as tracker:
        assert tracker.extents() == [page(0, 2), page(9)]
        assert tracker.count() == 0
        writer.does("card", 9, 9, CARD_PAGES - 1)
        assert tracker.take_spans() == [page(9), page(CARD_PAGES - 1)]
        assert tracker.take_spans() == []
        content = everything(tracker)
        assert [n for n in range(CARD_PAGES) if any(content[slice(*page(n))])] == [0, 1, 9, 63]
        assert content[9 * PAGE_BYTES + 7] == 3


def test_several_blocks_are_one_image_in_the_order_in_which_they_are_named(writer: Writer) -> None:
    """Their addresses have another order: QEMU puts them where it likes."""
    first, second = 24, CARD_PAGES - 24 - 8  # 8 pages between them are none of the guest's
    at = [writer.card + number * PAGE_BYTES for number in (0, first, first + 8, CARD_PAGES)]
    ram = GuestRam(None, ((at[2], at[3]), (at[0], at[1])))
    size_bytes = (first + second) * PAGE_BYTES
    writer.does("card", 3, first + 8, CARD_PAGES - 1)
    with tracking(writer.pid, ram, PageTracking.PROTECTION, size_bytes) as tracker:
        assert tracker.extents() == [page(0), page(second - 1), page(second + 3)]
        writer.does("card", 5, first + 2, first + 9)
        assert tracker.count() == 2
        assert tracker.take_spans() == [page(1), page(second + 5)]
        both = tracker.copy([(page(second - 1)[0], page(second)[1])])
        assert any(both[:PAGE_BYTES])
        assert not any(both[PAGE_BYTES:])
        assert any(tracker.copy([page(second + 5)]))


def test_what_was_there_when_tracking_began_is_read_wherever_it_is_now(writer: Writer) -> None:
    """The kernel may be moving a page (compaction): it then looks like one that never was."""
    writer.does("card", 2, 9)
    with tracking(writer.pid, alone(writer), PageTracking.PROTECTION, SIZE_BYTES) as tracker:
        writer.does("drop", 9)
        assert tracker.extents() == [page(2), page(9)]


def test_so_is_what_is_written_while_tracking_is_being_prepared(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which takes 0.1 s."""

    def meanwhile(*words: int) -> int:
        writer.does("card", 9)
        return descriptor_from(*words)

    monkeypatch.setattr(dirty_pages, "descriptor_from", meanwhile)
    with tracking(writer.pid, alone(writer), PageTracking.PROTECTION, SIZE_BYTES) as tracker:
        writer.does("drop", 9)
        assert tracker.extents() == [page(9)]


def test_tracking_leaves_nothing_that_looks_like_memory(writer: Writer) -> None:
    for _ in range(2):
        with tracking(writer.pid, alone(writer), PageTracking.PROTECTION, SIZE_BYTES) as tracker:
            assert tracker.extents() == []


def test_with_swap_all_of_it_is_read(
    writer: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that is swapped out looks like one that was never there."""
    swaps = tmp_path / "swaps"
    swaps.write_text("Filename\tType\n/swap\tfile\n")
    monkeypatch.setattr(guest_ram, "_SWAPS", swaps)
    with tracking(writer.pid, alone(writer), PageTracking.PROTECTION, SIZE_BYTES) as tracker:
        assert tracker.extents() == [page(0, CARD_PAGES)]


def test_what_a_file_below_it_holds_is_read_too() -> None:
    """A fork's, which its process has not touched yet."""
    with NamedTemporaryFile(dir="/dev/shm", prefix="vk-test-") as below:
        below.truncate(SIZE_BYTES)
        below.seek(5 * PAGE_BYTES)
        below.write(b"x" * PAGE_BYTES)
        below.flush()
        with writing(below=Path(below.name)) as writer:
            writer.does("card", 4)
            how = PageTracking.PROTECTION
            with tracking(writer.pid, alone(writer), how, SIZE_BYTES) as tracker:
                assert tracker.extents() == [page(4, 2)]
                assert tracker.copy([page(5)]) == b"x" * PAGE_BYTES
                writer.does("card", 5, 9)
                assert tracker.take_spans() == [page(5), page(9)]


@pytest.fixture
def overlaid(tmp_path: Path) -> Iterator[Path]:
    """A directory of an overlay file system, whose files come from /dev/shm."""
    with TemporaryDirectory(dir="/dev/shm", prefix="vk-test-") as lower:
        merged, upper, work = (tmp_path / name for name in ("merged", "upper", "work"))
        for path in (merged, upper, work):
            path.mkdir()
        with (Path(lower) / "below").open("wb") as file:
            file.truncate(SIZE_BYTES)
            file.seek(5 * PAGE_BYTES)
            file.write(b"x" * PAGE_BYTES)
        options = f"lowerdir={lower},upperdir={upper},workdir={work}"
        words = ["mount", "-t", "overlay", "-o", options, "overlay", str(merged)]
        if subprocess.run(words, capture_output=True, check=False).returncode:
            pytest.skip("nothing can be mounted here")
        try:
            yield merged
        finally:
            subprocess.run(["umount", str(merged)], check=True)


def test_a_file_is_found_where_maps_names_another_device_than_stat(overlaid: Path) -> None:
    """On btrfs and overlayfs: a fork with its memory there could have no checkpoint."""
    how = PageTracking.PROTECTION
    with (
        writing(below=overlaid / "below") as writer,
        tracking(writer.pid, alone(writer), how, SIZE_BYTES) as tracker,
    ):
        assert tracker.copy([page(5)]) == b"x" * PAGE_BYTES
        assert any(start <= 5 * PAGE_BYTES < end for start, end in tracker.extents())


@pytest.mark.parametrize("how", [PageTracking.SOFT_DIRTY, PageTracking.COMPARISON])
def test_without_write_protection_it_is_refused(writer: Writer, how: PageTracking) -> None:
    with pytest.raises(OSError) as refused, tracking(writer.pid, alone(writer), how, SIZE_BYTES):
        pass
    assert refused.value.errno == errno.EOPNOTSUPP


@pytest.mark.parametrize(
    "spans",
    [
        (),
        ((1, 4097),),
        ((4096, 4096),),
        ((4096, 3 * 4096),),
        ((2**64 - 4096, 2**64),),
        ((4096, 2 * 4096), (4 * 4096, 5 * 4096)),
    ],
)
def test_what_cannot_be_such_ram_is_refused(writer: Writer, spans: tuple[Span, ...]) -> None:
    ram = GuestRam(None, spans)
    with (
        pytest.raises(OSError) as refused,
        tracking(writer.pid, ram, PageTracking.PROTECTION, PAGE_BYTES),
    ):
        pass
    assert refused.value.errno == errno.EFAULT


@pytest.mark.parametrize("is_deleted", [False, True])
def test_what_its_own_file_holds_is_read_though_the_process_never_touched_it(
    writer: Writer, *, is_deleted: bool
) -> None:
    """As of an adopted VM whose memory was put into its file by another, or is shared (memfd)."""
    with writer.path.open("r+b") as file:
        file.seek(7 * PAGE_BYTES)
        file.write(b"x" * PAGE_BYTES)
    (found,) = find_mappings(writer.pid, writer.path)
    if is_deleted:
        writer.path.unlink()
    ram, size_bytes = GuestRam(None, ((found.start, found.end),)), found.end - found.start
    with tracking(writer.pid, ram, PageTracking.PROTECTION, size_bytes) as tracker:
        assert tracker.extents() == [page(7)]
        assert tracker.copy([page(7)]) == b"x" * PAGE_BYTES
    if is_deleted:
        writer.path.touch()  # for the fixture, which removes it
