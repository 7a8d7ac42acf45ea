"""Epochs on the wire: only a whole one comes out, and what is not whole is named."""

import os
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vmckpt.replicate.primary.stream import TELLING_BYTES, LinkSpeed
from vmckpt.replicate.wire.epoch import Assembler, Composer, ReceivedEpoch
from vmckpt.replicate.wire.errors import DamagedFrameError, WireError
from vmckpt.replicate.wire.frames import (
    HEAD_BYTES,
    Buffer,
    FrameHead,
    FrameKind,
    Inbound,
    Outbound,
    require_whole,
)
from vmckpt.replicate.wire.messages import (
    Begin,
    Commit,
    Digests,
    DiskWrite,
    Failure,
    Heartbeat,
    Hello,
    HelloDisk,
    Process,
    Welcome,
    decode_digests,
    decode_failure,
    decode_heartbeat,
    decode_hello,
    decode_welcome,
    decode_writes,
    encode_digests,
    encode_writes,
)
from vmckpt.replicate.wire.pages import WORDS, Encoder, Shadow, Words
from vmckpt.replicate.wire.sections import LEAST_BYTES, RETRY, Gauge, Packer, unpack

RAM_PAGES = 32
DISKS = (HelloDisk("root", 1 << 20), HelloDisk("data", 4096))
HELLO = Hello("web", "lab-a/1", "lab-a", "b1 pid:[1]", 1 << 28, DISKS, (Process(7, 99),))
PACKED = bytes(HELLO.encode()[0])


def composer(term: int = 2) -> Composer:
    return Composer(Outbound(term), Encoder(Shadow(RAM_PAGES)))


def memory() -> Words:
    return np.zeros((RAM_PAGES, WORDS), dtype="<u8")


def an_epoch(made: Composer, number: int, base: int, ram: Words) -> list[bytes]:
    """All frames of an epoch that has some of everything."""
    every = np.arange(RAM_PAGES)
    writes = [DiskWrite(0, 512, b"a" * 512), DiskWrite(1, 0, b"bc"), DiskWrite(0, 0, b"")]
    frames = [
        made.begin(number, Begin(base, RAM_PAGES, 514)),
        *made.pages(every, ram),
        *made.disk(writes),
        *made.device(b"device state" * 100),
        made.commit(),
    ]
    return [b"".join(frame) for frame in frames]


def fed(assembler: Assembler, inbound: Inbound, frames: Iterable[bytes]) -> list[ReceivedEpoch]:
    found = []
    for frame in frames:
        head, payload = inbound.head(frame[:HEAD_BYTES]), memoryview(frame)[HEAD_BYTES:]
        require_whole(head, payload)
        epoch = assembler.take(head, payload)
        found += [epoch] if epoch else []
    return found


def test_an_epoch_comes_out_with_its_last_frame_and_holds_all() -> None:
    ram, replica = memory(), memory()
    ram[3:9] = 7
    made, inbound, assembler = composer(), Inbound(2), Assembler(RAM_PAGES, DISKS, last=0)
    frames = an_epoch(made, 1, 0, ram)
    assert fed(assembler, inbound, frames[:-1]) == []
    assert assembler.last == 0
    (epoch,) = fed(assembler, inbound, frames[-1:])
    assert (epoch.number, epoch.term, epoch.base) == (1, 2, 0)
    assert assembler.last == 1
    for batch in epoch.batches:
        batch.apply(replica)
    assert (replica == ram).all()
    assert epoch.device_state == b"device state" * 100
    assert [(w.disk, w.offset_bytes, bytes(w.data)) for w in epoch.writes] == [
        (0, 512, b"a" * 512), (1, 0, b"bc"), (0, 0, b""),
    ]  # fmt: skip
    (second,) = fed(assembler, inbound, an_epoch(made, 5, 1, ram))
    assert (second.number, second.batches) == (5, ())


