"""Memory of another process that is in no file: which of its pages are written, what they hold."""

from collections.abc import Iterator

import pytest

from tests.ram_writer import CARD_PAGES, PAGES, Writer, writing
from vmckpt.hosts.processes.kernel import PageTracking
from vmckpt.memory.guest_ram import GuestRam
from vmckpt.memory.other_blocks import OtherBlocks
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
        # Another pass before they are copied: they are still to be copied.
        writer.does("card", CARD_PAGES - 1)
        assert tracker.take_spans() == []
        assert sorted(others.take_spans()) == [page(0), page(HALF - 1), page(HALF, 2)]
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


def test_memory_that_is_not_there_is_an_error(writer: Writer) -> None:
    gone = OtherBlocks(writer.pid, [page(16)], 0)
    with pytest.raises(OSError, match="Bad address"):
        gone.copy([page(0)])
    writer.child.kill()
    writer.child.wait()
    others = OtherBlocks(writer.pid, halves(writer), 0)
    with pytest.raises(ProcessLookupError):
        others.copy([page(0)])
