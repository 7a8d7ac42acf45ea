"""Memory that comes while its user runs already: right, whoever dies, or none at all."""

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
import pytest

from tests.contract.test_checkpoint_disks import SIZE, make
from tests.contract.test_restore_disks import spec
from tests.unit.test_checkpoint_tree import facts
from vmckpt.checkpoint.facts import DiskFacts
from vmckpt.checkpoint.origin import digest
from vmckpt.checkpoint.restore.first_pages import read_noted
from vmckpt.checkpoint.restore.paging import PagerProcess, is_whole, see_to_pages
from vmckpt.checkpoint.restore.requests import CheckpointSource, RestoreOptions
from vmckpt.checkpoint.restore.restore import restore
from vmckpt.errors import OperationFailedError, VmLostError
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes.process import identify
from vmckpt.memory.missing_pages import AnonymousRam, SharedRam
from vmckpt.memory.ram_file import PAGE_BYTES
from vmckpt.store.files.manifest import PAGE_CHUNK_BYTES
from vmckpt.store.open import create_store, open_store
from vmckpt.vm.paths import vm_dir
from vmckpt.vm.record import Platform, Qemu

PAGES = 4096
HAMMERED_S = 0.5
# Maps a file, or as many bytes of private memory, and says of the pages it is told what the first
# eight bytes are. It gives pages back
# as QEMU does where a guest reports free ones: "give" some, or "hammer" with 2 MiB at a time.
READER = """
import ctypes, mmap, random, sys, threading
file = None if sys.argv[1].isdigit() else open(sys.argv[1], "r+b")
private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
ram = mmap.mmap(file.fileno(), 0) if file else mmap.mmap(-1, int(sys.argv[1]), private)
libc = ctypes.CDLL(None)
base = ctypes.addressof(ctypes.c_char.from_buffer(ram))
if len(sys.argv) > 2:
    ram[4096:4104] = b"earlier!"

def give(first, count):
    at, size = ctypes.c_long(first * 4096), ctypes.c_long(count * 4096)
    if file:
        libc.fallocate(file.fileno(), 3, at, size)
    libc.madvise(ctypes.c_void_p(base + first * 4096), size, 4)

def value(page):
    return int.from_bytes(ram[page * 4096 : page * 4096 + 8], "little")

seen = []
def hammer():
    rng = random.Random(1)
    while True:
        first = rng.randrange(0, len(ram) // 4096, 512)
        seen.extend((page, value(page)) for page in range(first, first + 512, 37))
        give(first, 512)

print(base, flush=True)
for line in sys.stdin:
    what, *pages = line.split()
    pages = list(map(int, pages))
    if what == "write":
        ram[pages[0] * 4096 : pages[0] * 4096 + 8] = b"mine!!!!"
        pages = []
    elif what == "give":
        give(*pages)
        pages = []
    elif what == "hammer":
        for _ in range(3):
            threading.Thread(target=hammer, daemon=True).start()
    elif what == "seen":
        print(" ".join(f"{page}:{what}" for page, what in seen), flush=True)
        continue
    print(" ".join(str(value(p)) for p in pages), flush=True)
"""