@settings(max_examples=40)
@given(st.data())
def test_no_part_of_an_epoch_can_be_missing(data: st.DataObject) -> None:
    ram = memory()
    ram[1:5] = np.random.default_rng(1).integers(0, 2**63, (4, WORDS))
    frames = an_epoch(composer(), 1, 0, ram)
    at = data.draw(st.integers(0, len(frames) - 1))
    # The frames that are left are numbered again, as if the missing one had never been sent.
    renumbered = Outbound(2)
    rest = [
        b"".join(renumbered.frame(FrameKind(frame[4]), 1, [frame[HEAD_BYTES:]]))
        for n, frame in enumerate(frames)
        if n != at
    ]
    assembler = Assembler(RAM_PAGES, DISKS, last=0)
    if at == len(frames) - 1:
        assert fed(assembler, Inbound(0), rest) == []
    else:
        with pytest.raises(WireError):
            fed(assembler, Inbound(0), rest)
        assert assembler.last == 0


@settings(max_examples=60)
@given(st.data())
def test_a_flipped_bit_anywhere_lets_no_epoch_out(data: st.DataObject) -> None:
    ram = memory()
    ram[1:5] = 3
    frames = an_epoch(composer(), 1, 0, ram)
    which = data.draw(st.integers(0, len(frames) - 1))
    bit = data.draw(st.integers(0, 8 * len(frames[which]) - 1))
    changed = bytearray(frames[which])
    changed[bit // 8] ^= 1 << bit % 8
    frames[which] = bytes(changed)
    with pytest.raises(DamagedFrameError, match=f"frame {which}"):
        fed(Assembler(RAM_PAGES, DISKS, last=0), Inbound(0), frames)


def test_an_epoch_stands_on_what_the_replica_holds() -> None:
    for base, number, last in ((0, 1, 1), (1, 2, 0), (3, 3, 3), (3, 2, 3)):
        begin = composer().begin(number, Begin(base, 0, 0))
        with pytest.raises(WireError, match="does not fit"):
            fed(Assembler(RAM_PAGES, DISKS, last=last), Inbound(0), [b"".join(begin)])


def test_frames_out_of_place_are_named() -> None:
    made, assembler, inbound = composer(), Assembler(RAM_PAGES, DISKS, last=0), Inbound(0)
    with pytest.raises(WireError, match=r"frame 0 \(COMMIT of epoch 0\) comes unasked"):
        fed(assembler, inbound, [b"".join(made.commit())])
    fed(assembler, inbound, [b"".join(made.begin(1, Begin(0, 0, 0)))])
    with pytest.raises(WireError, match="comes too early"):
        fed(assembler, inbound, [b"".join(made.begin(2, Begin(0, 0, 0)))])
    for frame, words in ((FrameKind.HELLO, "not part"), (FrameKind.ACK, "not part")):
        head = FrameHead(0, frame, 2, 1, 0, 0, 0)
        with pytest.raises(WireError, match=words):
            assembler.take(head, memoryview(b""))
    # Another epoch's, and another term's.
    for head in (
        FrameHead(0, FrameKind.DEVICE, 2, 7, 0, 0, 0),
        FrameHead(0, FrameKind.DEVICE, 3, 1, 0, 0, 0),
    ):
        with pytest.raises(WireError, match="comes unasked"):
            assembler.take(head, memoryview(b""))


def test_a_write_outside_its_disk_is_refused() -> None:
    for write in (DiskWrite(2, 0, b"x"), DiskWrite(1, 4096, b"x"), DiskWrite(1, 2**64 - 1, b"xy")):
        made = composer()
        frames = [made.begin(1, Begin(0, 0, 0)), *made.disk([write])]
        with pytest.raises(WireError, match="outside its disk"):
            fed(Assembler(RAM_PAGES, DISKS, last=0), Inbound(0), [b"".join(f) for f in frames])


def test_large_states_and_many_writes_go_in_several_frames() -> None:
    made, inbound, assembler = composer(), Inbound(0), Assembler(RAM_PAGES, DISKS, last=0)
    state = np.random.default_rng(1).bytes(5 << 19)
    writes = [DiskWrite(0, n << 9, bytes([n % 256]) * 1024) for n in range(1500)]
    frames = [made.begin(1, Begin(0, 0, 0)), *made.device(state), *made.disk(writes)]
    assert len(frames) == 6
    (epoch,) = fed(assembler, inbound, [b"".join(f) for f in [*frames, made.commit()]])
    assert epoch.device_state == state
    assert [tuple(w) for w in epoch.writes] == [tuple(w) for w in writes]


def test_what_stands_before_the_device_state_goes_once_and_with_its_epoch_alone() -> None:
    made, inbound, assembler = composer(), Inbound(0), Assembler(RAM_PAGES, DISKS, last=0)
    base = bytes(5 << 19)

    def epoch_of(number: int, base: bytes) -> ReceivedEpoch:
        begin, based = made.begin(number, Begin(number - 1, 0, 0)), [*made.base(base)]
        frames = [begin, *based, *made.device(b"state"), made.commit()]
        (epoch,) = fed(assembler, inbound, [b"".join(frame) for frame in frames])
        return epoch

    assert epoch_of(1, b"").device_base is None  # as it was: nothing
    assert epoch_of(2, base).device_base == base
    assert epoch_of(3, base).device_base is None
    assert epoch_of(4, b"").device_base == b""


# -- the other messages --------------------------------------------------------------------------


def test_the_bytes_of_messages_do_not_change() -> None:
    assert HELLO.encode() == [
        b'{"vm":"web","holder":"lab-a/1","host":"lab-a","machine":"b1 pid:[1]",'
        b'"ram_bytes":268435456,'
        b'"disks":[{"name":"root","size_bytes":1048576},{"name":"data","size_bytes":4096}],'
        b'"emitters":[{"pid":7,"start_ticks":99}],"heartbeat_port":null,"protocol":5}'
    ]
    assert Welcome("r1", 7, 5000).encode() == [
        b'{"replica":"r1","epoch":7,"heartbeat_port":5000,"protocol":5}'
    ]
    assert Begin(1, 2, 3).encode() == [bytes(7) + b"\1" + bytes(7) + b"\2" + bytes(7) + b"\3"]
    assert Commit(1, 2, 3, 4, 5).encode() == [
        b"".join(n.to_bytes(8) for n in (1, 2, 3, 4)) + (5).to_bytes(4)
    ]
    assert Heartbeat(258, 1).encode() == [bytes(6) + b"\1\2" + bytes(7) + b"\1"]
    packer = Packer(float("inf"))
    table = b"\1\0\0\0" + b"".join(n.to_bytes(8, "little") for n in (1, 512, 2))
    assert b"".join(encode_writes([DiskWrite(1, 512, b"xy")], packer)) == (
        b"\0" + (30).to_bytes(4) + (30).to_bytes(4) + table + b"xy"
    )


def test_messages_come_back_as_they_were() -> None:
    assert decode_hello(HELLO.encode()[0]) == HELLO
    for welcome in (Welcome("r1"), Welcome("r1", 7, 5000)):
        assert decode_welcome(welcome.encode()[0]) == welcome
    failure = Failure("busy", "a", "b", "c")
    assert decode_failure(failure.encode()[0]) == failure
    assert decode_heartbeat(Heartbeat(2**64 - 1, 0).encode()[0]) == Heartbeat(2**64 - 1, 0)


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (b"\xff", "not valid JSON"),
        (b"[]", "not an object"),
        (replace(HELLO, protocol=2).encode()[0], "HELLO is of protocol 2, here is 5"),
        (b'{"vm":"web","protocol":5}', "lacks disks"),
        (PACKED.replace(b'"vm":"web"', b'"vm":7'), "wrong vm"),
        (PACKED.replace(b'"pid":7', b'"pid":-7'), "negative pid"),
        (PACKED.replace(b'"pid":7', b'"pid":true'), "wrong pid"),
        (PACKED.replace(b'"pid":7', b'"pid":%d' % (1 << 31)), "pid too large"),
        (replace(HELLO, machine="m\0").encode()[0], "NUL in its machine"),
        (replace(HELLO, heartbeat_port=1 << 16).encode()[0], "heartbeat_port too large"),
        (PACKED.replace(b'"pid":7', b'"pit":7'), "Process has other fields"),
        (PACKED.replace(b'{"pid":7,"start_ticks":99}', b"7"), "Process has other"),
    ],
)  # fmt: skip
def test_a_hello_that_makes_no_sense_is_named(payload: bytes, words: str) -> None:
    with pytest.raises(WireError, match=words):
        decode_hello(payload)


