"""A standby's copies of disks: whose they are, what they hold, and what becomes of them."""

import asyncio
import errno
import fcntl
import os
import random
import struct
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.qcow2 import read_qcow2
from vmckpt.checkpoint.disks.qcow2 import write_image, write_overlay
from vmckpt.errors import OperationFailedError, RefusedError, StorageError
from vmckpt.qemu.disks.qcow2 import CLUSTER_BYTES
from vmckpt.replicate.disks.copies import StandbyFile, discard, mark_as_disks, prepare, read_mark
from vmckpt.replicate.disks.image import WritableImage, opened
from vmckpt.replicate.disks.journal import DisksJournal, journal_of
from vmckpt.replicate.disks.known import BLOCK_BYTES, blocks_of, digest_of
from vmckpt.replicate.wire.messages import Digests, DiskWrite, HelloDisk

SIZE = 5 * BLOCK_BYTES + 512


KINDS = pytest.mark.parametrize("kind", ["raw", "qcow2"])


def made(directory: Path, name: str = "disk.img", kind: str = "raw") -> Path:
    path = directory / name
    prepare([StandbyFile(path, SIZE, kind)], "web", "run1")
    return path


def content(path: Path, kind: str) -> bytes:
    return path.read_bytes() if kind == "raw" else read_qcow2(path)


def test_new_copies_are_holes_and_go_with_their_replication(tmp_path: Path) -> None:
    path = made(tmp_path / "images")
    assert (path.stat().st_size, path.stat().st_blocks) == (SIZE, 0)
    discard([path], "other")
    discard([path], "web", "run2")
    assert path.exists()
    discard([path, tmp_path / "none"], "web", "run1")
    assert not path.exists()


def test_what_was_the_vms_disk_is_gone_on_from_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "disk.raw"
    path.write_bytes(b"x" * SIZE)
    mark_as_disks([path], "web")
    prepare([StandbyFile(path, SIZE, "raw")], "web", "run2")
    discard([path], "web")
    assert path.read_bytes() == b"x" * SIZE


def written(path: Path, pieces: Sequence[int], size: int = SIZE) -> None:
    """A qcow2 as a VM's own disk is: what was never written has no place."""
    chunks = [(np.array([n]), bytes([n + 1]) * CLUSTER_BYTES) for n in pieces]
    write_image(path, "qcow2", size, chunks)
    mark_as_disks([path], "web")


def test_a_qcow2_that_was_the_vms_disk_gets_places_for_all_and_keeps_what_it_holds(
    tmp_path: Path,
) -> None:
    path = tmp_path / "disk.qcow2"
    written(path, [3, 1])
    before = read_qcow2(path)
    for run in ("run1", "run2"):  # of which the second finds all of it there
        prepare([StandbyFile(path, SIZE, "qcow2")], "web", run)
        length = path.stat().st_size
        assert read_qcow2(path) == before
    with opened(path, "qcow2") as image:
        assert image.digests(1, 1) == digest_of(b"\2" * BLOCK_BYTES)
        image.apply([DiskWrite(0, BLOCK_BYTES - 1, b"abc"), DiskWrite(0, SIZE - 1, b"z")])
    after = bytearray(before)
    after[BLOCK_BYTES - 1 : BLOCK_BYTES + 2], after[-1:] = b"abc", b"z"
    assert read_qcow2(path) == after
    assert path.stat().st_size == length


def test_one_for_whose_tables_there_is_no_room_is_what_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "disk.qcow2"
    written(path, [0, 2])
    before = read_qcow2(path)

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched, pytest.raises(StorageError, match="cannot make a copy"):
        patched.setattr(os, "fsync", full)
        prepare([StandbyFile(path, SIZE, "qcow2")], "web", "run1")
    assert read_qcow2(path) == before
    prepare([StandbyFile(path, SIZE, "qcow2")], "web", "run1")
    assert read_qcow2(path) == before