def mixed() -> "np.ndarray[Any, Any]":
    """Every other page is unlike all others, the rest is empty."""
    content = np.zeros(PAGES, np.uint64)
    content[::2] = np.arange(PAGES // 2, dtype=np.uint64) + 1_000_000
    content[PAGES // 2 : PAGES // 2 + 100] = 0
    return content


class Guest:
    """A process in place of a QEMU, its host, and a checkpoint of its memory."""

    def __init__(
        self, directory: Path, ram_file: Path | None, content: "np.ndarray[Any, Any]", *more: str
    ) -> None:
        self.host = LocalHost("here", directory, "127.0.0.1")
        self.ram_file, self.location = ram_file, str(directory / "store")
        self.content = content
        self.checkpoint = self._store()
        self.child = subprocess.Popen(
            [sys.executable, "-c", READER, str(ram_file or PAGES * PAGE_BYTES), *more],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        address = int(self._line())
        ends = [address + count * PAGE_BYTES for count in (0, PAGES // 3, PAGES)]
        self.private = None if ram_file else AnonymousRam(tuple(pairwise(ends)))
        files = vm_dir(directory, "guest").qemu("0")
        files.path.mkdir(parents=True)
        itself = identify(self.child.pid)
        assert itself
        self.qemu = Qemu(files, itself, Platform("q35", "tcg", "qemu64"))
        self.log = files.path / "pager.log"
        self.noted = directory / "noted" / "guest"

    def _store(self) -> str:
        numbers = np.flatnonzero(self.content)
        names, which = np.unique(self.content[numbers], return_inverse=True)
        noise = np.random.default_rng(7).integers(0, 255, (len(names), PAGE_BYTES), np.uint8)
        noise[:, :8] = names.view(np.uint8).reshape(-1, 8)
        noise = noise[which]
        with create_store(self.location) as store, store.begin("guest") as new:
            area = new.area("ram", size_bytes=PAGES * PAGE_BYTES, chunk_bytes=PAGE_CHUNK_BYTES)
            area.put(numbers, noise.tobytes())
            return new.commit({}).id

    def _line(self) -> str:
        assert self.child.stdout
        return self.child.stdout.readline()

    def ask(self, what: str, *pages: int) -> None:
        assert self.child.stdin
        self.child.stdin.write(f"{what} {' '.join(map(str, pages))}\n")
        self.child.stdin.flush()

    def reads(self, *pages: int) -> list[int]:
        self.ask("read", *pages)
        return [int(word) for word in self._line().split()]

    def damage(self) -> None:
        """Every pack of the store, in its middle."""
        for pack in Path(self.location).rglob("packs/**/*"):
            if pack.is_file():
                data = bytearray(pack.read_bytes())
                for at in range(len(data) // 8, len(data) * 7 // 8, 997):
                    data[at] ^= 0xFF
                pack.chmod(0o600)
                pack.write_bytes(data)

    def wait_until_tried_again(self) -> None:
        """The store did not answer the pager."""
        given_up_s = time.monotonic() + 60
        while "retrying" not in self.log.read_text():
            assert time.monotonic() < given_up_s, self.log.read_text()
            time.sleep(0.02)

    async def paged(self) -> PagerProcess:
        where = self.location, self.checkpoint, self.log, self.ram_file
        pager = await PagerProcess.start(*where, noted=self.noted)
        await pager.opened()
        await pager.attach(self.qemu.process.pid, private=self.private)
        return pager

    def present(self) -> "np.ndarray[Any, Any]":
        """For each page, whether it has memory."""
        ram = self.private or SharedRam(self.ram_file or Path())
        return ram.present(self.child.pid)


@contextmanager
def running(
    directory: Path, content: "np.ndarray[Any, Any]", *more: str, private: bool = False
) -> Iterator[Guest]:
    """A guest whose memory was so."""
    with NamedTemporaryFile(dir="/dev/shm", prefix="vk-test-") as file:
        file.truncate(PAGES * PAGE_BYTES)
        made = Guest(directory, None if private else Path(file.name), content, *more)
        try:
            yield made
        finally:
            made.child.kill()
            made.child.communicate()


@pytest.fixture(params=["shared", "private"])
def guest(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Guest]:
    with running(tmp_path, mixed(), private=request.param == "private") as made:
        yield made


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Guest]:
    with running(tmp_path, mixed()) as made:
        yield made


def test_pages_come_when_they_are_wanted_and_then_all_of_them(guest: Guest) -> None:
    async def go() -> None:
        pager = await guest.paged()
        wanted = [0, 1, 4094, 4095, 2048, 2050, 7]
        assert guest.reads(*wanted) == [int(guest.content[n]) for n in wanted]
        guest.ask("write", 100)
        guest._line()
        await pager.go(guest.host, guest.qemu.files)
        assert await pager.ended() == 0
        assert await is_whole(guest.host, guest.qemu)

    asyncio.run(go())
    expected = guest.content.copy()
    expected[100] = int.from_bytes(b"mine!!!!", "little")
    assert guest.reads(*range(PAGES)) == expected.tolist()
    assert guest.present()[np.flatnonzero(expected)].all()


def test_what_was_waited_for_is_there_beforehand_next_time(tmp_path: Path) -> None:
    async def go(guest: Guest, beforehand: list[int], *wanted: int) -> None:
        pager = await guest.paged()
        there = guest.present()
        assert there[beforehand].all()
        assert not there[[number for number in wanted if number not in beforehand]].any()
        assert guest.reads(*wanted) == [int(guest.content[n]) for n in wanted]
        await pager.go(guest.host, guest.qemu.files)
        assert await pager.ended() == 0, guest.log.read_text()
        assert guest.reads(*range(PAGES)) == guest.content.tolist()

    noted = tmp_path / "noted"
    rounds: list[tuple[list[int], tuple[int, ...], list[int]]] = [
        ([], (10, 1000, 3000, 3), [10, 1000, 3000, 3]),
        # What is there and not looked at is not wanted first: no more of it.
        ([10, 1000, 3000], (1000, 2500), [1000, 2500]),
        ([1000, 2500], (2500, 1000), [1000, 2500]),
    ]
    for number, (beforehand, wanted, then) in enumerate(rounds):
        with running(tmp_path / str(number), mixed()) as guest:
            guest.noted = noted
            asyncio.run(go(guest, beforehand, *wanted))
            assert read_noted(noted) == then


def test_noted_pages_that_are_no_pages_of_it_are_left_alone(shared: Guest) -> None:
    guest = shared

    async def go() -> None:
        pager = await guest.paged()
        assert guest.present()[20]
        await pager.go(guest.host, guest.qemu.files)
        assert await pager.ended() == 0, guest.log.read_text()

    guest.noted.parent.mkdir()
    guest.noted.write_text(f"[{PAGES}, -1, 20]")
    asyncio.run(go())
    assert guest.reads(*range(PAGES)) == guest.content.tolist()


def test_pages_that_are_all_alike_are_many_for_one(tmp_path: Path) -> None:
    """What one of them costs is not what all of them cost: they come all the same, each once."""
    content = mixed()
    content[500:3500] = 77

    async def go(guest: Guest) -> None:
        pager = await guest.paged()
        wanted = [1000, 3499, 0, 500]
        assert guest.reads(*wanted) == [int(content[n]) for n in wanted]
        await pager.go(guest.host, guest.qemu.files)
        assert await pager.ended() == 0, guest.log.read_text()

    with running(tmp_path, content) as guest:
        asyncio.run(go(guest))
        assert guest.reads(*range(PAGES)) == content.tolist()


def test_pages_that_are_given_back_are_empty_from_then_on(guest: Guest) -> None:
    async def go() -> None:
        pager = await guest.paged()
        assert guest.reads(1024) == [int(guest.content[1024])]
        guest.ask("give", 1024, 512)
        guest._line()
        assert guest.reads(1024) == [0]
        await pager.go(guest.host, guest.qemu.files)
        assert await pager.ended() == 0, guest.log.read_text()

    asyncio.run(go())
    assert guest.reads(1024, 0) == [0, int(guest.content[0])]


def test_pages_may_be_given_back_at_any_moment(guest: Guest) -> None:
    """By three threads, 2 MiB at a time: the kernel then takes page tables away at any moment."""

    async def go() -> None:
        pager = await guest.paged()
        guest.ask("hammer")
        guest._line()
        await asyncio.sleep(HAMMERED_S)
        await pager.go(guest.host, guest.qemu.files)
        assert await pager.ended() == 0, guest.log.read_text()

    asyncio.run(go())
    guest.ask("seen")
    seen = [tuple(map(int, word.split(":"))) for word in guest._line().split()]
    assert seen
    assert all(value in (0, int(guest.content[page])) for page, value in seen)
    assert any(value for _, value in seen)


@pytest.mark.parametrize("private", [False, True])
def test_what_was_there_before_the_guest_is_not_the_guests(tmp_path: Path, private: bool) -> None:
    async def go(guest: Guest) -> None:
        pager = await guest.paged()
        assert guest.reads(1, 2) == [int(guest.content[1]), int(guest.content[2])]
        await pager.go(guest.host, guest.qemu.files)
        assert await pager.ended() == 0

    with running(tmp_path, mixed(), "earlier", private=private) as guest:
        asyncio.run(go(guest))


def test_why_memory_cannot_be_paged_is_said_in_words(guest: Guest) -> None:
    """It was the last line of a traceback: "PermissionError: [Errno 1] Operation not permitted"."""
    guest.child.kill()
    guest.child.wait()

    async def why() -> str:
        pager = await PagerProcess.start(
            guest.location, guest.checkpoint, guest.log, guest.ram_file
        )
        try:
            await pager.opened()
            with pytest.raises(OperationFailedError) as caught:
                await pager.attach(guest.qemu.process.pid, private=guest.private)
            return caught.value.why
        finally:
            await pager.end()

    found = asyncio.run(why())
    assert "No such" in found
    assert "Error" not in found


def test_a_pager_that_is_killed_is_followed_by_another(guest: Guest) -> None:
    async def go() -> None:
        pager = await guest.paged()
        assert guest.reads(10) == [int(guest.content[10])]
        await pager.go(guest.host, guest.qemu.files)
        pager._process.send_signal(signal.SIGKILL)
        await pager.ended()
        if not await is_whole(guest.host, guest.qemu):
            # No one serves: whoever looks at a page that is missing waits, and reads no zeroes.
            guest.ask("read", 4000)
            await asyncio.sleep(0.1)
            await see_to_pages(guest.host, guest.qemu)
            assert guest._line().split() == [str(int(guest.content[4000]))]
        assert guest.reads(*range(PAGES)) == guest.content.tolist()

    asyncio.run(go())


def test_signals_do_not_end_a_pager(guest: Guest) -> None:
    async def go() -> None:
        pager = await guest.paged()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
            pager._process.send_signal(number)
        assert guest.reads(20) == [int(guest.content[20])]
        await pager.go(guest.host, guest.qemu.files)
        assert await pager.ended() == 0

    asyncio.run(go())


def test_a_page_that_is_damaged_ends_the_guest_and_is_never_given(guest: Guest) -> None:
    async def go() -> None:
        pager = await guest.paged()
        guest.damage()
        await pager.go(guest.host, guest.qemu.files)
        assert await pager.ended() == 1
        assert guest.child.wait() == -signal.SIGKILL
        assert "lost" in json.loads(guest.qemu.files.missing.read_text())
        with pytest.raises(VmLostError):
            await is_whole(guest.host, guest.qemu)

    asyncio.run(go())


def test_a_guest_waits_while_its_store_does_not_answer(guest: Guest) -> None:
    async def go() -> None:
        pager = await guest.paged()
        packs, away = Path(guest.location) / "packs", Path(guest.location) / "away"
        packs.rename(away)
        packs.symlink_to("not-mounted")
        await pager.go(guest.host, guest.qemu.files)
        await asyncio.to_thread(guest.wait_until_tried_again)
        guest.ask("read", 10)
        await asyncio.sleep(1.5)
        assert pager._process.poll() is None
        assert guest.child.poll() is None
        packs.unlink()
        away.rename(packs)
        assert await pager.ended() == 0
        assert guest._line().split() == [str(int(guest.content[10]))]
        assert guest.reads(*range(PAGES)) == guest.content.tolist()

    asyncio.run(go())


@pytest.mark.parametrize("folder", ["packs", ""])
def test_a_guest_waits_while_its_stores_disk_is_not_mounted(guest: Guest, folder: str) -> None:
    """An empty directory is in its place."""

    async def go() -> None:
        pager = await guest.paged()
        location = Path(guest.location) / folder
        away = location.with_name("away")
        location.rename(away)
        location.mkdir()
        await pager.go(guest.host, guest.qemu.files)
        await asyncio.to_thread(guest.wait_until_tried_again)
        location.rmdir()
        away.rename(location)
        assert await pager.ended() == 0
        assert guest.reads(*range(PAGES)) == guest.content.tolist()

    asyncio.run(go())


def test_a_guest_waits_while_its_stores_connection_is_made_anew(
    guest: Guest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh, pid = tmp_path / "ssh", tmp_path / "pid"
    vmckpt = Path(sys.executable).with_name("vmckpt")
    words = f"echo $$ >{pid}", "for last; do :; done", f"exec {vmckpt} ${{last#vmckpt }}"
    ssh.write_text("\n".join(words))
    monkeypatch.setenv("VMCKPT_STORE_SSH", f"sh {ssh}")
    guest.location = f"ssh://there{guest.location}"

    async def go() -> None:
        pager = await guest.paged()
        os.kill(int(pid.read_text()), signal.SIGKILL)
        await pager.go(guest.host, guest.qemu.files)
        assert await pager.ended() == 0
        assert "retrying" in guest.log.read_text()
        assert guest.reads(*range(PAGES)) == guest.content.tolist()

    asyncio.run(go())


def test_a_guest_that_ends_while_its_store_does_not_answer_ends_its_pager(guest: Guest) -> None:
    async def go() -> None:
        pager = await guest.paged()
        (Path(guest.location) / "packs").rename(Path(guest.location) / "away")
        (Path(guest.location) / "packs").symlink_to("not-mounted")
        await pager.go(guest.host, guest.qemu.files)
        await asyncio.to_thread(guest.wait_until_tried_again)
        os.kill(guest.child.pid, signal.SIGKILL)
        guest.child.wait()
        assert await pager.ended() == 0
        assert await is_whole(guest.host, guest.qemu)

    asyncio.run(go())


def test_a_guest_that_ends_ends_its_pager(guest: Guest) -> None:
    async def go() -> None:
        pager = await guest.paged()
        os.kill(guest.child.pid, signal.SIGKILL)
        guest.child.wait()
        await pager.go(guest.host, guest.qemu.files)
        assert await pager.ended() == 0

    asyncio.run(go())


def test_a_pager_that_is_quicker_than_qemu_finds_the_directory_of_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It puts the first pages there: a restore failed with "the pager did not start"."""
    disk = DiskFacts(str(tmp_path / "web.raw"), "raw", SIZE, read_only=False, area="disk-0")
    said = replace(facts("one"), spec=spec(tmp_path), disks=(disk,), macs=())
    make(tmp_path, said.to_json())
    host, location = LocalHost("local", tmp_path, "127.0.0.1"), str(tmp_path / "checkpoints")
    with open_store(location) as store:
        point = store.find("one")
    source = CheckpointSource(location, point.id, known=digest(point))
    found = list[tuple[Path, int]]()

    async def start(_place: str, _id: str, _log: Path, ram_file: Path, **_more: object) -> None:
        found.append((ram_file.parent, stat.S_IMODE(ram_file.parent.stat().st_mode)))
        raise OSError("no pager")

    monkeypatch.setattr(PagerProcess, "start", start)
    wish = RestoreOptions("copy", in_place=False, eager=False, plugged=False, keep_macs=False)
    with pytest.raises(OSError, match="no pager"):
        asyncio.run(restore(host, source, wish, lambda _: None))
    ((directory, mode),) = found
    assert mode == 0o700
    assert not directory.exists()  # nothing of it is left


@pytest.mark.parametrize("died", [False, True])
def test_a_pager_that_has_loaded_everything_has_not_died(guest: Guest, died: bool) -> None:
    """Libvirt still started the guest, and the restore was given up: "its pager was killed"."""

    async def go() -> None:
        pager = await guest.paged()
        if died:
            pager._process.kill()
        else:
            await pager.go(guest.host, guest.qemu.files)
        await pager.alive_during(asyncio.sleep(3600 if died else 3.0))

    if died:
        with pytest.raises(OperationFailedError, match="could not be read"):
            asyncio.run(go())
    else:
        asyncio.run(go())
        assert guest.reads(*range(PAGES)) == guest.content.tolist()
