"""The arbiter is gone for good, or was put back to what it had before: what an operator can do."""

import asyncio
import errno
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.contract.test_replication_dead_ends import elsewhere, promoted_on, protected
from tests.contract.test_replication_leftovers import WithoutArbiter, home, record, stands
from tests.faulty_host import FaultyHost, silence
from vmckpt.errors import OperationFailedError, OutcomeUnknownError, RefusedError, VmckptError
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory.inventory import change_host
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes.process import ProcessId, identify
from vmckpt.lease.clock import boottime_s
from vmckpt.lease.file_store import FileStore
from vmckpt.lease.lease import Lease
from vmckpt.lease.record import LeaseRecord, LeaseSpan
from vmckpt.lease.rule import Claimant, Holding
from vmckpt.lease.standby import StandbyMove
from vmckpt.lease.store import ArbiterDownError, Versioned
from vmckpt.options.replication import ReplicationOptions
from vmckpt.replicate import recovery
from vmckpt.replicate.control import GO_ALONE, GO_ALONE_UNLESS_TAKEN
from vmckpt.replicate.disks.journal import DisksJournal
from vmckpt.replicate.operator import keep as keeping
from vmckpt.replicate.operator import stop as stopping
from vmckpt.replicate.operator import terms
from vmckpt.replicate.operator.keep import keep
from vmckpt.replicate.operator.keeping import DailyWindow
from vmckpt.replicate.operator.operate import failover, require_decided
from vmckpt.replicate.operator.sides import ReplicaSide, sides
from vmckpt.replicate.operator.stop import stop
from vmckpt.replicate.primary import protection as protecting
from vmckpt.replicate.primary.ending import ProtectionEnding
from vmckpt.replicate.primary.keeper import TermKeeper
from vmckpt.replicate.primary.protection import Protection
from vmckpt.replicate.recovery import abandon, recover
from vmckpt.replicate.request import ServiceFiles, read_request
from vmckpt.replicate.standby import takeover
from vmckpt.replicate.standby.following import LOST
from vmckpt.replicate.standby.takeover import TakeOver
from vmckpt.replicate.status import ReplicaStatus, Role
from vmckpt.vm.inventory import Vm, read_vm
from vmckpt.vm.record import Replaced

Hosts = tuple[LocalHost, LocalHost]


@pytest.fixture
def hosts(tmp_path: Path) -> Hosts:
    return LocalHost("a", tmp_path / "a", "127.0.0.1"), LocalHost("b", tmp_path / "b", "127.0.0.1")


def broken(tmp_path: Path) -> None:
    (tmp_path / "leases").write_text("no directory")


@contextmanager
def running(vm: Vm) -> Iterator["subprocess.Popen[bytes]"]:
    """A process in its QEMU's place."""
    with subprocess.Popen(["sleep", "60"]) as qemu:
        itself = identify(qemu.pid)
        assert itself is not None
        vm.directory.current.write_text(vm.qemu._replace(process=itself).to_json())
        yield qemu
        qemu.kill()


