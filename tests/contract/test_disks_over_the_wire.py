"""Disk writes from the primary's stream to the standby's copy: with their epoch, or never."""

import asyncio
import errno
import os
import socket
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import SimpleNamespace
from typing import Any

import pytest

from vmckpt.epoch.epoch import Pages
from vmckpt.errors import HostDownError
from vmckpt.lease.file_store import FileStore
from vmckpt.lease.lease import Lease
from vmckpt.lease.record import LeaseSpan
from vmckpt.lease.rule import Claimant
from vmckpt.memory.ram_file import PAGE_BYTES, mapped
from vmckpt.replicate import channel
from vmckpt.replicate.channel import ALONE, Channel
from vmckpt.replicate.disks.copies import StandbyFile, prepare
from vmckpt.replicate.disks.image import WritableImage, opened
from vmckpt.replicate.disks.journal import DisksJournal
from vmckpt.replicate.disks.known import BLOCK_BYTES, KnownBlocks
from vmckpt.replicate.paths import SecondPath
from vmckpt.replicate.primary import epochs, keeper
from vmckpt.replicate.primary.epochs import Epochs
from vmckpt.replicate.primary.keeper import TermKeeper
from vmckpt.replicate.primary.protection import Protection
from vmckpt.replicate.primary.stream import EpochStream, StandbyLostError
from vmckpt.replicate.standby import following
from vmckpt.replicate.standby.following import LOST, Following
from vmckpt.replicate.standby.replica import Replica, replica_in
from vmckpt.replicate.wire.beats import Hearing, Sender
from vmckpt.replicate.wire.frames import FrameKind
from vmckpt.replicate.wire.messages import (
    DiskWrite,
    Hello,
    HelloDisk,
    Process,
    decode_digests,
    decode_failure,
)

PAGES, SIZE = 16, 3 * BLOCK_BYTES
DISKS = (HelloDisk("disk0", SIZE),)
HELLO = Hello("web", "a/1", "a", "machine", PAGES * PAGE_BYTES, DISKS, (Process(7, 99),))
NO_SECOND_PATH = SecondPath(Hearing(Sender.STANDBY, b"key"), "a", lacks="a has one address only")
NOTHING = Pages((), b"")


class Small(WritableImage):
    """A copy on a file system that has room for so many reservations, and on a slow disk."""

    left = 1 << 30
    pieces, slow_s, fails = 1, 0.0, False

    def apply(self, writes: Sequence[DiskWrite]) -> None:
        for _ in range(self.pieces):
            time.sleep(self.slow_s)
            if self.fails:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            super().apply(writes)

    def reserve(self, writes: Sequence[DiskWrite]) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().reserve(writes)


@pytest.fixture
def ram_path() -> Iterator[Path]:
    with NamedTemporaryFile(dir="/dev/shm", prefix="vk-test-") as file:
        file.truncate(PAGES * PAGE_BYTES)
        yield Path(file.name)


async def _has_all(_hello: Hello, _term: int) -> None:
    """Nothing that a standby needs is missing."""


class Both:
    """Both sides: the primary's stream and what it was told, the standby's replica and its end."""

    def __init__(
        self, stream: EpochStream, replica: Replica, image: Small, known: KnownBlocks
    ) -> None:
        self.stream, self.replica, self.image, self.known = stream, replica, image, known
        self.keeper = stream._keeper
        self.primary = Following("b/1", replica, _has_all, NO_SECOND_PATH)
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def epoch(self, *writes: DiskWrite) -> int:
        return await self.stream.commit(NOTHING, (b"", b"devices"), writes)


@asynccontextmanager
async def connected(tmp_path: Path, ram_path: Path) -> AsyncIterator[Both]:
    copy = tmp_path / "disk.raw"
    prepare([StandbyFile(copy, SIZE, "raw")], "web", "run1")
    here, there = socket.socketpair()
    ours = Channel(*await asyncio.open_connection(sock=here), 7)
    theirs = Channel(*await asyncio.open_connection(sock=there), 7)
    known = KnownBlocks(SIZE)

    def tell(payload: memoryview) -> None:
        told = decode_digests(payload, DISKS)
        known.tell(told.first_block, bytes(told.digests))

    lease = Lease(FileStore(tmp_path), "web", Claimant("a/1"), LeaseSpan(60.0))
    stream = EpochStream(
        ours, TermKeeper(lease, lambda _: None), PAGES * PAGE_BYTES, lambda: None, tell
    )
    with opened(copy, "raw") as opened_, mapped(ram_path) as ram:
        image = Small(opened_._fd, SIZE)
        with replica_in(ram, DisksJournal([(copy, image)])) as replica:
            both = Both(stream, replica, image, known)
            both.ended = asyncio.ensure_future(both.primary.receive(theirs))
            await ours.send(ours.outbound.frame(FrameKind.HELLO, 0, HELLO.encode()))
            head, _ = await ours.receive()
            assert head.kind is FrameKind.WELCOME
            receiving = asyncio.ensure_future(stream.receive())
            try:
                async with asyncio.timeout(20):
                    yield both
            finally:
                ours.abort()
                await asyncio.gather(receiving, both.ended, return_exceptions=True)
                theirs.abort()
                await asyncio.gather(replica.disks.applied(), return_exceptions=True)