def test_payloads_of_another_length_are_named() -> None:
    with pytest.raises(WireError, match="another length"):
        decode_heartbeat(b"123")


# -- sections ------------------------------------------------------------------------------------


@given(
    st.lists(st.lists(st.binary(max_size=300) | st.just(b"text " * 200), max_size=4), max_size=4),
    st.sampled_from([0.0, float("inf")]),
)
def test_sections_come_back_as_they_were(sections: list[list[bytes]], link: float) -> None:
    packer = Packer(link)
    payload = b"".join(b"".join(map(bytes, packer.pack(parts))) for parts in sections)
    found = unpack(memoryview(payload), len(sections))
    assert [bytes(section) for section in found] == [b"".join(parts) for parts in sections]


def test_packing_pays_by_what_it_cost_and_gained_and_by_the_link() -> None:
    gauge = Gauge()
    assert gauge.pays(0.0)
    assert gauge.pays(1e12)  # nothing is known yet: try
    for _ in range(50):
        gauge = gauge.after(raw_bytes=1000, packed_bytes=300, seconds=1000 / 0.3e9)
    assert gauge.pays(0.2e9)  # 0.7 bytes saved at 0.2 GB/s: 3.5 ns; packing costs 3.3 ns
    assert not gauge.pays(0.22e9)
    for _ in range(RETRY):
        assert not gauge.pays(1e9)
        gauge = gauge.without()
    assert gauge.pays(1e9)  # content changes: it is tried again
    assert not gauge.pays(float("inf"))
    assert not gauge.after(raw_bytes=1000, packed_bytes=300, seconds=1e-5).pays(1e9)