def test_an_operators_release_comes_before_a_recovery_that_waits_for_the_arbiter(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recovery of a guest that is alive had the VM's lock, for good: nothing let it run."""
    vm, files = protected(hosts, tmp_path)
    broken(tmp_path)
    freed = list[str]()

    async def free(vm: Vm, _files: ServiceFiles) -> None:
        freed.append(vm.name)

    monkeypatch.setattr(recovery, "_free", free)
    monkeypatch.setattr(recovery, "ARBITER_S", 0.2)
    words = ["replica", "release", str(files.path), "-"]
    script = "import time; time.sleep(60)"

    async def main() -> None:
        waiting = asyncio.ensure_future(recover(files.path))
        await asyncio.wait({waiting}, timeout=0.5)
        assert not waiting.done()
        mark = await asyncio.create_subprocess_exec(sys.executable, "-c", script, *words)
        try:
            async with asyncio.timeout(20):
                await recover(files.path, at_any_rate=True, standby_is_dead=True)
            await waiting
        finally:
            mark.kill()
            await mark.wait()

    with running(vm):
        asyncio.run(main())
    assert freed == ["web"]
    assert not vm.directory.claim.exists()
    assert vm.directory.gone_replica.read_text() == "b/1"


def test_a_recovery_ends_with_the_replication(hosts: Hosts, tmp_path: Path) -> None:
    vm, files = protected(hosts, tmp_path)
    broken(tmp_path)

    async def main() -> None:
        waiting = asyncio.ensure_future(recover(files.path))
        await asyncio.wait({waiting}, timeout=0.5)
        assert not waiting.done()
        files.request.unlink()
        async with asyncio.timeout(20):
            await waiting

    with running(vm) as qemu:
        asyncio.run(main())
        assert qemu.poll() is None
    assert vm.directory.claim.exists()


@pytest.mark.parametrize("is_dead", [True, False])
def test_a_guest_that_its_standby_passed_on_is_not_run_where_the_arbiter_is_not_heard(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_dead: bool
) -> None:
    """A primary that was out of reach came back; its standby's host had nothing of the VM."""
    protected(hosts, tmp_path)
    ServiceFiles.of(hosts[1], "web").status.write_text(json.dumps(promoted_on(hosts[1], "new")))
    third = LocalHost("c", tmp_path / "c", "127.0.0.1")
    home(third, "newer")
    waits = WithoutArbiter(hosts[0], monkeypatch)
    with pytest.raises(RefusedError, match="'web' is on c"):
        asyncio.run(waits.stop((*hosts, third), standby_is_dead=is_dead))
    assert GO_ALONE not in waits.told


class Kept:
    """A VM that `keep` keeps protected by two of three hosts, and has moved on to the third."""

    def __init__(self, hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path / "operator"))
        third = LocalHost("c", tmp_path / "c", "127.0.0.1")
        change_host(third)
        home(third, "newer")
        self._hosts, self.told = hosts, list[str]()

    def keep(self, window: DailyWindow | None = None) -> None:
        """Until it reports something."""

        async def until_told() -> None:
            said = asyncio.Event()

            def tell(_event: str, text: str) -> None:
                self.told.append(text)
                said.set()

            keeping = keep(
                "web", self._hosts, lambda *_: ReplicationOptions("/leases"),
                new_run=lambda: "r", tell=tell, window=window,
            )  # fmt: skip
            kept = asyncio.ensure_future(keeping)
            async with asyncio.timeout(30):
                await said.wait()
            kept.cancel()
            await asyncio.wait({kept})

        asyncio.run(until_told())