def test_a_qcow2_that_cannot_be_gone_on_from_is_left_as_it_is(tmp_path: Path) -> None:
    plain, over, longer = (tmp_path / name for name in ("plain", "over", "longer"))
    plain.write_bytes(b"x" * SIZE)
    write_overlay(over, SIZE, tmp_path / "below", "raw")
    written(longer, [1], 2 * SIZE)
    mark_as_disks([plain, over], "web")
    for path, why in (
        (plain, "not a qcow2"),
        (over, "a backing file"),
        (longer, f"{2 * SIZE} bytes"),
    ):
        before = path.read_bytes()
        with pytest.raises(RefusedError, match="is another disk") as caught:
            prepare([StandbyFile(path, SIZE, "qcow2")], "web", "run1")
        assert why in caught.value.why
        assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("at", "value", "why"),
    [
        (24, 1 << 63, "bytes, the VM's has"),  # the disk's length
        (40, (1 << 64) - 1, "tables are shorter"),  # where its tables are
        (40, 1 << 62, "tables are shorter"),
        (None, 1 << 63 | 1 << 45, "much longer than its disk"),  # where its first cluster is
        (None, 1 << 63 | 1 << 55, "much longer than its disk"),
    ],
)
def test_an_image_whose_guest_wrote_its_header_takes_no_memory_by_it(
    tmp_path: Path, at: int | None, value: int, why: str
) -> None:
    """A QEMU that was broken into writes anything into its own disk: an old primary's, too."""
    path = tmp_path / "disk.qcow2"
    written(path, [0, 2])
    data = bytearray(path.read_bytes())
    if at is None:
        (level1_at,) = struct.unpack_from(">Q", data, 40)
        at = struct.unpack_from(">Q", data, level1_at)[0] & (1 << 56) - 512
    data[at : at + 8] = struct.pack(">Q", value)
    path.write_bytes(data)
    before = path.stat()
    with pytest.raises(RefusedError, match="is another disk") as caught:
        prepare([StandbyFile(path, SIZE, "qcow2")], "web", "run1")
    assert why in caught.value.why
    assert path.stat() == before


def test_an_image_that_is_much_longer_than_its_disk_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "disk.qcow2"
    written(path, [0, 2])
    os.truncate(path, 1 << 42)  # a hole
    with pytest.raises(RefusedError, match="is another disk") as caught:
        prepare([StandbyFile(path, SIZE, "qcow2")], "web", "run1")
    assert "much longer" in caught.value.why
    os.truncate(path, 1 << 34)
    prepare([StandbyFile(path, SIZE, "qcow2")], "web", "run1")


def test_a_file_that_appears_meanwhile_is_not_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, theirs = tmp_path / "new.raw", tmp_path / "theirs.raw"
    theirs.write_bytes(b"y" * SIZE)
    monkeypatch.setattr(os.path, "lexists", lambda _: False)  # it is created right after
    with pytest.raises(StorageError, match="cannot make a copy"):
        prepare([StandbyFile(new, SIZE, "raw"), StandbyFile(theirs, SIZE, "raw")], "web", "run1")
    assert theirs.read_bytes() == b"y" * SIZE
    assert not new.exists()


def test_what_is_somebody_elses_is_not_touched(tmp_path: Path) -> None:
    new, theirs = tmp_path / "new.raw", tmp_path / "theirs.raw"
    theirs.write_bytes(b"y" * SIZE)
    for other in (None, "db"):
        if other:
            mark_as_disks([theirs], other)
        with pytest.raises(RefusedError, match="exists on the standby already"):
            prepare(
                [StandbyFile(new, SIZE, "raw"), StandbyFile(theirs, SIZE, "raw")], "web", "run1"
            )
        assert not new.exists()
    mark_as_disks([theirs], "web")
    with pytest.raises(RefusedError, match="is another disk"):
        prepare(
            [StandbyFile(new, SIZE, "raw"), StandbyFile(theirs, SIZE + 512, "raw")], "web", "run1"
        )
    discard([theirs], "web")
    assert theirs.read_bytes() == b"y" * SIZE
    assert read_mark(new) is None


