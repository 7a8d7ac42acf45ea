"""What QEMU reads when libvirt starts a domain from a checkpoint, and who is left if it fails.

In libvirt's place a process reads the image from the pipe, as a QEMU of that domain.
"""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests import image_reader
from tests.unit.test_stream_head import DEVICES, GOLDEN
from vmckpt.checkpoint.domains.loading import arriving, loading
from vmckpt.checkpoint.domains.loading.arriving import PagedMemory, SharedContent
from vmckpt.checkpoint.domains.loading.loading import DomainLoading
from vmckpt.checkpoint.domains.loading.missing import paging_files
from vmckpt.checkpoint.domains.record import PendingDomain, Phase, image_of
from vmckpt.checkpoint.domains.restore import DomainRestoring
from vmckpt.checkpoint.restore.paging import PagerProcess
from vmckpt.checkpoint.restore.requests import CheckpointSource
from vmckpt.errors import OperationFailedError
from vmckpt.hosts.local import LocalHost
from vmckpt.memory.missing_pages import AnonymousRam
from vmckpt.memory.ram_file import PAGE_BYTES, Span
from vmckpt.qemu.stream_head import RamPages, plain_begin, plain_end, plain_page, read_stream_head
from vmckpt.store.errors import DamagedError
from vmckpt.vm.domains.faults import LibvirtRefusedError
from vmckpt.vm.domains.loading import starting
from vmckpt.vm.domains.loading.starting import image_head

pytestmark = pytest.mark.contract
UUID, XML = "7961af85-4cf2-49f8-a727-3c1736dbe50b", "<domain/>"
HEAD = read_stream_head(GOLDEN + DEVICES)
PAGES = [RamPages(np.arange(3), bytes(range(1, 4)) * PAGE_BYTES)]


class Libvirt:
    """It starts a QEMU with the image; if that is no image in the end, it says so."""

    def __init__(self, directory: Path) -> None:
        self.got, self.qemu = directory / "got", list["subprocess.Popen[bytes]"]()

    async def restore(self, path: Path) -> None:
        words = [sys.executable, image_reader.__file__, str(path), str(self.got), "", "-uuid", UUID]
        await asyncio.to_thread(self._run, [*words, ""])
        data = self.got.read_bytes() if self.got.exists() else b""
        if self.qemu[0].returncode or not data.endswith(DEVICES):
            raise LibvirtRefusedError("no", why="load of migration failed", remedy="-", code=1)

    def _run(self, words: list[str]) -> None:
        self.qemu.append(subprocess.Popen(words))
        self.qemu[0].wait()


class Bench:
    """One restore with what its parts are replaced by; `attach`: what the pager says to QEMU."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host = LocalHost("here", directory, "127.0.0.1")
        self.pipe, self.libvirt = directory / "image", Libvirt(directory)
        self.is_guarded, self.pagers = False, list[PagerProcess]()
        self.is_paged = list[bool]()  # whether each pager ran afterwards
        self.attach: Callable[[], None] = lambda: None
        self.mark = b""
        plan: Any = SimpleNamespace(name="dom", uuid=UUID, xml=XML, has_private_memory=True)
        facts: Any = SimpleNamespace(memory_bytes=1 << 26)
        source = CheckpointSource(str(directory / "store"), "c")
        point: Any = None
        self.memory = PagedMemory(self.host, UUID, "dom", source)
        self.loading = DomainLoading(plan, point, facts, self.memory)
        self.eager = DomainLoading(plan, point, facts, None)
        self.plan = plan
        bench = self

        async def attach(_: PagerProcess, __: int, ___: object = None, **____: object) -> None:
            bench.attach()

        async def ready(*_: object) -> None:
            return None

        async def prepare(of: PagedMemory) -> None:
            files = paging_files(of._host, UUID)
            await of._host.make_dir(files.path)
            files.missing.write_text("{}")
            where = "/no/store", "c", files.path / "pager.log", None
            of._pager = await PagerProcess.start(*where)
            self.pagers.append(of._pager)

        def find(_: int, size_bytes: int, mark: bytes) -> Span:
            self.mark = mark
            return 1 << 30, (1 << 30) + size_bytes

        monkeypatch.setattr(PagedMemory, "prepare", prepare)
        monkeypatch.setattr(PagerProcess, "attach", attach)
        monkeypatch.setattr(PagerProcess, "opened", ready)
        monkeypatch.setattr(PagerProcess, "go", ready)
        monkeypatch.setattr(PagerProcess, "alive_during", lambda _, work: work)
        monkeypatch.setattr(AnonymousRam, "is_guarded", lambda *_: self.is_guarded)
        monkeypatch.setattr(starting, "find_marked", find)
        monkeypatch.setattr(loading, "head_of", lambda *_: HEAD)
        monkeypatch.setattr(loading, "pages_of", lambda *_: iter(PAGES))

    def forked(self, cannot: str = "") -> DomainLoading:
        """A fork's start."""
        shared = SharedContent(Path("/dev/shm/content"), cannot)
        return DomainLoading(self.plan, self.loading._point, self.loading._facts, shared)

    def start(self, *, lazily: bool, loading: DomainLoading | None = None) -> None:
        """Run it; nothing of it waits afterwards."""
        session: Any = self.libvirt
        chosen = loading or (self.loading if lazily else self.eager)

        async def run() -> None:
            try:
                work = chosen.start(session, self.pipe)
                await asyncio.wait_for(work, 60)
            finally:
                self.is_paged = [one._process.poll() is None for one in self.pagers]
                for one in self.pagers:
                    await one.end()

        try:
            asyncio.run(run())
        finally:
            assert not self.pipe.exists()
            assert all(qemu.poll() is not None for qemu in self.libvirt.qemu)

    @property
    def stream(self) -> bytes:
        head = image_head(XML)
        data = self.libvirt.got.read_bytes()
        assert data.startswith(head)
        return data.removeprefix(head)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def end(*pages: RamPages) -> bytes:
    return b"".join(plain_end(HEAD, pages))


