"""What a standby is sent of its primary's disks: all that may differ, and nothing else."""

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vmckpt.replicate.disks.intake import EARLY_BYTES, MOST_BYTES, Intake
from vmckpt.replicate.disks.known import BLOCK_BYTES, KnownBlocks, blocks_of, digest_of
from vmckpt.replicate.wire.messages import DiskWrite

# Three blocks, of which the last is short.
SIZE = 2 * BLOCK_BYTES + 4096


def told(content: bytes) -> KnownBlocks:
    known = KnownBlocks(len(content))
    blocks = (content[at : at + BLOCK_BYTES] for at in range(0, len(content), BLOCK_BYTES))
    known.tell(0, b"".join(map(digest_of, blocks)))
    assert known.complete
    return known


def apply(writes: list[DiskWrite], content: bytearray) -> None:
    for write in writes:
        data = bytes(write.data) or bytes(write.zero_bytes)
        content[write.offset_bytes : write.offset_bytes + len(data)] = data


def test_blocks_that_are_there_already_are_not_sent() -> None:
    content = bytes(BLOCK_BYTES) + random.Random(1).randbytes(SIZE - BLOCK_BYTES)
    known = told(content)
    assert known.differing(0, content) == []
    changed = bytearray(content)
    changed[BLOCK_BYTES + 5] ^= 1
    assert known.differing(0, bytes(changed)) == [(BLOCK_BYTES, 2 * BLOCK_BYTES)]
    assert known.differing(0, bytes(changed)) == []  # it has it by then
    assert known.differing_from_zero(0, BLOCK_BYTES) == []
    assert known.differing_from_zero(0, SIZE) == [(BLOCK_BYTES, SIZE)]
    assert known.differing_from_zero(0, SIZE) == []


def test_of_a_block_that_is_written_in_part_nothing_is_known_any_more() -> None:
    content = random.Random(2).randbytes(SIZE)
    known = told(content)
    part = content[512:1024]
    assert known.differing(512, part) == [(512, 1024)]
    assert known.differing(0, content) == [(0, BLOCK_BYTES)]


def test_digests_come_in_order_and_of_the_whole_disk() -> None:
    known = KnownBlocks(SIZE)
    with pytest.raises(ValueError, match="from block 1 on"):
        known.tell(1, bytes(32))
    with pytest.raises(ValueError, match="up to block 4 of 3"):
        known.tell(0, bytes(4 * 32))
    with pytest.raises(ValueError, match="digests from block 0"):
        known.tell(0, bytes(31))
    known.tell(0, bytes(64))
    before = known.complete
    known.tell(2, bytes(32))
    assert (before, known.complete) == (False, True)
    assert blocks_of(0) == 0


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_copy_becomes_the_disk_whatever_it_held(data: st.DataObject) -> None:
    """The disk is written by the guest and by the mirror, block by block, in any order."""
    seed = data.draw(st.integers(0, 2**32))
    rng = random.Random(seed)
    disk = bytearray(rng.choice([bytes(SIZE), rng.randbytes(SIZE)]))
    copy = bytearray(disk)
    for _ in range(rng.randrange(3)):
        at = rng.randrange(SIZE - 4096)
        copy[at : at + 4096] = rng.choice([bytes(4096), rng.randbytes(4096)])
    intake = Intake({0: told(bytes(copy))})

    async def run() -> None:
        left = [(at, min(at + BLOCK_BYTES, SIZE)) for at in range(0, SIZE, BLOCK_BYTES)]
        rng.shuffle(left)
        while left:
            if rng.random() < 0.5:
                start, end = left.pop()
                await intake.write(0, start, bytes(disk[start:end]))
            else:
                start = rng.randrange(SIZE // 512) * 512
                end = min(SIZE, start + 512 * rng.randrange(1, 2 * BLOCK_BYTES // 512))
                if rng.random() < 0.3:
                    disk[start:end] = bytes(end - start)
                    await intake.zero(0, start, end - start)
                else:
                    disk[start:end] = rng.randbytes(end - start)
                    await intake.write(0, start, bytes(disk[start:end]))
            if rng.random() < 0.3:
                apply(intake.cut(), copy)
        intake.all_is_copied()
        disk[0:512] = rng.randbytes(512)
        await intake.write(0, 0, bytes(disk[0:512]))
        apply(intake.cut(), copy)

    asyncio.run(run())
    assert copy == disk


def test_zeroes_cost_no_data() -> None:
    async def run() -> None:
        intake = Intake({0: told(b"x" * SIZE)})
        await intake.write(0, 0, bytes(SIZE))
        assert intake.cut() == [DiskWrite(0, 0, b"", zero_bytes=SIZE)]
        await intake.write(0, 0, bytes(SIZE))
        assert (intake.cut(), intake.written_bytes, intake.same_bytes) == ([], 2 * SIZE, SIZE)

    asyncio.run(run())


def test_a_write_of_nothing_is_none() -> None:
    async def run() -> None:
        for intake in (Intake({0: told(b"x" * SIZE)}), Intake({})):
            await intake.write(0, 512, b"")
            await intake.zero(0, 512, 0)
            assert intake.cut() == []

    asyncio.run(run())


def test_with_too_much_waiting_the_guest_waits_but_not_while_it_is_stopped() -> None:
    async def run() -> None:
        intake = Intake({})
        intake.all_is_copied()
        data = b"x" * (1 << 20)
        for _ in range(EARLY_BYTES >> 20):
            await intake.write(0, 0, data)
        assert intake.is_early.is_set()
        for _ in range((MOST_BYTES - EARLY_BYTES >> 20) - 1):
            await intake.write(0, 0, data)
        waiting = asyncio.ensure_future(intake.write(0, 0, data))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert (waiting.done(), intake.is_full) == (False, True)
        with intake.open():
            await waiting
            await intake.write(0, 0, data)
        assert len(intake.cut()) == (MOST_BYTES >> 20) + 1
        assert not intake.is_early.is_set()
        assert not intake.is_full
        await intake.write(0, 0, data)
        intake.drop()
        for _ in range(2 * MOST_BYTES >> 20):
            await intake.write(0, 0, data)
        assert intake.cut() == []

    asyncio.run(run())
