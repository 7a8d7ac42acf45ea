"""Replication's frames: their bytes stay what they are; what changed on its way is named."""

import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmckpt.replicate.wire.errors import DamagedFrameError, StaleTermError, WireError
from vmckpt.replicate.wire.frames import (
    HEAD_BYTES,
    MOST_BYTES,
    Buffer,
    FrameHead,
    FrameKind,
    Inbound,
    Outbound,
    require_term,
    require_whole,
)


def joined(frame: list[Buffer]) -> bytes:
    return b"".join(frame)


def read(inbound: Inbound, data: bytes) -> tuple[FrameHead, bytes]:
    head, payload = inbound.head(data[:HEAD_BYTES]), data[HEAD_BYTES:]
    require_whole(head, payload)
    return head, payload


def test_the_bytes_of_a_frame_do_not_change() -> None:
    outbound = Outbound(3)
    ack = joined(outbound.frame(FrameKind.ACK, 258, []))
    assert ack.hex() == "0000000008000000000000000000000300000000000001020000000000000000860ba579"
    device = joined(outbound.frame(FrameKind.DEVICE, 1, [b"ab", memoryview(b"c")]))
    assert device[:HEAD_BYTES].hex() == (
        "00000003050000000000000000000003000000000000000100000001352441c2a6586aa8"
    )
    assert device[HEAD_BYTES:] == b"abc"
    assert outbound.sent_bytes == 2 * HEAD_BYTES + 3
    assert {kind.name: kind.value for kind in FrameKind} == {
        "HELLO": 1, "WELCOME": 2, "BEGIN": 3, "PAGES": 4, "DEVICE": 5, "DISK": 6, "COMMIT": 7,
        "ACK": 8, "HEARTBEAT": 9, "FAILURE": 10, "DIGESTS": 11, "BASE": 12,
    }  # fmt: skip


def test_frames_are_told_apart_after_four_billion_of_them() -> None:
    outbound, inbound = Outbound(3), Inbound(0)
    outbound.sequence = inbound.sequence = 2**32 - 1
    for number in (2**32 - 1, 2**32, 2**32 + 1):
        frame = joined(outbound.frame(FrameKind.ACK, 1, []))
        head, _ = read(inbound, frame)
        assert head.sequence == number
        assert frame[24:28] == (number % 2**32).to_bytes(4)
    # One from 2^32 frames before.
    outbound.sequence = inbound.sequence - 2**32
    with pytest.raises(DamagedFrameError, match=r"frame 4294967298 is missing"):
        read(inbound, joined(outbound.frame(FrameKind.ACK, 1, [])))
    inbound.sequence = outbound.sequence = 2**56 - 1
    assert read(inbound, joined(outbound.frame(FrameKind.ACK, 1, [])))[0].sequence == 2**56 - 1


def test_the_first_frame_of_each_protocol_is_read_by_all() -> None:
    # As protocol 4 had it, zeroes at 5 to 7.
    old = bytes.fromhex("0000000008000000000000000000000300000000000001020000000000000000860ba579")
    assert joined(Outbound(3).frame(FrameKind.ACK, 258, [])) == old
    assert read(Inbound(0), old)[0].sequence == 0


FRAMES = st.lists(
    st.tuples(
        st.sampled_from(FrameKind), st.integers(0, 2**64 - 1), st.lists(st.binary(max_size=50))
    ),
    max_size=5,
)


@given(term=st.integers(0, 2**64 - 1), frames=FRAMES)
def test_frames_are_read_as_they_were_written(
    term: int, frames: list[tuple[FrameKind, int, list[bytes]]]
) -> None:
    outbound, inbound = Outbound(term), Inbound(term)
    for number, (kind, epoch, parts) in enumerate(frames):
        head, payload = read(inbound, joined(outbound.frame(kind, epoch, list(parts))))
        assert (head.kind, head.epoch, head.term, head.sequence) == (kind, epoch, term, number)
        assert payload == b"".join(parts)


def test_every_flipped_bit_is_found_and_its_frame_named() -> None:
    data = joined(Outbound(3).frame(FrameKind.PAGES, 42, [b"sixteen bytes..."]))
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedFrameError, match=r"frame 0") as caught:
            read(Inbound(0), bytes(changed))
        if bit >= 8 * HEAD_BYTES:
            assert "frame 0 (PAGES of epoch 42) is damaged" in caught.value.what


@given(st.data())
def test_what_is_cut_off_is_damaged(data: st.DataObject) -> None:
    frame = joined(Outbound(3).frame(FrameKind.DISK, 1, [b"some data"]))
    length = data.draw(st.integers(HEAD_BYTES, len(frame) - 1))
    with pytest.raises(DamagedFrameError, match=r"DISK of epoch 1"):
        read(Inbound(0), frame[:length])


def test_a_frame_that_is_missing_doubled_or_late_is_named() -> None:
    outbound = Outbound(1)
    first, second, third = (joined(outbound.frame(FrameKind.ACK, n, [])) for n in range(3))
    inbound = Inbound(0)
    read(inbound, first)
    for wrong in (first, third):
        with pytest.raises(DamagedFrameError, match="frame 1 is missing"):
            read(inbound, wrong)
    read(inbound, second)
    read(inbound, third)


@pytest.mark.parametrize(
    ("kind", "length"),
    [(13, 0), (0, 0), (FrameKind.DEVICE, MOST_BYTES + 1), (FrameKind.ACK, 2**32 - 1)],
)
def test_a_sound_head_that_makes_no_sense_is_none(kind: int, length: int) -> None:
    head = struct.pack(">IB3xQQII", length, kind, 1, 1, 0, 0)
    with pytest.raises(WireError, match="is invalid"):
        Inbound(0).head(head + struct.pack(">I", zlib.crc32(head)))


def test_lower_terms_are_refused_wherever_they_come() -> None:
    outbound, inbound = Outbound(3), Inbound(3)
    read(inbound, joined(outbound.frame(FrameKind.BEGIN, 1, [])))
    inbound.highest_term = 4
    with pytest.raises(StaleTermError, match=r"PAGES of epoch 1\) of term 3 is refused: term 4"):
        read(inbound, joined(outbound.frame(FrameKind.PAGES, 1, [])))


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_a_term_is_refused_when_it_is_lower_and_only_then(term: int, highest: int) -> None:
    head = FrameHead(0, FrameKind.BEGIN, term, 1, 0, 0, 0)
    if term >= highest:
        require_term(head, highest)
    else:
        with pytest.raises(StaleTermError):
            require_term(head, highest)