async def refused(ram_path: Path, hello: Hello) -> tuple[str, Hello | None]:
    """What a standby that refuses this HELLO answers, and the HELLO that it keeps."""
    here, there = socket.socketpair()
    ours = Channel(*await asyncio.open_connection(sock=here), 7)
    theirs = Channel(*await asyncio.open_connection(sock=there), 7)
    try:
        with mapped(ram_path) as ram, replica_in(ram, DisksJournal([])) as replica:
            primary = Following("b/1", replica, _has_all, NO_SECOND_PATH)
            receiving = asyncio.ensure_future(primary.receive(theirs))
            await ours.send(ours.outbound.frame(FrameKind.HELLO, 0, hello.encode()))
            head, payload = await ours.receive()
            assert head.kind is FrameKind.FAILURE
            assert await receiving == ALONE
            return decode_failure(payload).what, primary.hello
    finally:
        ours.abort()
        theirs.abort()


def test_a_primary_whose_guest_has_more_memory_than_its_replica_is_refused(ram_path: Path) -> None:
    """Its pages would be of no file, and its epochs larger than the standby has memory for."""
    hello = replace(HELLO, ram_bytes=1 << 40, disks=())
    why, _ = asyncio.run(refused(ram_path, hello))
    assert "memory" in why


def test_a_primary_says_once_who_it_is(tmp_path: Path, ram_path: Path) -> None:
    """With each HELLO the copies of the disks would be read once more, at the same time."""

    async def main() -> None:
        async with connected(tmp_path, ram_path) as both:
            ours = both.stream._channel
            await both.stream.acknowledged(await both.epoch())
            telling = both.primary._telling
            await ours.send(ours.outbound.frame(FrameKind.HELLO, 0, HELLO.encode()))
            assert await both.ended == ALONE
            assert "comes twice" in both.primary.why
            assert both.primary._telling is telling

    asyncio.run(main())