def test_content_that_does_not_shrink_is_soon_left_as_it_is() -> None:
    packer = Packer()
    for _ in range(20):
        packer.pack([os.urandom(1 << 14)])
    assert packer.gauge.left_out > 0
    assert not packer.gauge.pays(0.0)


def test_the_link_is_as_fast_as_large_epochs_come_to_be_safe() -> None:
    link = LinkSpeed()
    link.took(TELLING_BYTES - 1, 0.001)
    assert link.bytes_per_s == 0
    for _ in range(50):
        link.took(1 << 20, 0.01)
    assert link.bytes_per_s == pytest.approx(100 << 20, rel=0.01)


def test_what_packing_makes_longer_goes_as_it_was() -> None:
    noise: Buffer = np.random.default_rng(1).bytes(2 * LEAST_BYTES)
    assert Packer().pack([noise])[1] == noise


def test_zeroes_cost_no_data_and_digests_have_their_own_frame() -> None:
    packer = Packer(float("inf"))
    writes = [DiskWrite(1, 512, b"", zero_bytes=1024), DiskWrite(0, 0, b"xy")]
    payload = b"".join(encode_writes(writes, packer))
    table = b"\2\0\0\0" + b"".join(
        n.to_bytes(8, "little") for n in (1 << 63 | 1, 512, 1024, 0, 0, 2)
    )
    length = (len(table) + 2).to_bytes(4)
    assert payload == b"\0" + length + length + table + b"xy"
    assert decode_writes(memoryview(payload), DISKS) == writes
    outside = b"".join(encode_writes([DiskWrite(1, 4096, b"", zero_bytes=1)], packer))
    with pytest.raises(WireError, match="outside its disk"):
        decode_writes(memoryview(outside), DISKS)

    told = Digests(1, 3, b"d" * 64)
    payload = b"".join(encode_digests(told, packer))
    assert payload[:16] == (1).to_bytes(8) + (3).to_bytes(8)
    assert decode_digests(memoryview(payload), DISKS) == told
    with pytest.raises(WireError, match="disk 1 of 1"):
        decode_digests(memoryview(payload), DISKS[:1])