def test_a_guest_that_moved_to_a_host_that_keep_does_not_name_is_not_let_run_besides(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its old primary is back, its service killed: `keep` gave it the term, and it ran."""
    kept = Kept(hosts, tmp_path, monkeypatch)
    vm, _ = protected(hosts, tmp_path)
    asyncio.run(hosts[1].remove(ServiceFiles.of(hosts[1], "web").path))  # as `replicate stop` does
    record(tmp_path, "b/1", None)
    with running(vm) as qemu:
        kept.keep()
        assert qemu.wait(5) == -9
    assert stands(tmp_path).holder == "b/1"


def test_nor_where_the_window_of_keep_ends_and_the_arbiter_is_not_heard(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(hosts, tmp_path, monkeypatch)
    protected(hosts, tmp_path)
    waits = WithoutArbiter(hosts[0], monkeypatch)
    now = datetime.now()  # noqa: DTZ005 - as `keep` does
    past = DailyWindow((now - timedelta(hours=2)).time(), (now - timedelta(hours=1)).time())

    async def answered() -> None:
        async with waits.answering():
            await asyncio.to_thread(kept.keep, past)

    asyncio.run(answered())
    assert "'web' is on c" in kept.told[0]
    assert GO_ALONE not in waits.told


@pytest.mark.parametrize("are_dead", [True, False])
def test_a_keep_that_was_itself_suspended_ends_no_protection(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, are_dead: bool
) -> None:
    """Both services had answered, too late for it: it ended a healthy protection, and began to copy
    the VM anew.
    """
    vm, files = protected(hosts, tmp_path)
    request, heard, did = read_request(files.path), list[bool](), list[str]()

    async def late(_name: str, known: Sequence[Host]) -> list[ReplicaSide]:
        heard.append(bool(heard) and not are_dead)
        state = "protected" if heard[-1] else "silent"
        return [
            ReplicaSide(
                one, ReplicaStatus(role=role, state=state, run=request.run), answers=heard[-1]
            )
            for one, role in zip(known, (Role.PRIMARY, Role.STANDBY), strict=True)
        ]

    async def stopped(*_: object) -> None:
        did.append("stop")

    async def started(*_: object) -> None:
        did.append("start")

    monkeypatch.setattr(keeping, "sides", late)
    monkeypatch.setattr(keeping, "stop", stopped)
    monkeypatch.setattr(keeping, "start", started)
    options = ReplicationOptions("/leases")

    async def main() -> None:
        kept = keep("web", hosts, lambda *_: options, new_run=lambda: "r", tell=lambda *_: None)
        with suppress(TimeoutError):
            await asyncio.wait_for(kept, 2.0)

    with running(vm):
        asyncio.run(main())
    assert did == (["stop", "start"] if are_dead else [])
    assert len(heard) == 2


def test_a_keep_goes_on_to_the_next_host_if_one_cannot_protect_the_vm(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its disk had failed, or its service was stuck: the others were never asked."""
    vm, third = home(hosts[0], "old"), LocalHost("c", tmp_path / "c", "127.0.0.1")
    stuck = ReplicaSide(hosts[1], ReplicaStatus(role=Role.STANDBY, state="silent"), answers=False)
    asked = list[str]()

    async def sides_(*_: object) -> list[ReplicaSide]:
        return [stuck]

    async def failed(host: str) -> None:
        asked.append(host)
        if host != "c":
            raise OperationFailedError(f"{host} cannot", why="-", remedy="-")

    async def stopped(*_: object) -> None:
        await failed("stop")

    async def started(_vm: Vm, standby: LocalHost, *_: object) -> None:
        await failed(standby.name)

    monkeypatch.setattr(keeping, "AGAIN_S", 0.1)
    monkeypatch.setattr(keeping, "sides", sides_)
    monkeypatch.setattr(keeping, "stop", stopped)
    monkeypatch.setattr(keeping, "start", started)
    options = ReplicationOptions("/leases")
    every = (*hosts, third)

    async def main() -> None:
        kept = keep("web", every, lambda *_: options, new_run=lambda: "r", tell=lambda *_: None)
        with suppress(TimeoutError):
            await asyncio.wait_for(kept, 2.0)

    with running(vm):
        asyncio.run(main())
    assert asked == ["stop", "c"]


@pytest.mark.parametrize("is_silent", [True, False])
def test_where_a_guest_went_that_a_standby_had_is_the_operators_to_say(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_silent: bool
) -> None:
    """On a host that gives no answer, or on none that is known."""
    protected(hosts, tmp_path)[0].directory.claim.unlink()  # as a primary does at its end
    faults = silence() if is_silent else ()
    third = FaultyHost("c", tmp_path / "c", "127.0.0.1", faults=faults)
    waits = WithoutArbiter(hosts[0], monkeypatch)

    async def answer(word: str) -> ReplicaStatus:
        return replace(await WithoutArbiter._answer(waits, word), run="1")

    monkeypatch.setattr(waits, "_answer", answer)
    if not is_silent:
        told = promoted_on(hosts[1], "new")
        ServiceFiles.of(hosts[1], "web").status.write_text(json.dumps(told))
    with pytest.raises(RefusedError, match="not certain") as refused:
        asyncio.run(waits.stop((*hosts, third)))
    assert "--standby-is-dead" in refused.value.remedy
    assert GO_ALONE not in waits.told
    asyncio.run(waits.stop((*hosts, third), standby_is_dead=True))
    assert GO_ALONE_UNLESS_TAKEN in waits.told
    assert GO_ALONE not in waits.told


def test_a_standby_that_has_the_guest_is_not_dead_whatever_is_said(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host answers: the guest ran twice."""
    vm, _ = protected(hosts, tmp_path)
    record(tmp_path, "b/1", None)
    ServiceFiles.of(hosts[1], "web").status.write_text(json.dumps(promoted_on(hosts[1], "new")))
    home(hosts[1], "new", Replaced("a", "old"))
    waits = WithoutArbiter(hosts[0], monkeypatch)
    with pytest.raises(RefusedError, match="'web' is on b"):
        asyncio.run(waits.stop(hosts, standby_is_dead=True))
    assert GO_ALONE not in waits.told
    # Nor when the primary's service was killed.
    asyncio.run(stop("web", hosts, standby_is_dead=True))
    assert not vm.directory.path.exists()
    assert asyncio.run(read_vm(hosts[1], "web")) is not None


def test_a_primary_that_was_killed_does_not_have_what_its_standby_has(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arbiter's directory is not mounted there any longer: its guest was let run beside it."""
    vm, _ = protected(hosts, tmp_path)
    ServiceFiles.of(hosts[1], "web").status.write_text(json.dumps(promoted_on(hosts[1], "new")))
    home(hosts[1], "new", Replaced("a", "old"))
    freed = list[str]()

    async def released(_host: Host, name: str, *, standby_is_dead: bool) -> dict[str, Any]:
        freed.append(f"{name} {standby_is_dead}")
        return {}

    monkeypatch.setattr(stopping, "take_back_term", released)
    with running(vm) as qemu:
        asyncio.run(stop("web", hosts))
        assert qemu.wait(5) == -9
    assert freed == []
    assert asyncio.run(read_vm(hosts[0], "web")) is None


@pytest.mark.parametrize("has_claim", [True, False])
def test_an_arbiter_that_knows_of_nothing_says_nothing_of_a_standby_that_is_silent(
    hosts: Hosts, tmp_path: Path, *, has_claim: bool
) -> None:
    """The old host is back, without the arbiter's directory; its standby has the guest, or has not:
    without a claim none was ever to have it.
    """
    vm, files = protected(hosts, tmp_path)
    elsewhere(files)
    known = hosts[0], FaultyHost("b", tmp_path / "b", "127.0.0.1", faults=silence())
    if not has_claim:
        vm.directory.claim.unlink()
        asyncio.run(stop("web", known))
        return
    with pytest.raises(VmckptError) as refused:
        asyncio.run(stop("web", known))
    assert "--standby-is-dead" in refused.value.remedy
    with pytest.raises(RefusedError, match="may be about to take over"):
        asyncio.run(require_decided(vm))
    assert files.request.exists()
    asyncio.run(stop("web", known, standby_is_dead=True))
    asyncio.run(require_decided(vm))


def test_what_an_earlier_replication_left_elsewhere_ends_no_stop(
    hosts: Hosts, tmp_path: Path
) -> None:
    """Its host was lost in it, and is back: the VM is protected from b by now."""
    _, files = protected(hosts, tmp_path)
    elsewhere(files)
    asyncio.run(hosts[0].remove(files.path.parents[1] / "vms/web"))
    home(hosts[1], "new", Replaced("a", "old"))
    record(tmp_path, "b/2", None)
    theirs = ServiceFiles.of(hosts[1], "web")
    asked = json.loads(theirs.request.read_text())
    now = {"run": "2", "primary": asked["standby"], "standby": asked["primary"] | {"name": "c"}}
    theirs.request.write_text(json.dumps(asked | now))
    ended = {"role": "primary", "state": "ended", "ending": "stopped", "run": "2", "why": "-"}
    theirs.status.write_text(json.dumps(ended))
    asyncio.run(stop("web", hosts))
    assert not files.path.exists()
    assert asyncio.run(read_vm(hosts[1], "web")) is not None


async def _no_answer(directory: Path) -> None:
    async with asyncio.timeout(1.0):
        await abandon(directory)


@pytest.mark.parametrize("command", ["stop", "failover"])
def test_a_guest_whose_taking_over_was_cut_off_goes_on_by_the_operators_word(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """It is at home with the standby, paused, and its arbiter gone: each command named another."""
    vm, _ = protected(hosts, tmp_path)
    elsewhere(ServiceFiles.of(hosts[1], "web"))
    there = home(hosts[1], "new", Replaced("a", "old"))
    broken(tmp_path)
    monkeypatch.setattr(terms, "ABANDON_S", 0.5)
    if command == "failover":
        with pytest.raises(OutcomeUnknownError) as paused:
            asyncio.run(failover("web", hosts))
        assert paused.value.remedy == "vmckpt vm start web"
        assert not vm.directory.path.exists()
        with pytest.raises(VmckptError, match="cannot tell whether") as unsure:
            asyncio.run(require_decided(there))
        assert "vmckpt replicate stop web" in unsure.value.remedy
    asyncio.run(stop("web", hosts))
    assert not vm.directory.path.exists()
    asyncio.run(require_decided(there))


def test_an_arbiter_that_was_put_back_is_said_to_fail(tmp_path: Path) -> None:
    """The guest was paused for good, without a word, and `stop` did not end it."""
    keeper = TermKeeper(
        Lease(FileStore(tmp_path), "web", Claimant("a/1"), LeaseSpan(1.0)), lambda _: None
    )
    versions = tmp_path / "web.leases"

    async def main() -> None:
        await keeper.take(None)
        assert await keeper.in_sync("b/1")
        await keeper._lease.renew()
        max(versions.iterdir()).unlink()
        keeping = asyncio.ensure_future(keeper.keep())
        await asyncio.wait({keeping}, timeout=0.8)
        assert "has forgotten" in keeper.arbiter_fails
        keeper.continue_alone(is_certain=True)
        async with asyncio.timeout(5):
            assert await keeper.solo()
        keeping.cancel()

    asyncio.run(main())


class Away(FileStore):
    """Gives no answer."""

    async def read(self, vm: str) -> Versioned | None:
        raise ArbiterDownError("the arbiter is away", why="a test's", remedy="-")

    async def replace(self, vm: str, record: LeaseRecord, *, over: int) -> Versioned:
        raise ArbiterDownError("the arbiter is away", why="a test's", remedy="-")


def protection(store: FileStore, lives: Callable[[], bool]) -> Any:
    """One whose standby is in sync, and lost."""
    one: Any = Protection.__new__(Protection)
    one._keeper = TermKeeper(Lease(store, "web", Claimant("a/1"), LeaseSpan(1.0)), lambda _: None)
    one._epochs, one._is_handing_over, one._why = SimpleNamespace(is_safe=True), False, ""

    async def said(*_: Any) -> None:
        """No one hears it."""

    one._stream, one._qemu_lives, one._end_qemu = SimpleNamespace(end=said), lives, said
    return one


def test_a_primary_that_waits_for_the_arbiter_ends_with_its_qemu(tmp_path: Path) -> None:
    """It kept the VM's lock, with nothing left to protect."""
    lives = [True, True, False]
    one = protection(Away(tmp_path), lambda: bool(lives and lives.pop(0)))

    async def main() -> ProtectionEnding:
        async with asyncio.timeout(5):
            ending: ProtectionEnding = await one._go_on_alone()
            return ending

    assert asyncio.run(main()) is ProtectionEnding.YOURS


def test_a_qemu_that_ends_while_its_term_is_asked_for_belongs_to_the_standby(
    tmp_path: Path,
) -> None:
    """The service kept the VM's lock, and took the standby's term once the arbiter answered."""
    lives = [True, True, True, False]
    one = protection(Away(tmp_path), lambda: bool(lives and lives.pop(0)))
    one._stream.is_taken, one._request = False, SimpleNamespace(one_machine=False, is_standbys=bool)

    async def main() -> None:
        async with asyncio.timeout(5):
            assert await one._handed_over() is ProtectionEnding.YOURS

    asyncio.run(main())


def test_a_standby_that_says_that_it_has_the_guest_needs_no_arbiters_word(tmp_path: Path) -> None:
    """The primary waited for an arbiter that it did not hear, with the guest paused."""
    one = protection(Away(tmp_path), lambda: True)
    one._stream.is_taken, one._request = False, SimpleNamespace(one_machine=False, is_standbys=bool)

    async def main() -> None:
        waiting = asyncio.ensure_future(one._handed_over())
        await asyncio.wait({waiting}, timeout=0.5)
        assert not waiting.done()
        one._stream.is_taken = True
        async with asyncio.timeout(5):
            assert await waiting is ProtectionEnding.YOURS

    asyncio.run(main())


@pytest.mark.parametrize("is_certain", [True, False])
@pytest.mark.parametrize("is_said_first", [True, False])
def test_a_primary_that_saw_its_standbys_term_does_not_go_on_by_the_operators_word(
    tmp_path: Path, *, is_certain: bool, is_said_first: bool
) -> None:
    """It went on without a record of that, beside the standby once its host was back."""
    store, span = Leaving(tmp_path), LeaseSpan(1.0)
    one = protection(store, lambda: True)
    one._stream.is_taken, one._request = False, SimpleNamespace(one_machine=False, is_standbys=bool)
    keeper = one._keeper
    standby = Lease(store, "web", Claimant("b/1", replica="b/1"), span)

    async def main() -> None:
        await keeper.take(None)
        assert await keeper.in_sync("b/1")
        await keeper.hand_over()
        await standby.take()
        if is_said_first:  # while the last answer is on its way
            keeper.continue_alone(is_certain=is_certain)
            assert not keeper.is_refuted
            await keeper._lease.read()
        else:
            assert not await keeper.take_back(bool)
            store.is_away = True
            waiting = asyncio.ensure_future(one._has_term_back())
            await asyncio.wait({waiting}, timeout=0.5)
            assert not waiting.done()
            assert keeper.taken_by == "b/1"
            keeper.continue_alone(is_certain=is_certain)
            async with asyncio.timeout(5):
                assert await waiting is is_certain
        assert await one._has_term_back() is is_certain
        assert await keeper.take_back(bool) is is_certain
        assert await keeper.solo() is is_certain

    asyncio.run(main())


@pytest.mark.parametrize("was_in_sync", [True, False])
def test_a_guest_is_not_ended_for_a_term_that_no_replica_of_it_can_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, was_in_sync: bool
) -> None:
    """Another installation protects its VM of that name with the same etcd: it took the term during
    the first copy, and half a minute later the guest, which only this host had, was killed.
    """
    monkeypatch.setattr(protecting, "GIVEN_UP_S", 0.1)
    store, did = FileStore(tmp_path), list[str]()
    one = protection(store, lambda: True)
    one._request = SimpleNamespace(one_machine=False, is_standbys=lambda holder: holder == "b/1")
    one._stream.is_taken, one._stream.abort = False, lambda: None

    async def killed() -> None:
        did.append("killed")

    async def released() -> None:
        did.append("released")

    one._end_qemu, one._release_guest = killed, released

    async def main() -> ProtectionEnding:
        keeper = one._keeper
        await keeper.take(None)
        if was_in_sync:
            assert await keeper.in_sync("b/1")
        theirs = Lease(store, "web", Claimant("x/9", replica="b/1", succeeds="a/1"), LeaseSpan(1.0))
        await theirs.take(Holding(1, "a/1"))
        if not was_in_sync:
            assert not await keeper.in_sync("b/1")
        ended: ProtectionEnding = await one._settled(ProtectionEnding.REPLACED)
        return ended

    ending = asyncio.run(main())
    assert (ending, did) == (
        (ProtectionEnding.REPLACED, ["killed"])
        if was_in_sync
        else (ProtectionEnding.ALONE, ["released"])
    )
    if not was_in_sync:
        assert "x/9 took the term" in one._why


class Leaving(FileStore):
    """Gives no answer once it `is_away`."""

    is_away = False

    async def read(self, vm: str) -> Versioned | None:
        if self.is_away:
            raise ArbiterDownError("the arbiter is away", why="a test's", remedy="-")
        return await super().read(vm)


@pytest.mark.parametrize(
    ("in_sync", "is_heard", "is_cut", "takes"),
    [
        ("b/1", False, False, True),
        ("b/1", True, False, False),
        ("b/1", True, True, False),  # over the second path alone
        (None, False, False, False),
    ],
)
def test_a_standby_goes_on_without_the_arbiter_when_its_primary_is_said_to_be_dead(
    tmp_path: Path, *, in_sync: str | None, is_heard: bool, is_cut: bool, takes: bool
) -> None:
    """Not where that is heard, nor where it was seen to go on alone: the arbiter went with it."""
    store = Leaving(tmp_path)
    primary = Lease(store, "web", Claimant("a/1"), LeaseSpan(60.0))
    standby = Lease(store, "web", Claimant("b/1", replica="b/1"), LeaseSpan(60.0))
    heard_s = boottime_s() if is_heard else 0.0
    following: Any = SimpleNamespace(heard_s=heard_s, epoch_s=0.0, hello=None, term=1, why="",
        heard_by_path_s=lambda: (heard_s,))  # fmt: skip
    replica: Any = SimpleNamespace(complete=True, is_applying=False, disks=DisksJournal(()))
    request: Any = SimpleNamespace(options=SimpleNamespace(fence=()))

    async def waits() -> str:
        return ""

    async def main() -> None:
        await primary.take()
        if in_sync:
            await primary.record_in_sync(in_sync)
        await standby.read()
        store.is_away = True
        asked = asyncio.Event()
        asked.set()
        taking = TakeOver(request, standby, replica, following, asked, lack=waits)
        receiving: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        if is_cut:
            receiving.set_result(LOST)
        settling = asyncio.ensure_future(taking.settled(receiving))
        await asyncio.wait({settling}, timeout=0.2)
        assert not settling.done()
        assert "is away" in taking.arbiter_fails
        taking.continue_alone()
        await asyncio.wait({settling}, timeout=1.0)
        assert settling.done() is takes
        if takes:
            assert settling.result() is StandbyMove.PROMOTE
        settling.cancel()

    asyncio.run(main())


def test_what_was_said_of_a_primary_counts_for_no_longer_than_the_command_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was heard then, and is cut off hours later."""
    store = Leaving(tmp_path)
    store.is_away = True
    standby = Lease(store, "web", Claimant("b/1", replica="b/1"), LeaseSpan(60.0))
    now_s = [1000.0]
    monkeypatch.setattr(takeover, "boottime_s", lambda: now_s[0])
    following: Any = SimpleNamespace(hello=None, heard_by_path_s=lambda: (1000.0,))
    replica: Any = SimpleNamespace(complete=True, is_applying=False, disks=DisksJournal(()))
    request: Any = SimpleNamespace(options=SimpleNamespace(fence=()))

    async def waits() -> str:
        return ""

    async def main() -> list[StandbyMove]:
        receiving: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        taking = TakeOver(request, standby, replica, following, asyncio.Event(), lack=waits)
        taking.continue_alone()
        moves = []
        for now_s[0] in (1000.0, 1010.0, 5000.0):
            moves.append(await taking._next(receiving))
        return moves

    assert asyncio.run(main()) == [StandbyMove.WAIT, StandbyMove.PROMOTE, StandbyMove.WAIT]


@pytest.mark.parametrize("is_cut", [True, False])
def test_a_standby_without_a_complete_epoch_needs_no_arbiter_to_be_of_no_use(
    tmp_path: Path, *, is_cut: bool
) -> None:
    """Its primary's host was lost in the first copy, and the arbiter with it. It waited for good:
    the name, and the memory, were not free to restore the VM, and `stop` and `failover` named one
    another.
    """
    standby = Lease(Away(tmp_path), "web", Claimant("b/1", replica="b/1"), LeaseSpan(60.0))
    following: Any = SimpleNamespace(
        heard_s=0.0, epoch_s=0.0, hello=None, term=1, why="it was closed",
        heard_by_path_s=lambda: (0.0,), second=SimpleNamespace(diagnosis=lambda _: "-"),
    )  # fmt: skip
    replica: Any = SimpleNamespace(complete=False, is_applying=False, disks=DisksJournal(()))
    request: Any = SimpleNamespace(options=SimpleNamespace(fence=()))

    async def waits() -> str:
        return ""

    async def main() -> StandbyMove:
        taking = TakeOver(request, standby, replica, following, asyncio.Event(), lack=waits)
        receiving: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        if is_cut:
            receiving.set_result(LOST)
        assert taking.is_due(receiving)
        async with asyncio.timeout(2):
            return await taking.settled(receiving)

    assert asyncio.run(main()) is StandbyMove.STALE


@pytest.mark.parametrize("is_settled", ["alone", "off", ""])
def test_a_primary_is_not_dead_whose_host_says_otherwise(
    hosts: Hosts, tmp_path: Path, is_settled: str
) -> None:
    """By its service, or by the recovery of a killed one ("off")."""
    vm, files = protected(hosts, tmp_path)
    if is_settled:
        alone = {"role": "primary", "state": "ended", "ending": is_settled, "run": "1", "why": "-"}
        files.status.write_text(json.dumps(alone))
    with running(vm) as qemu:
        if is_settled:
            qemu.kill()
            qemu.wait()
        with pytest.raises(RefusedError, match="is not dead") as refused:
            asyncio.run(failover("web", hosts, primary_is_dead=True))
        assert "vmckpt replicate stop web" in refused.value.remedy


@pytest.mark.parametrize("is_dead", [True, False])
def test_a_standby_whose_host_is_back_during_a_stop_is_seen(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_dead: bool
) -> None:
    """It could still take over, and the primary, killed, was let go on as if it could not."""
    vm, _ = protected(hosts, tmp_path)
    said = list[bool]()

    async def at_first(name: str, all_hosts: Hosts) -> list[ReplicaSide]:
        return await sides(name, all_hosts[:1])

    async def released(_host: Host, _name: str, *, standby_is_dead: bool) -> dict[str, Any]:
        said.append(standby_is_dead)
        return {}

    monkeypatch.setattr(stopping, "sides", at_first)
    monkeypatch.setattr(stopping, "take_back_term", released)
    words = ["replica", "standby", str(ServiceFiles.of(hosts[1], "web").path), "-"]
    script = "import time; time.sleep(60)"
    with running(vm), subprocess.Popen([sys.executable, "-c", script, *words]) as service:
        with suppress(VmckptError):
            asyncio.run(stop("web", hosts, standby_is_dead=is_dead))
        assert service.poll() is None
        service.kill()
    assert said == [False]


def test_a_recovery_that_waited_for_the_vm_does_nothing_about_its_next_replication(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took the term of that one, whatever its standby did with it."""
    vm, files = protected(hosts, tmp_path)
    record(tmp_path, "a/2", "b/2")

    async def main() -> None:
        request = read_request(files.path)
        anew = json.loads(files.request.read_text()) | {"run": "2"}
        monkeypatch.setattr(recovery, "read_request", lambda _path: request)
        files.request.write_text(json.dumps(anew))
        async with asyncio.timeout(20):
            await recover(files.path, at_any_rate=True, standby_is_dead=True)

    with running(vm):
        asyncio.run(main())
    assert vm.directory.claim.exists()
    found = asyncio.run(FileStore(tmp_path / "leases").read("web"))
    assert found is not None
    assert found.record.holder == "a/2"


def test_a_recovery_outlives_a_host_without_free_descriptors(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looked for an operator's process, was not told, and ended: the guest stayed paused."""
    vm, files = protected(hosts, tmp_path)
    broken(tmp_path)
    looks = list[str]()

    async def unknown(_host: Host, mark: str) -> list[ProcessId]:
        looks.append(mark)
        raise OutcomeUnknownError("cannot tell", why="Too many open files", remedy="-")

    async def unread(_host: Host, _path: Path) -> str | None:
        raise OSError(errno.ENFILE, "Too many open files in system")

    async def main() -> None:
        waiting = asyncio.ensure_future(recover(files.path))
        await asyncio.wait({waiting}, timeout=0.5)
        monkeypatch.setattr(LocalHost, "find_processes", unknown)
        monkeypatch.setattr(LocalHost, "read_text", unread)
        await asyncio.wait({waiting}, timeout=1.5)
        assert not waiting.done()
        waiting.cancel()

    with running(vm):
        asyncio.run(main())
    assert looks


def test_a_release_that_another_was_quicker_with_does_not_wait_for_the_arbiter(
    hosts: Hosts, tmp_path: Path
) -> None:
    """It kept the VM's lock: after two operators' `stop` the VM was busy for good."""
    _, files = protected(hosts, tmp_path)
    broken(tmp_path)

    async def main() -> None:
        waiting = asyncio.ensure_future(recover(files.path, at_any_rate=True))
        await asyncio.wait({waiting}, timeout=0.5)
        assert not waiting.done()
        off = {"role": "primary", "state": "ended", "ending": "off", "run": "1", "why": "-"}
        files.status.write_text(json.dumps(off))
        async with asyncio.timeout(20):
            await waiting

    asyncio.run(main())
