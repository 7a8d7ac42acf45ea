"""Whose a term is after a death, when the arbiter is away, or not where it was."""

import asyncio
import errno
import json
import os
import sys
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.contract.test_replication_leftovers import home, record, requested, stands
from vmckpt.codec import builtins
from vmckpt.deadlines import poll
from vmckpt.errors import VmckptError
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.remote import tls
from vmckpt.hosts.remote.tls import TlsEndpoint, open_link
from vmckpt.lease.file_store import FileStore
from vmckpt.lease.record import LeaseRecord, LeaseSpan
from vmckpt.lease.store import NONE_YET, ArbiterDownError, Versioned
from vmckpt.memory.ram_file import open_fd
from vmckpt.replicate import channel, recovery
from vmckpt.replicate.channel import Channel
from vmckpt.replicate.disks.journal import DisksJournal
from vmckpt.replicate.primary import protection
from vmckpt.replicate.primary.ending import ProtectionEnding
from vmckpt.replicate.primary.keeper import GIVEN_UP_S
from vmckpt.replicate.recovery import recover
from vmckpt.replicate.request import ServiceFiles, read_request
from vmckpt.replicate.standby import standby
from vmckpt.replicate.standby.standby import Standby
from vmckpt.replicate.wire.frames import FrameKind
from vmckpt.vm.record import Replaced


@pytest.fixture
def hosts(tmp_path: Path) -> tuple[LocalHost, LocalHost]:
    first, second = (LocalHost(name, tmp_path / name, "127.0.0.1") for name in ("a", "b"))
    return first, second


def test_a_guest_goes_on_nowhere_while_the_arbiter_knows_of_no_term(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path
) -> None:
    """Its directory is not mounted here: the standby may have the term there, and the guest."""
    home(hosts[0], "old")
    files, leases = requested(hosts, tmp_path), tmp_path / "leases"
    request = read_request(files.path)

    async def main() -> None:
        going_on = asyncio.ensure_future(recovery._takes_term(request, at_any_rate=False))
        await asyncio.wait({going_on}, timeout=0.3)
        assert not going_on.done()
        assert not leases.exists()
        home(hosts[1], "new", Replaced("a", "old"))
        put = LeaseRecord(2, "b/1", 1, LeaseSpan(0.1))
        await FileStore(leases).replace("web", put, over=NONE_YET)
        assert not await going_on

    asyncio.run(main())


def test_the_operator_ends_the_waiting_for_a_term_that_the_arbiter_does_not_know(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path
) -> None:
    """The dead-man's switch that waits has the VM's lock, which the operator's process wants."""
    home(hosts[0], "old")
    files = requested(hosts, tmp_path)
    request, script = read_request(files.path), "import time; time.sleep(60)"

    async def main() -> None:
        going_on = asyncio.ensure_future(recovery._takes_term(request, at_any_rate=False))
        await asyncio.wait({going_on}, timeout=0.3)
        assert not going_on.done()
        words = ["replica", "release", str(files.path), "-"]
        operators = await asyncio.create_subprocess_exec(sys.executable, "-c", script, *words)
        try:
            async with asyncio.timeout(20):
                assert await going_on is None
        finally:
            operators.kill()
            await operators.wait()

    asyncio.run(main())
    asyncio.run(recover(files.path, at_any_rate=True))
    assert json.loads(files.status.read_text())["why"].startswith("off")


class Away(FileStore):
    """Gives no answer while it `is_away`."""

    is_away = True

    async def read(self, vm: str) -> Versioned | None:
        if self.is_away:
            raise ArbiterDownError("the arbiter is away", why="a test's", remedy="-")
        return await super().read(vm)


@pytest.mark.parametrize("gives_up", [True, False])
def test_a_standby_has_its_time_to_give_up_a_term_that_is_seen_late(
    hosts: tuple[LocalHost, LocalHost],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    gives_up: bool,
) -> None:
    """It took it when the arbiter was back, and could not go on with the guest."""
    request = read_request(requested(hosts, tmp_path).path)
    record(tmp_path, "b/1", None)
    store, now_s = Away(tmp_path / "leases"), 0.0
    monkeypatch.setattr(recovery, "open_arbiter", lambda _: store)
    monkeypatch.setattr(recovery, "boottime_s", lambda: now_s)

    async def main() -> None:
        nonlocal now_s
        going_on = asyncio.ensure_future(recovery._takes_term(request, at_any_rate=False))
        await asyncio.sleep(0.05)
        now_s += 2 * GIVEN_UP_S
        store.is_away = False
        await asyncio.wait({going_on}, timeout=0.5)
        assert not going_on.done()
        if gives_up:
            await recovery.give_up_term(request)
        else:
            now_s += 2 * GIVEN_UP_S
        async with asyncio.timeout(20):
            assert await going_on is gives_up

    asyncio.run(main())


