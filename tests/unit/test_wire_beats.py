"""Heartbeats over the second path: only the other side's of this replication count, each once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmckpt.replicate.wire.beats import (
    BEAT_BYTES,
    Beat,
    Hearing,
    Sender,
    beat_key,
    decode_beat,
    encode_beat,
)
from vmckpt.replicate.wire.errors import WireError

KEY = beat_key("token")
NUMBERS = st.integers(0, (1 << 64) - 1)
# Laid down with the format: another one is another protocol.
GOLDEN = (
    "766b623101000000000000000000000700000000000000052e9c9eff"
    "278cd5798083c6046800d11883cb16ee63c2a28913d699aeb78fc9e4"
)


def test_a_heartbeat_is_laid_out_as_said() -> None:
    data = encode_beat(Beat(Sender.PRIMARY, 7, 5), KEY)
    assert data.hex() == GOLDEN
    assert len(data) == BEAT_BYTES


@given(st.sampled_from(Sender), NUMBERS, NUMBERS)
def test_what_was_said_is_heard(sender: Sender, number: int, heard: int) -> None:
    beat = Beat(sender, number, heard)
    assert decode_beat(encode_beat(beat, KEY), KEY) == beat


@given(st.integers(0, BEAT_BYTES * 8 - 1))
def test_one_flipped_bit_makes_it_none(bit: int) -> None:
    data = bytearray(encode_beat(Beat(Sender.PRIMARY, 7, 5), KEY))
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(WireError):
        decode_beat(bytes(data), KEY)


@pytest.mark.parametrize("data", [b"", b"x" * BEAT_BYTES, b"x" * 2000])
def test_noise_is_none(data: bytes) -> None:
    with pytest.raises(WireError):
        decode_beat(data, KEY)


def test_another_replications_heartbeats_and_ones_own_are_none() -> None:
    ours, other = Hearing(Sender.PRIMARY, KEY), Hearing(Sender.STANDBY, beat_key("other"))
    for data in (other.next_datagram(), ours.next_datagram()):
        with pytest.raises(WireError):
            ours.receive(data, 1.0)
    assert ours.heard_s is None


def test_one_that_was_heard_before_or_comes_late_counts_for_nothing() -> None:
    ours, theirs = Hearing(Sender.PRIMARY, KEY), Hearing(Sender.STANDBY, KEY)
    first, second = theirs.next_datagram(), theirs.next_datagram()
    ours.receive(second, 1.0)
    for again in (second, first):
        ours.receive(again, 2.0)
    assert ours.heard_s == 1.0
    ours.receive(theirs.next_datagram(), 3.0)
    assert ours.heard_s == 3.0


def test_who_is_heard_says_whether_it_hears() -> None:
    ours, theirs = Hearing(Sender.PRIMARY, KEY), Hearing(Sender.STANDBY, KEY)
    ours.receive(theirs.next_datagram(), 1.0)
    assert times(ours) == (1.0, None)
    theirs.receive(ours.next_datagram(), 1.5)
    ours.receive(theirs.next_datagram(), 2.0)
    assert times(ours) == (2.0, 2.0)
    ours.next_datagram()  # lost: the other side goes on, and has heard no more
    ours.receive(theirs.next_datagram(), 3.0)
    assert times(ours) == (3.0, 2.0)


def times(hearing: Hearing) -> tuple[float | None, float | None]:
    return hearing.heard_s, hearing.answered_s
