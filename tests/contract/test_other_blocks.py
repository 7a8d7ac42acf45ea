"""Memory of another process that is in no file: which of its pages are written, what they hold."""

from collections.abc import Iterator

import pytest

from tests.ram_writer import CARD_PAGES, PAGES, Writer, writing
from vmckpt.hosts.processes.kernel import PageTracking
from vmckpt.memory.private import process_memory
from vmckpt.memory.private.guest_ram import GuestRam
from vmckpt.memory.private.other_blocks import OtherBlocks
from vmckpt.memory.ram_file import PAGE_BYTES, Span
from vmckpt.memory.tracker import tracking

pytestmark = pytest.mark.contract
HALF = CARD_PAGES // 2


@pytest.fixture
def writer() -> Iterator[Writer]:
    with writing() as made:
        yield made


def halves(writer: Writer) -> list[Span]:
    """Its card as two blocks, listed the other way round."""
    middle, end = writer.card + HALF * PAGE_BYTES, writer.card + CARD_PAGES * PAGE_BYTES
    return [(middle, end), (writer.card, middle)]


def page(number: int, count: int = 1) -> Span:
    return (number * PAGE_BYTES, (number + count) * PAGE_BYTES)


def test_its_written_pages_are_found_apart_from_those_of_the_file(writer: Writer) -> None:
    how = PageTracking.PROTECTION
    with tracking(
        writer.pid, GuestRam(writer.path), how, PAGES * PAGE_BYTES, halves(writer)
    ) as tracker:
        others = tracker.others
        assert others is not None
        writer.does("write", 3, PAGES - 1)
        writer.does("card", 0, 1, HALF)
        assert tracker.take_spans() == [page(3), page(PAGES - 1)]
        # Other passes before they are copied: they are still to be copied, once.
        for _ in range(3):
            writer.does("card", CARD_PAGES - 1)
            assert tracker.take_spans() == []
        assert others.take_spans() == [page(0), page(HALF - 1, 3)]
        assert others.take_spans() == []
        # Reading it is no writing.
        assert len(others.copy([(0, others.size_bytes)])) == CARD_PAGES * PAGE_BYTES
        assert (tracker.take_spans(), others.take_spans()) == ([], [])


def test_its_content_is_copied_in_the_order_of_the_spans(writer: Writer) -> None:
    others = OtherBlocks(writer.pid, halves(writer), PAGES * PAGE_BYTES)
    for times, number in ((1, 0), (2, HALF - 1), (3, HALF)):
        writer.does("card", *[number] * times)
    whole = others.copy([(0, others.size_bytes)])
    assert (whole[7], whole[HALF * PAGE_BYTES + 7]) == (3, 1)
    across = others.copy([(whole.index(1) - 7 - PAGE_BYTES, others.size_bytes), page(0)])
    assert (across[PAGE_BYTES + 7], across[-PAGE_BYTES + 7]) == (1, 3)
    # More spans than one call of the kernel takes.
    many = others.copy([page(number % CARD_PAGES) for number in range(1500)])
    assert many == (whole * 24)[: 1500 * PAGE_BYTES]
    assert others.copy([]) == b""


def test_what_one_call_does_not_take_is_read_by_several(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel ends one after 2 GiB, be it many spans or one."""
    monkeypatch.setattr(process_memory, "MOST_READ_BYTES", 3 * PAGE_BYTES)
    others = OtherBlocks(writer.pid, halves(writer), 0)
    for times, number in ((1, 0), (2, HALF - 1), (3, HALF)):
        writer.does("card", *[number] * times)
    whole = others.copy([(0, others.size_bytes)])
    assert [at // PAGE_BYTES for at, byte in enumerate(whole) if byte] == [0, HALF, 2 * HALF - 1]
    assert others.copy([page(0, 2), page(HALF, 4), page(0)])[6 * PAGE_BYTES + 7] == 3


def test_memory_that_is_not_there_is_an_error(writer: Writer) -> None:
    gone = OtherBlocks(writer.pid, [page(16)], 0)
    with pytest.raises(OSError, match="Bad address"):
        gone.copy([page(0)])
    writer.child.kill()
    writer.child.wait()
    others = OtherBlocks(writer.pid, halves(writer), 0)
    with pytest.raises(ProcessLookupError):
        others.copy([page(0)])