@pytest.mark.parametrize("is_known", [True, False])
def test_a_term_is_given_up_when_the_arbiter_knows_of_it_and_waited_for_no_longer_than_of_use(
    hosts: tuple[LocalHost, LocalHost],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_known: bool,
) -> None:
    request, now_s = read_request(requested(hosts, tmp_path).path), 0.0
    monkeypatch.setattr(recovery, "boottime_s", lambda: now_s)

    async def main() -> None:
        nonlocal now_s
        giving_up = asyncio.ensure_future(recovery.give_up_term(request))
        await asyncio.wait({giving_up}, timeout=0.3)
        assert not giving_up.done()
        if is_known:
            put = LeaseRecord(2, "b/1", 1, LeaseSpan(0.1))
            await FileStore(tmp_path / "leases").replace("web", put, over=NONE_YET)
        else:
            now_s += 2 * GIVEN_UP_S
        async with asyncio.timeout(20):
            await giving_up

    asyncio.run(main())
    if is_known:
        assert stands(tmp_path).released
    assert (tmp_path / "leases").exists() is is_known


class Arbiter(FileStore):
    """Refuses the next `refusals` changes; or makes one, and never says so (`is_stuck`)."""

    refusals, is_stuck = 0.0, False

    def __init__(self, location: Path) -> None:
        super().__init__(location)
        self.stuck = asyncio.Event()
        self.asked = 0

    async def read(self, vm: str) -> Versioned | None:
        self.asked += 1
        return await super().read(vm)

    async def replace(self, vm: str, record: LeaseRecord, *, over: int) -> Versioned:
        if self.refusals > 0:
            self.refusals -= 1
            raise ArbiterDownError("the arbiter is away", why="a test's", remedy="-")
        put = await super().replace(vm, record, over=over)
        if self.is_stuck:
            self.is_stuck = False
            self.stuck.set()
            await asyncio.Event().wait()
        return put


class Waiting:
    """A QEMU that waits; what stood with the arbiter when it was ended."""

    def __init__(self, store: FileStore) -> None:
        self._store = store
        self.qemu = SimpleNamespace(files=SimpleNamespace(qemu_id="new"))
        self.ended: Versioned | None = None

    async def end(self) -> None:
        self.ended = await self._store.read("web")