def test_a_primary_that_sends_more_device_state_than_any_has_is_refused(
    tmp_path: Path, ram_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is kept twice, besides the next epoch's: more than the standby was promised."""
    monkeypatch.setattr(following, "MOST_STATE_BYTES", 1 << 20)

    async def main() -> None:
        async with connected(tmp_path, ram_path) as both:
            base, most = os.urandom(1 << 19), os.urandom(1 << 19)
            await both.stream.acknowledged(await both.stream.commit(NOTHING, (base, most)))
            more = os.urandom((1 << 19) + 1)
            with suppress(StandbyLostError, HostDownError):
                await both.stream.commit(NOTHING, (os.urandom(1 << 19), more))
            assert await both.ended == ALONE
            assert "device state of epoch 2 is too large" in both.primary.why
            assert both.replica.device_state == base + most

    asyncio.run(main())


def test_a_primary_that_names_no_process_to_fence_is_refused(ram_path: Path) -> None:
    """On one machine its standby looks at the first when the connection ends."""
    hello = replace(HELLO, emitters=(), disks=())
    why, kept = asyncio.run(refused(ram_path, hello))
    assert ("process" in why, kept) == (True, None)


def test_a_primary_that_reads_no_answers_is_lost(
    tmp_path: Path, ram_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its epochs may be small, and as many as it likes: each has an answer."""
    monkeypatch.setattr(channel, "PATIENCE_S", 0.5)

    async def main() -> None:
        async with connected(tmp_path, ram_path) as both:
            ours, theirs = both.stream._channel, both.primary._channel
            assert theirs is not None
            theirs._writer.transport.set_write_buffer_limits(high=1 << 10)
            ours._reader._transport.pause_reading()  # type: ignore[attr-defined]
            with suppress(StandbyLostError, HostDownError):
                while not both.ended.done():
                    await both.epoch()
            assert await both.ended == LOST

    asyncio.run(main())


def test_writes_are_applied_with_their_epoch_and_dropped_without_it(
    tmp_path: Path, ram_path: Path
) -> None:
    async def main() -> None:
        expected = bytearray(SIZE)
        async with connected(tmp_path, ram_path) as both:
            number = 0
            for byte in b"abc":
                await both.stream.disks([DiskWrite(0, 512 * byte, bytes([byte]) * 512)])
                writes = [DiskWrite(0, 0, bytes([byte]) * 4096), DiskWrite(0, 512, b"", 512)]
                number = await both.epoch(*writes)
                expected[512 * byte : 512 * byte + 512] = bytes([byte]) * 512
                expected[:4096] = bytes([byte]) * 4096
                expected[512:1024] = bytes(512)
            await both.stream.acknowledged(number)
            # One more, of which all has come but its end.
            await both.stream.disks([DiskWrite(0, 0, b"x" * SIZE)])
            await asyncio.sleep(0.05)
            both.stream.abort()
            assert await both.ended == LOST
            await both.replica.disks.applied()
            assert (both.replica.epoch, both.replica.complete) == (number, True)
            assert both.known.complete
        assert (tmp_path / "disk.raw").read_bytes() == expected

    asyncio.run(main())


def test_a_full_standby_is_the_last_epoch_whole_and_says_why_it_goes_no_further(
    tmp_path: Path, ram_path: Path
) -> None:
    async def main() -> None:
        async with connected(tmp_path, ram_path) as both:
            both.image.left = 2
            numbers = [await both.epoch(DiskWrite(0, 0, bytes([n]) * SIZE)) for n in (1, 2, 3)]
            with pytest.raises(StandbyLostError, match="has no room for"):
                await both.stream.acknowledged(numbers[2])
            assert await both.ended == ALONE
            assert (both.replica.epoch, both.replica.complete) == (numbers[1], True)
        assert (tmp_path / "disk.raw").read_bytes() == b"\2" * SIZE

    asyncio.run(main())


def test_a_disk_that_is_slow_but_gets_on_is_no_silence_and_one_that_hangs_is(
    tmp_path: Path, ram_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "WORK_S", 1.0)
    monkeypatch.setattr(keeper, "PATIENCE_S", 1.5)
    monkeypatch.setattr(channel, "HEARTBEAT_S", 0.05)

    async def main() -> None:
        async with connected(tmp_path, ram_path) as both:
            beating = asyncio.ensure_future(both.stream.beat())
            both.image.pieces, both.image.slow_s = 8, 0.4
            began_s = asyncio.get_running_loop().time()
            for byte in b"ab":
                number = await both.epoch(DiskWrite(0, 0, bytes([byte]) * 4096))
                await both.stream.acknowledged(number)
            assert asyncio.get_running_loop().time() - began_s > 3.0  # the first one's disk
            await both.replica.disks.applied()
            both.image.pieces, both.image.slow_s = 1, 5.0
            await both.stream.acknowledged(await both.epoch(DiskWrite(0, 0, b"c")))
            with pytest.raises(StandbyLostError, match="silent"):
                await both.stream.acknowledged(await both.epoch(DiskWrite(0, 0, b"d")))
            beating.cancel()

    asyncio.run(main())


@pytest.mark.parametrize("how", ["slow", "fails", "hangs"])
def test_no_guest_is_handed_over_before_its_last_writes_are_on_the_standbys_disk(
    tmp_path: Path, ram_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The standby took the term, could not apply them, and said nothing for as long as its disk
    hung; by then its primary had ended the only guest.
    """
    monkeypatch.setattr(epochs, "LONGEST_S", 1.5)
    monkeypatch.setattr(channel, "HEARTBEAT_S", 0.05)

    async def main() -> None:
        async with connected(tmp_path, ram_path) as both:
            mine: Any = Epochs.__new__(Epochs)
            mine._stream, mine._devices = both.stream, (b"", b"devices")
            mine._mirrors = SimpleNamespace(has_disks=False)
            await mine.applied()  # nothing is sent
            assert both.stream.next_number == 1
            mine._mirrors = SimpleNamespace(has_disks=True)
            both.image.slow_s = 4.0 if how == "hangs" else 0.5
            both.image.fails = how == "fails"
            await both.stream.acknowledged(await both.epoch(DiskWrite(0, 0, b"abc")))
            disks: Any = both.replica.disks
            assert not disks.is_idle  # it is acknowledged before that
            if how == "slow":
                await mine.applied()
                assert disks.is_idle
                assert (both.replica.complete, both.replica.device_state) == (True, b"devices")
            else:
                with pytest.raises(StandbyLostError):
                    await mine.applied()

    asyncio.run(main())


def test_a_guest_is_not_handed_over_to_a_standby_that_is_lost_over_that() -> None:
    service: Any = Protection.__new__(Protection)
    did = list[str]()

    async def one(_replica: str, *, resume_guest: bool) -> bool:
        assert not resume_guest
        return True

    async def applied() -> None:
        did.append("applied")
        raise StandbyLostError("the standby is silent")

    async def hand_over() -> None:
        did.append("hand over")

    service._epochs, service._replica = SimpleNamespace(one=one, applied=applied), "b/1"
    service._keeper, service._is_handing_over = SimpleNamespace(hand_over=hand_over), False
    with pytest.raises(StandbyLostError):
        asyncio.run(service._hand_over([]))
    assert did == ["applied"]
    assert not service._is_handing_over  # so its guest goes on here