def test_the_disk_of_an_earlier_vm_of_that_name_is_not_gone_on_from(tmp_path: Path) -> None:
    """`vm rm` had kept it; a new VM of that name was protected by this host."""
    path = tmp_path / "disk.raw"
    path.write_bytes(b"y" * SIZE)
    mark_as_disks([path], "web", "id-1")
    with pytest.raises(RefusedError, match="exists on the standby already") as caught:
        prepare([StandbyFile(path, SIZE, "raw")], "web", "run1", "id-2")
    assert "an earlier 'web'" in caught.value.why
    prepare([StandbyFile(path, SIZE, "raw")], "web", "run1", "id-1")
    mark_as_disks([path], "web")  # by an older vmckpt
    prepare([StandbyFile(path, SIZE, "raw")], "web", "run1", "id-2")
    assert path.read_bytes() == b"y" * SIZE


def test_what_a_qemu_has_open_is_neither_gone_on_from_nor_removed(tmp_path: Path) -> None:
    path = made(tmp_path)
    with path.open("r+b") as file:
        # As QEMU does: an open-file-description lock on one byte for each right that it has.
        lock = struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, 101, 1, 0)
        fcntl.fcntl(file, 37, lock)  # F_OFD_SETLK
        discard([path], "web")
        assert path.exists()
        with pytest.raises(RefusedError, match="is in use"):
            prepare([StandbyFile(path, SIZE, "raw")], "web", "run2")
    discard([path], "web")
    assert not path.exists()


def test_no_room_for_a_file_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot make a copy"):
        prepare([StandbyFile(Path("/proc/vmckpt/disk.raw"), SIZE, "raw")], "web", "run1")


@KINDS
def test_it_tells_what_it_holds_and_reads_no_holes(tmp_path: Path, kind: str) -> None:
    path, data = made(tmp_path, kind=kind), random.Random(1).randbytes(BLOCK_BYTES)
    with opened(path, kind) as image:
        image.apply([DiskWrite(0, 2 * BLOCK_BYTES, data)])
        expected = content(path, kind)
        digests = image.digests(0, 3) + image.digests(3, 100)
    assert expected[2 * BLOCK_BYTES : 3 * BLOCK_BYTES] == data
    blocks = [expected[at : at + BLOCK_BYTES] for at in range(0, SIZE, BLOCK_BYTES)]
    assert digests == b"".join(map(digest_of, blocks))
    assert len(blocks) == blocks_of(SIZE)


@KINDS
def test_writes_and_zeroes_are_applied_in_order_and_twice_is_the_same(
    tmp_path: Path, kind: str
) -> None:
    rng, expected, writes = random.Random(3), bytearray(SIZE), []
    for _ in range(200):
        start = rng.randrange(SIZE - 1)
        length = rng.randrange(1, min(SIZE - start, 2 * BLOCK_BYTES) + 1)
        if rng.random() < 0.4:
            writes.append(DiskWrite(0, start, b"", zero_bytes=length))
            expected[start : start + length] = bytes(length)
        else:
            writes.append(DiskWrite(0, start, rng.randbytes(length)))
            expected[start : start + length] = writes[-1].data
    path = made(tmp_path, kind=kind)
    with opened(path, kind) as image:
        image.reserve(writes)
        image.apply(writes)
        assert content(path, kind) == expected
        image.apply(writes)
        image.flush()
    assert content(path, kind) == expected


def test_many_small_writes_and_zeroes_take_time_by_their_number_not_its_square(
    tmp_path: Path,
) -> None:
    """Such a guest's epochs were applied for longer than they may take."""
    blocks, count = 1 << 16, 20_000
    copy = tmp_path / "disk.img"
    prepare([StandbyFile(copy, 1024 * blocks, "raw")], "web", "run1")
    rng = random.Random(1)
    writes = [DiskWrite(0, 1024 * rng.randrange(blocks), b"x" * 512) for _ in range(count)]
    writes += [DiskWrite(0, 1024 * rng.randrange(blocks), b"", 512) for _ in range(count)]
    rng.shuffle(writes)
    expected = bytearray(1024 * blocks)
    for write in writes:
        data = bytes(write.data) or bytes(write.zero_bytes)
        expected[write.offset_bytes : write.offset_bytes + 512] = data
    with opened(copy, "raw") as image:
        began_s = time.thread_time()
        image.apply(writes)
        assert time.thread_time() - began_s < 3.0
    assert copy.read_bytes() == expected


