"""Maps of chunks, and what they come to in bytes."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmckpt.store.errors import DamagedError
from vmckpt.store.files.maps import Refs, decode, encode, make_refs, packs_of, slots_of


def refs_of(runs: list[tuple[int, int, int, int]], chunks: int) -> Refs:
    """Runs: gap, length, pack (0: zeroes), first slot."""
    refs = np.zeros(chunks, dtype=np.uint64)
    at = 0
    for gap, length, pack, slot in runs:
        at = min(at + gap, chunks)
        end = min(at + length, chunks)
        if pack:
            refs[at:end] = make_refs(pack - 1, np.arange(slot, slot + end - at))
        at = end
    return refs


RUNS = st.lists(
    st.tuples(
        st.integers(0, 9), st.integers(1, 20), st.integers(0, 3), st.integers(0, 2**31 - 100)
    ),
    max_size=20,
)


@given(new=RUNS, old=RUNS, chunks=st.integers(1, 200))
def test_a_map_comes_back_from_its_difference_to_any_other(
    new: list[tuple[int, int, int, int]], old: list[tuple[int, int, int, int]], chunks: int
) -> None:
    refs, base = refs_of(new, chunks), refs_of(old, chunks)
    assert np.array_equal(decode(encode(refs, base), base, "x", 3), refs)


def test_words_say_pack_and_slot() -> None:
    refs = make_refs(2, np.array([0, 7]))
    assert packs_of(refs).tolist() == [2, 2]
    assert slots_of(refs).tolist() == [0, 7]
    assert packs_of(np.zeros(1, dtype=np.uint64)).tolist() == [-1]


def test_a_map_of_one_long_run_is_a_few_bytes_and_of_no_change_less() -> None:
    refs = make_refs(0, np.arange(1 << 20))
    zeroes = np.zeros(1 << 20, dtype=np.uint64)
    assert len(encode(refs, zeroes)) < 40
    assert len(encode(refs, refs)) < 20


def test_what_names_more_than_there_is_is_damaged() -> None:
    refs = make_refs(1, np.arange(10))
    data = encode(refs, np.zeros(10, dtype=np.uint64))
    with pytest.raises(DamagedError, match="refers to chunks that do not exist"):
        decode(data, np.zeros(10, dtype=np.uint64), "x", 1)
    with pytest.raises(DamagedError):
        decode(data, np.zeros(9, dtype=np.uint64), "x", 2)
    with pytest.raises(DamagedError, match="damaged"):
        decode(b"no zstd", np.zeros(9, dtype=np.uint64), "x", 2)


@given(new=RUNS, old=RUNS, chunks=st.integers(1, 200), at_once=st.integers(1, 30))
def test_made_in_parts_a_map_is_the_same(
    new: list[tuple[int, int, int, int]],
    old: list[tuple[int, int, int, int]],
    chunks: int,
    at_once: int,
) -> None:
    refs, base = refs_of(new, chunks), refs_of(old, chunks)
    data = encode(refs, base)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vmckpt.store.files.maps._AT_ONCE", at_once)
        assert np.array_equal(decode(data, base, "x", 3), refs)


def test_a_map_of_a_few_bytes_takes_no_more_memory_than_the_area_has() -> None:
    chunks = 1 << 22
    base = np.zeros(chunks, dtype=np.uint64)
    data = encode(make_refs(0, np.arange(chunks)), base)
    assert len(data) < 64
    tracemalloc.start()
    try:
        decode(data, base, "x", 1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2.5 * base.nbytes