class Ending:
    """A standby that may take its primary's term, and ends without having the guest."""

    def __init__(
        self, hosts: tuple[LocalHost, LocalHost], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        requested(hosts, tmp_path)
        record(tmp_path, "a/1", "b/1", released=True)
        self.store = Arbiter(tmp_path / "leases")
        for module in (standby, recovery):
            monkeypatch.setattr(module, "open_arbiter", lambda _: self.store)
        files = ServiceFiles.of(hosts[1], "web")
        waiting: Any = Waiting(self.store)
        self.waiting = waiting
        self.standby = Standby(read_request(files.path), files, waiting, ())
        self.lease = self.standby._lease


@pytest.fixture
def ending(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Ending:
    return Ending(hosts, tmp_path, monkeypatch)


class SlowRam:
    """Memory of some hundred GiB, of which the host turns out not to have enough."""

    def reserve(self) -> None:
        time.sleep(1.0)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_standby_says_that_it_is_there_while_it_reserves_memory(
    ending: Ending, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "HEARTBEAT_S", 0.2)
    path, token = ending.standby._files.path, "token"
    wanted = tls._ListenRequest(address="127.0.0.1", first=0, last=0, token=token)
    (path / tls._REQUEST).write_text(json.dumps(builtins(wanted)))
    ram: Any = SlowRam()

    async def main() -> list[FrameKind]:
        serving = asyncio.ensure_future(ending.standby.serve(ram, DisksJournal([])))
        assert await poll((path / tls._LISTENS).exists, every_s=0.02, within_s=10.0)
        answer = json.loads((path / tls._LISTENS).read_text())
        where = TlsEndpoint("127.0.0.1", answer["port"], answer["fingerprint"], token)
        wire = await open_link("b", where)
        came = Channel(wire.reader, wire.writer, 1)
        kinds = list[FrameKind]()
        while FrameKind.FAILURE not in kinds:
            kinds.append((await came.receive())[0].kind)
        await serving
        came.abort()
        return kinds

    kinds = asyncio.run(main())
    assert kinds.count(FrameKind.HEARTBEAT) >= 2
    assert "has no room" in ending.standby.status().why  # type: ignore[operator]


@pytest.mark.parametrize("refusals", [1, 3])
def test_a_standby_that_cannot_go_on_gives_its_term_up_before_it_ends_its_qemu(
    ending: Ending, refusals: int
) -> None:
    async def main() -> None:
        await ending.lease.take()
        ending.store.refusals = refusals
        with suppress(VmckptError):  # its QEMU could not load
            await ending.lease.give_up()
        await ending.standby.finish()

    asyncio.run(main())
    assert ending.waiting.ended.record.released
    assert ending.waiting.ended.record.holder.startswith("b/1")


def test_a_standby_that_is_ended_while_it_asks_for_the_term_gives_it_up(ending: Ending) -> None:
    async def main() -> None:
        ending.store.is_stuck = True
        taking = asyncio.ensure_future(ending.lease.take())
        await ending.store.stuck.wait()
        taking.cancel()
        await asyncio.wait({taking})
        assert ending.lease.held is None
        await ending.standby.finish()

    asyncio.run(main())
    assert ending.waiting.ended.record.released
    assert ending.waiting.ended.record.holder.startswith("b/1")


def test_a_standby_ends_its_qemu_when_the_arbiter_stays_away(
    ending: Ending, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby, "GIVEN_UP_S", 0.3)

    async def main() -> None:
        await ending.lease.take()
        ending.store.refusals = float("inf")
        await ending.standby.finish()

    asyncio.run(main())
    assert ending.waiting.ended.record.holder == "b/1"


def test_a_standby_that_asked_for_no_term_asks_the_arbiter_nothing_at_its_end(
    ending: Ending,
) -> None:
    asyncio.run(ending.standby.finish())
    assert ending.store.asked == 1  # by the QEMU's end, here
    assert ending.waiting.ended.record.holder == "a/1"


def test_a_primary_waits_for_a_standby_from_when_it_first_sees_its_term(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, answers = 100.0, iter((False, False, True))

    async def take_back(_: object) -> bool:
        nonlocal now_s
        now_s += 2 * GIVEN_UP_S if now_s == 100.0 else GIVEN_UP_S / 2  # no answer for long at first
        return next(answers)

    monkeypatch.setattr(protection, "time", SimpleNamespace(monotonic=lambda: now_s))
    waiting: Any = protection.Protection.__new__(protection.Protection)
    waiting._keeper = SimpleNamespace(take_back=take_back, is_refuted=False)
    waiting._request = SimpleNamespace(is_standbys=bool, one_machine=False)
    waiting._stream = SimpleNamespace(is_taken=False)
    with open_fd(os.pidfd_open(os.getpid())) as pidfd:
        waiting._handles = SimpleNamespace(pidfd=pidfd)
        waiting._vm = SimpleNamespace(
            qemu=SimpleNamespace(process=SimpleNamespace(pid=os.getpid()))
        )
        assert asyncio.run(waiting._has_term_back())


@pytest.mark.parametrize("is_told", [True, False])
def test_a_replaced_primary_ends_as_soon_as_its_standby_has_the_guest(
    hosts: tuple[LocalHost, LocalHost], is_told: bool
) -> None:
    """By its own word over the connection, or on one machine by what is at home there."""

    async def never() -> None:
        await asyncio.Event().wait()

    async def receive() -> None:
        await asyncio.sleep(0.1)
        waiting._stream.is_taken = is_told
        if not is_told:
            home(hosts[1], "new")

    async def main() -> None:
        async with asyncio.timeout(5):
            await waiting.run()

    async def ended() -> None:
        killed.append("qemu")

    async def answer(value: Any) -> Any:
        return value

    killed = list[str]()
    waiting: Any = protection.Protection.__new__(protection.Protection)
    waiting._protect = lambda _: answer(ProtectionEnding.REPLACED)
    waiting._woken_by_its_end = nullcontext
    waiting._stream = SimpleNamespace(receive=receive, beat=never, is_taken=False)
    waiting._keeper = SimpleNamespace(
        keep=never, take_back=lambda _: answer(False), is_refuted=False, had_replica=True
    )
    waiting._qemu_lives = lambda: True
    waiting._end_qemu = ended
    waiting._request = SimpleNamespace(
        is_standbys=bool, one_machine=not is_told, standby=hosts[1], vm="web", domain=None
    )
    waiting._conclude = answer
    asyncio.run(main())
    assert killed == ["qemu"]
