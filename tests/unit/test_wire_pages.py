"""Pages on the wire: what the standby gets is what the primary had, and costs what changed."""

import os
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vmckpt.errors import VmckptError
from vmckpt.replicate.wire.errors import DamagedFrameError, WireError
from vmckpt.replicate.wire.pages import (
    BATCH_PAGES,
    WORDS,
    Encoder,
    Numbers,
    Shadow,
    Words,
    as_words,
    decode,
)

RAM_PAGES = 64


def memory(pages: int = RAM_PAGES) -> Words:
    return np.zeros((pages, WORDS), dtype="<u8")


def all_of(*numbers: int) -> Numbers:
    return np.array(numbers, dtype=np.int64)


def sent(encoder: Encoder, numbers: Numbers, ram: Words) -> list[bytes]:
    """Payloads for pages of `ram`."""
    return [b"".join(payload) for _, payload in encoder.batches(numbers, ram[numbers])]


def apply(payloads: list[bytes], replica: Words) -> None:
    for payload in payloads:
        decode(memoryview(payload), len(replica)).apply(replica)


def test_the_bytes_of_pages_do_not_change() -> None:
    ram, encoder = memory(), Encoder(Shadow(RAM_PAGES))
    encoder.patches.link_bytes_per_s = encoder.wholes.link_bytes_per_s = float("inf")
    ram[2, :200] = 0x0102030405060708
    ram[9:12, 3] = 5
    ram[10, 511] = 2**64 - 1
    (payload,) = sent(encoder, all_of(1, 2, 9, 10, 11), ram)
    bits = bytearray(3 * 64)
    bits[0] = bits[64] = bits[128] = 0b00010000
    bits[127] = 1
    patch = (
        # One run of patched pages, one of a whole one; then their lengths.
        bytes.fromhex("09000000 02000000 03000000 01000000")
        + bits
        + b"".join(n.to_bytes(8, "little") for n in (5, 5, 2**64 - 1, 5))
    )
    total = (15 + 2**64 - 1 + 200 * 0x0102030405060708) % 2**64
    assert payload == (
        bytes.fromhex("00000000 00000001 00000001 00000000")
        + total.to_bytes(8)
        + (4).to_bytes(8)
        + bytes.fromhex("00") + len(patch).to_bytes(4) * 2 + patch
        + bytes.fromhex("00 00001000 00001000") + ram[2].tobytes()
    )  # fmt: skip
    ram[9] = 0
    (payload,) = sent(encoder, all_of(9, 10), ram)
    assert payload.hex() == (
        "000000010000000000000000000000000000000000000000000000000000000"
        "0000000000800000008" "0900000001000000" "000000000000000000"
    )  # fmt: skip


CONTENT = st.sampled_from(["zero", "same", "word", "line", "random", "text"])
TOUCHED = st.dictionaries(st.integers(0, RAM_PAGES - 1), CONTENT, max_size=20)


def touch(ram: Words, page: int, how: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    if how == "zero":
        ram[page] = 0
    elif how == "word":
        ram[page, random.integers(WORDS)] = random.integers(2**63)
    elif how == "line":
        ram[page, 8:16] = random.integers(0, 2**63, 8)
    elif how == "random":
        ram[page] = random.integers(0, 2**63, WORDS)
    elif how == "text":
        ram[page] = as_words(b"all work and no play " * 195 + b"!")[0]


@settings(max_examples=60)
@given(
    epochs=st.lists(TOUCHED, max_size=5),
    with_shadow=st.booleans(),
    link=st.sampled_from([0.0, 1e8, float("inf")]),
)
def test_the_replica_becomes_what_the_memory_is(
    epochs: list[dict[int, str]], with_shadow: bool, link: float
) -> None:
    ram, replica = memory(), memory()
    encoder = Encoder(Shadow(RAM_PAGES) if with_shadow else None)
    encoder.patches.link_bytes_per_s = encoder.wholes.link_bytes_per_s = link
    for epoch, touched in enumerate(epochs):
        for page, how in touched.items():
            touch(ram, page, how, 100 * epoch + page)
        payloads = sent(encoder, all_of(*touched), ram)
        apply(payloads, replica)
        assert (replica == ram).all()
        # Applying an epoch once more, as after a crash in the middle of it, is harmless.
        apply(payloads, replica)
        assert (replica == ram).all()


def test_what_did_not_change_costs_nothing() -> None:
    ram, encoder = memory(), Encoder(Shadow(RAM_PAGES))
    every = np.arange(RAM_PAGES)
    assert sent(encoder, every, ram) == []
    ram[:] = np.random.default_rng(1).integers(0, 2**63, ram.shape)
    assert sent(encoder, every, ram)
    assert sent(encoder, every, ram) == []
    ram[3, 7] += np.uint64(1)
    (payload,) = sent(encoder, every, ram)
    assert len(payload) < 200


def test_pages_that_become_zero_cost_no_content() -> None:
    ram, replica, encoder = memory(), memory(), Encoder(None)
    replica[:] = 1
    payloads = sent(encoder, np.arange(RAM_PAGES), ram)
    assert sum(map(len, payloads)) < 100
    apply(payloads, replica)
    assert not replica.any()


def test_content_is_read_where_it_lies() -> None:
    content = memoryview(bytearray(os.urandom(4 * 4096)))
    encoder = Encoder(None)
    encoder.wholes.link_bytes_per_s = float("inf")
    ((pages, payload),) = encoder.batches(np.arange(4), as_words(content))
    assert pages == 4
    content[0] ^= 0xFF
    assert memoryview(payload[-1]) == content


def test_many_pages_go_in_several_payloads() -> None:
    pages = 2 * BATCH_PAGES + 3
    ram, replica = memory(pages), memory(pages)
    ram[:, 0] = 1
    payloads = sent(Encoder(Shadow(pages)), np.arange(pages), ram)
    assert len(payloads) == 3
    apply(payloads, replica)
    assert (replica == ram).all()


def test_a_replica_that_was_something_else_is_found_out() -> None:
    ram, replica, encoder = memory(), memory(), Encoder(Shadow(RAM_PAGES))
    ram[5, :100] = 7
    replica[5, 400] = 1
    with pytest.raises(DamagedFrameError, match="differs from what the primary expects"):
        apply(sent(encoder, all_of(5), ram), replica)


def test_pages_that_the_guest_does_not_have_are_refused() -> None:
    ram = memory()
    ram[RAM_PAGES - 1] = 1
    (payload,) = sent(Encoder(None), all_of(RAM_PAGES - 1), ram)
    decode(memoryview(payload), RAM_PAGES)
    with pytest.raises(WireError, match="pages that are not there"):
        decode(memoryview(payload), RAM_PAGES - 1)


def test_no_payload_of_noise_is_taken_for_pages_or_breaks_the_reader() -> None:
    ram, encoder = memory(), Encoder(Shadow(RAM_PAGES))
    ram[1], ram[2, 5] = 1, 1
    (payload,) = sent(encoder, all_of(1, 2), ram)
    original = decode(memoryview(payload), RAM_PAGES)
    random = np.random.default_rng(1)
    for _ in range(2000):
        changed = bytearray(payload)
        for at in random.integers(0, len(changed), 2):
            changed[at] = random.integers(256)
        changed = changed[: random.integers(len(changed) // 2, len(changed) + 1)]
        try:
            batch = decode(memoryview(changed), RAM_PAGES)
            batch.apply(memory())
        except VmckptError:
            continue
        assert replace(batch, sum=0).pages == original.pages