def test_all_memory_is_in_it_if_asked_for(bench: Bench) -> None:
    bench.start(lazily=False)
    assert bench.stream == plain_begin(HEAD) + end(*PAGES)
    assert (bench.pagers, bench.loading.loaded_before) == ([], "")


def test_memory_that_comes_later_is_not_in_it(bench: Bench) -> None:
    bench.start(lazily=True)
    assert bench.stream == plain_begin(HEAD) + plain_page(HEAD, 0, bench.mark) + end()
    assert bench.loading.loaded_before == ""
    assert bench.is_paged == [True]


def test_a_guest_that_may_not_continue_leaves_no_pager_and_no_files(bench: Bench) -> None:
    """Another VM of its group did not start, when this one's new guest ran already."""
    ended = list[str]()

    async def destroy(uuid: str) -> None:
        ended.append(uuid)

    async def void() -> None:
        raise OperationFailedError("the group was given up", why="-", remedy="-")

    session: Any = SimpleNamespace(restore=bench.libvirt.restore, destroy=destroy)
    member: Any = SimpleNamespace(all_running=void)
    pending = PendingDomain("dom", UUID, "abcd0123", (), True, True, "", Phase.SWITCHING)
    bench.pipe = image_of(bench.host, pending)
    bench.pipe.parent.mkdir(parents=True)
    none: Any = None
    work = DomainRestoring(bench.plan, none, none, host=bench.host, session=session, old=none)
    start: Any = SimpleNamespace(start=lambda *_: work._started(bench.loading, pending, member))
    with pytest.raises(OperationFailedError, match="given up"):
        bench.start(lazily=True, loading=start)
    assert ended == [UUID]
    assert bench.is_paged == [False]
    assert not paging_files(bench.host, UUID).path.exists()


def refuse() -> None:
    raise OperationFailedError("no", why="Operation not permitted", remedy="-")


def test_a_qemu_that_gets_no_userfaultfd_gets_all_memory_and_that_is_said(bench: Bench) -> None:
    """It does not run as root, and the kernel allows others none: nothing of the pager stays."""
    bench.attach = refuse
    bench.start(lazily=True)
    mark = plain_page(HEAD, 0, bench.mark)
    assert bench.stream == plain_begin(HEAD) + mark + end(*PAGES)
    assert bench.loading.loaded_before == "Operation not permitted"
    assert bench.is_paged == [False]
    assert not paging_files(bench.host, UUID).path.exists()


def test_a_qemu_that_waits_for_pages_that_nobody_has_is_ended(bench: Bench) -> None:
    """The pager died after it had taken the memory over: libvirt would have waited for good."""
    bench.attach, bench.is_guarded = refuse, True
    with pytest.raises(OperationFailedError, match="not permitted"):
        bench.start(lazily=True)
    assert bench.libvirt.qemu[0].returncode == -9
    assert bench.is_paged == [False]
    assert not paging_files(bench.host, UUID).path.exists()


def test_a_page_that_is_damaged_is_given_to_no_guest(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pages(*_: object) -> Any:
        yield PAGES[0]
        raise DamagedError("a page is damaged", why="-", remedy="-")

    monkeypatch.setattr(loading, "pages_of", pages)
    with pytest.raises(DamagedError):
        bench.start(lazily=False)
    assert not bench.stream.endswith(DEVICES)


def test_what_libvirt_says_is_told(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses the XML before it starts a QEMU, or its QEMU cannot load the devices."""

    async def refuses(path: Path) -> None:
        with await asyncio.to_thread(path.open, "rb"):
            pass
        raise LibvirtRefusedError("no", why="unsupported configuration", remedy="-", code=1)

    monkeypatch.setattr(bench.libvirt, "restore", refuses)
    with pytest.raises(LibvirtRefusedError, match="unsupported configuration"):
        bench.start(lazily=True)
    assert bench.is_paged == [False]


def test_memory_that_its_xml_places_is_loaded_before_and_that_is_said(bench: Bench) -> None:
    bench.plan.has_private_memory = False
    bench.start(lazily=True)
    assert bench.stream == plain_begin(HEAD) + end(*PAGES)
    assert "memoryBacking" in bench.loading.loaded_before


def test_of_a_fork_only_devices_follow_once_its_memory_has_the_content(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = list[tuple[int, AnonymousRam, Path]]()
    monkeypatch.setattr(arriving, "give_content", lambda *words: given.append(words))
    fork = bench.forked()
    bench.start(lazily=True, loading=fork)
    assert given == [
        (
            bench.libvirt.qemu[0].pid,
            AnonymousRam(((1 << 30, (1 << 30) + (1 << 26)),)),
            Path("/dev/shm/content"),
        )
    ]
    assert bench.stream == plain_begin(HEAD) + plain_page(HEAD, 0, bench.mark) + end()
    assert (bench.pagers, fork.loaded_before) == ([], "")


@pytest.mark.parametrize("cannot", ["", "its balloon reports free pages"])
def test_a_fork_that_cannot_share_has_all_pages_and_that_is_said(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, cannot: str
) -> None:
    def denied(*_: object) -> None:
        if cannot:
            pytest.fail("it was not to be tried")
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(arriving, "give_content", denied)
    fork = bench.forked(cannot)
    bench.start(lazily=True, loading=fork)
    assert bench.stream == plain_begin(HEAD) + plain_page(HEAD, 0, bench.mark) + end(*PAGES)
    assert fork.loaded_before == (cannot or "Permission denied")
