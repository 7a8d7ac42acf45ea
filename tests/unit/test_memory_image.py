"""Blocks of memory as one image: where an offset of it is."""

from collections.abc import Iterator, Sequence

from hypothesis import given
from hypothesis import strategies as st

from vmckpt.memory.dirty_pages import Mapping
from vmckpt.memory.private.process_memory import addresses_of, laid_out
from vmckpt.memory.ram_file import Span

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=5)


def page_by_page(mappings: Sequence[Mapping], spans: Sequence[Span]) -> Iterator[int]:
    for start, end in spans:
        for offset in range(start, end):
            for one in mappings:
                if one.offset <= offset < one.offset + one.end - one.start:
                    yield one.start + offset - one.offset


@given(sizes=SIZES, data=st.data())
def test_spans_of_the_image_are_found_in_every_block(sizes: list[int], data: st.DataObject) -> None:
    blocks = [(1000 * number, 1000 * number + size) for number, size in enumerate(sizes, 1)]
    blocks = data.draw(st.permutations(blocks))
    mappings = laid_out(blocks, offset=7)
    assert mappings[0].offset == 7
    ends = st.integers(7, 7 + sum(sizes))
    drawn = data.draw(st.lists(st.tuples(ends, ends)))
    spans = [(a, b) for a, b in drawn if a < b]
    found = [at for start, end in addresses_of(mappings, spans) for at in range(start, end)]
    assert found == list(page_by_page(mappings, spans))