@KINDS
def test_reserving_changes_nothing_that_is_read(tmp_path: Path, kind: str) -> None:
    path = made(tmp_path, kind=kind)
    with opened(path, kind) as image:
        image.apply([DiskWrite(0, 0, b"a" * 4096)])
        before = path.read_bytes()
        image.reserve([DiskWrite(0, 0, b"b" * (2 * BLOCK_BYTES))])
        assert path.read_bytes() == before
        assert path.stat().st_blocks * 512 >= 2 * BLOCK_BYTES


@pytest.mark.parametrize("kind", ["raw", "qcow2"])
def test_a_write_of_nothing_ends_no_standby(tmp_path: Path, kind: str) -> None:
    path = made(tmp_path, kind=kind)
    with opened(path, kind) as image:
        nothing = [DiskWrite(0, 4096, b""), DiskWrite(0, 0, b"", zero_bytes=0)]
        image.reserve(nothing)
        image.apply([*nothing, DiskWrite(0, 0, b"", zero_bytes=8192)])
    assert not content(path, kind).strip(b"\0")


class Full(WritableImage):
    """A copy whose file system is full, or breaks when it is written to."""

    def __init__(self, *, breaks: bool) -> None:
        super().__init__(-1, SIZE)
        self.breaks = breaks

    def reserve(self, writes: Sequence[DiskWrite]) -> None:
        if not self.breaks:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def apply(self, writes: Sequence[DiskWrite]) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


WRITES = [DiskWrite(0, 0, b"x" * 512)]


def test_without_room_nothing_of_an_epoch_is_applied(tmp_path: Path) -> None:
    async def run() -> None:
        journal = DisksJournal([(tmp_path / "disk.raw", Full(breaks=False))])
        with pytest.raises(StorageError, match="has no room for"):
            await journal.ready_for(WRITES)
        await journal.applied()

    asyncio.run(run())


def test_a_copy_that_cannot_be_written_is_found_before_anybody_goes_on_from_it(
    tmp_path: Path,
) -> None:
    async def run() -> None:
        journal = DisksJournal([(tmp_path / "disk.raw", Full(breaks=True))])
        await journal.ready_for(WRITES)
        journal.take(WRITES)
        for _ in range(2):
            with pytest.raises(StorageError, match="cannot use its copy"):
                await journal.applied()
        with pytest.raises(StorageError, match="cannot use its copy"):
            await journal.ready_for([])

    asyncio.run(run())


def test_epochs_are_applied_one_after_the_other(tmp_path: Path) -> None:
    async def run() -> None:
        paths = [made(tmp_path, "a.raw"), made(tmp_path, "b.raw")]
        async with journal_of([StandbyFile(path, SIZE, "raw") for path in paths]) as journal:
            journal.require_same([HelloDisk("disk0", SIZE), HelloDisk("disk1", SIZE)])
            with pytest.raises(OperationFailedError, match="differ from"):
                journal.require_same([HelloDisk("disk0", SIZE)])
            told = [one async for one in journal.digests()]
            assert told == [Digests(n, 0, opened_digests(path)) for n, path in enumerate(paths)]
            for number in range(1, 20):
                writes = [DiskWrite(disk, 0, bytes([number]) * 4096) for disk in (0, 1)]
                await journal.ready_for(writes)
                journal.take(writes)
            await journal.applied()
            assert (journal.applied_bytes, journal.is_idle) == (19 * 2 * 4096, True)
        for path in paths:
            assert path.read_bytes()[:4096] == bytes([19]) * 4096

    asyncio.run(run())


def opened_digests(path: Path) -> bytes:
    with opened(path, "raw") as image:
        return image.digests(0, blocks_of(SIZE))
