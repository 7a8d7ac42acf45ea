"""Dead ends of a protection that tests/replication_model found: nothing brought the VM back."""

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.contract.test_replication_claim import replaced
from tests.contract.test_replication_leftovers import home, record, requested, stands
from tests.faulty_host import FaultyHost, silence
from tests.waiting import eventually
from vmckpt.drivers.direct import DirectVm
from vmckpt.errors import (
    HostDownError,
    NotFoundError,
    OperationFailedError,
    OutcomeUnknownError,
    RefusedError,
)
from vmckpt.hosts.host import Host
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes.process import find_by_argument, identify
from vmckpt.lease.clock import boottime_s
from vmckpt.lease.file_store import FileStore
from vmckpt.lease.lease import Lease
from vmckpt.lease.record import LeaseRecord, LeaseSpan
from vmckpt.lease.rule import Claimant, Holding
from vmckpt.lease.store import Versioned
from vmckpt.memory.ram_file import open_fd
from vmckpt.migrate.steps.prepare import write_down
from vmckpt.options import replication
from vmckpt.options.migration import MigrationOptions
from vmckpt.qemu import commands
from vmckpt.qemu.monitor import CommandRefusedError, MonitorLostError
from vmckpt.qemu.replies import RunState
from vmckpt.replicate import recovery
from vmckpt.replicate.control import answering
from vmckpt.replicate.operator import stop as stopping
from vmckpt.replicate.operator import terms
from vmckpt.replicate.operator.begin import _require_new, start
from vmckpt.replicate.operator.leftovers import remove_taken_over
from vmckpt.replicate.operator.operate import require_decided, settle
from vmckpt.replicate.operator.stop import stop
from vmckpt.replicate.primary import epochs, primary, protection
from vmckpt.replicate.primary.claim import Claim, ClaimAnswer, ask_about, take_anew
from vmckpt.replicate.primary.ending import ProtectionEnding
from vmckpt.replicate.primary.epochs import Epochs
from vmckpt.replicate.primary.protection import Protection
from vmckpt.replicate.primary.stream import StandbyLostError
from vmckpt.replicate.recovery import recover
from vmckpt.replicate.request import ServiceFiles, read_request
from vmckpt.replicate.standby.standby import Standby
from vmckpt.replicate.status import ReplicaStatus, Role
from vmckpt.vm.identity import new_identity
from vmckpt.vm.inventory import Vm, read_vm
from vmckpt.vm.paths import lock_path, vm_dir
from vmckpt.vm.record import Replaced
from vmckpt.vm.start import sweep

Hosts = tuple[LocalHost, LocalHost]
ENDED = {"role": "standby", "state": "ended", "run": "1", "why": "-"}


@pytest.fixture
def hosts(tmp_path: Path) -> Hosts:
    return LocalHost("a", tmp_path / "a", "127.0.0.1"), LocalHost("b", tmp_path / "b", "127.0.0.1")


def protected(hosts: Hosts, tmp_path: Path) -> tuple[Vm, ServiceFiles]:
    """A home with its claim, and both services' files."""
    vm, files = home(hosts[0], "old"), requested(hosts, tmp_path)
    Claim("web", "a/1", "b", str(tmp_path / "leases")).write(vm.directory.claim)
    return vm, files


def elsewhere(files: ServiceFiles) -> None:
    """Its hosts are two machines: this one does not know what the other has."""
    request = json.loads(files.request.read_text())
    files.request.write_text(json.dumps(request | {"one_machine": False}))


class Lost(FileStore):
    """Of one change no answer comes: it was not made."""

    is_lost = False

    async def replace(self, vm: str, record: LeaseRecord, *, over: int) -> Versioned:
        if self.is_lost:
            self.is_lost = False
            raise OutcomeUnknownError("no answer", why="it was lost", remedy="-")
        return await super().replace(vm, record, over=over)


def test_a_standby_that_cannot_go_on_gives_its_term_up_though_it_once_got_no_answer(
    hosts: Hosts, tmp_path: Path
) -> None:
    """It waited for the outcome of a question that was never put, and ended with the term."""
    files = requested(hosts, tmp_path)
    record(tmp_path, "a/1", "b/1", released=True)
    store = Lost(tmp_path / "leases")
    service: Any = Standby.__new__(Standby)
    service._request = read_request(files.path)
    service._lease = Lease(store, "web", Claimant("b/1", replica="b/1"), LeaseSpan(0.1))

    async def main() -> None:
        await service._lease.take()
        store.is_lost = True
        with pytest.raises(OutcomeUnknownError):
            await service._lease.give_up()
        async with asyncio.timeout(5):
            await service._give_up_term()

    asyncio.run(main())
    assert stands(tmp_path).released


def test_a_stop_goes_by_how_the_services_ended_not_by_what_they_said_before(
    hosts: Hosts, tmp_path: Path
) -> None:
    """Its QEMU died as it was asked to stop: its term stayed the standby's, which was gone."""
    vm, files = protected(hosts, tmp_path)
    record(tmp_path, "a/1", "b/1", released=True)
    ServiceFiles.of(hosts[1], "web").status.write_text(json.dumps(ENDED))

    async def answer(word: str) -> ReplicaStatus:
        told = {"role": "primary", "state": "protected", "run": "1", "why": "-"}
        if word == "stop":
            told |= {"state": "ended", "ending": "yours"}
            files.status.write_text(json.dumps(told))
        return ReplicaStatus.from_json(told)

    async def main() -> None:
        async with answering(files.control, answer):
            await stop("web", hosts)
        await require_decided(vm)

    asyncio.run(main())
    assert (stands(tmp_path).holder, stands(tmp_path).in_sync) == ("a/1/recovery", None)
    assert not vm.directory.claim.exists()


def test_a_stop_has_a_standby_give_up_the_term_that_it_ended_with(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The primary's host waited for it, then took the guest for the standby's."""
    vm, files = protected(hosts, tmp_path)
    record(tmp_path, "b/1", None)
    left = {"role": "primary", "state": "ended", "run": "1", "ending": "yours", "why": "-"}
    files.status.write_text(json.dumps(left))
    ServiceFiles.of(hosts[1], "web").status.write_text(json.dumps(ENDED))
    monkeypatch.setattr("vmckpt.replicate.operator.sides.BEGIN_S", 10.0)
    asyncio.run(stop("web", hosts))
    assert stands(tmp_path).holder == "a/1/recovery"
    asyncio.run(require_decided(vm))


def test_the_only_home_is_kept_when_nobody_knows_whether_the_standby_has_the_guest(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The standby took the term and its host died; the VM was gone from both."""
    vm, files = protected(hosts, tmp_path)
    elsewhere(files)
    record(tmp_path, "b/1", None)
    monkeypatch.setattr(recovery, "GIVEN_UP_S", 0.2)
    asyncio.run(recover(files.path, at_any_rate=True))
    assert json.loads(files.status.read_text())["ending"] == "replaced"
    assert asyncio.run(read_vm(hosts[0], "web")) is not None
    with pytest.raises(RefusedError, match="may run on b") as refused:
        asyncio.run(require_decided(vm))
    assert "if no other host has it: vmckpt replicate stop web." in refused.value.remedy


def test_a_stop_that_does_not_free_the_vm_says_so_and_can_be_said_again(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It removed what `stop --standby-is-dead` needs."""
    vm, files = protected(hosts, tmp_path)
    record(tmp_path, "b/1", None)

    async def released(_host: Host, _name: str, *, standby_is_dead: bool) -> ReplicaStatus:
        assert not standby_is_dead
        return ReplicaStatus(role=Role.PRIMARY, state="ended", ending="replaced", why="-")

    with monkeypatch.context() as patch:
        patch.setattr(stopping, "take_back_term", released)
        with pytest.raises(RefusedError, match="may run on b"):
            asyncio.run(stop("web", hosts[:1]))
    assert files.request.exists()
    asyncio.run(stop("web", hosts[:1], standby_is_dead=True))
    asyncio.run(require_decided(vm))


def test_a_stop_lets_a_killed_primarys_guest_go_whatever_an_older_host_still_has(
    hosts: Hosts, tmp_path: Path
) -> None:
    """The host from which it was taken over is back, with what it had: no place of the guest."""
    old, new = LocalHost("o", tmp_path / "o", "127.0.0.1"), hosts[0]
    requested(hosts, tmp_path)
    vm = home(new, "old", Replaced("o", "older"))
    Claim("web", "a/1", "b", str(tmp_path / "leases")).write(vm.directory.claim)
    stale = home(old, "older")
    Claim("web", "o/0", "a", str(tmp_path / "leases")).write(stale.directory.claim)
    record(tmp_path, "a/1", None)
    asyncio.run(stop("web", (old, *hosts)))
    assert stands(tmp_path).holder == "a/1/recovery"
    assert asyncio.run(read_vm(old, "web")) is None
    asyncio.run(require_decided(vm))


def test_a_stop_takes_no_term_for_a_host_that_has_nothing_of_the_vm(
    hosts: Hosts, tmp_path: Path
) -> None:
    """The standby, which is off, has the only home: it is to have its right when it is back."""
    files = requested(hosts, tmp_path)
    left = {"role": "primary", "state": "ended", "run": "1", "ending": "yours", "why": "-"}
    files.status.write_text(json.dumps(left | {"standby": "b"}))
    record(tmp_path, "b/1", None)
    silent = FaultyHost("b", tmp_path / "b", "127.0.0.1", faults=silence())
    asyncio.run(stop("web", (hosts[0], silent), standby_is_dead=True))
    assert stands(tmp_path).holder == "b/1"
    assert not files.path.exists()


def test_a_stop_removes_what_was_taken_over_from(hosts: Hosts, tmp_path: Path) -> None:
    """The standby took over meanwhile; its host was lost later, and the old one could not start."""
    replaced(hosts, tmp_path)
    record(tmp_path, "b/1", None)
    found = home(hosts[1], "new")
    ServiceFiles.of(hosts[1], "web").status.write_text(json.dumps(promoted_on(hosts[1], "new")))
    asyncio.run(stop("web", hosts))
    assert asyncio.run(read_vm(hosts[0], "web")) is None
    assert asyncio.run(read_vm(found.host, "web")) is not None


@pytest.mark.parametrize("has_said_so", [True, False])
def test_of_two_homes_the_one_that_lost_its_term_goes_whatever_became_of_the_other(
    hosts: Hosts, tmp_path: Path, *, has_said_so: bool
) -> None:
    """That was started again, and did not say any longer which one it had replaced.

    Or it had said so, of another QEMU.
    """
    stale = home(hosts[0], "old")
    Claim("web", "a/1", "b", str(tmp_path / "leases")).write(stale.directory.claim)
    home(hosts[1], "newer")
    record(tmp_path, "a/1", "b/1")
    assert not asyncio.run(settle("web", hosts))  # it may still be the one that is to run
    store = FileStore(tmp_path / "leases")
    asyncio.run(store.replace("web", LeaseRecord(2, "b/1", 1, LeaseSpan(0.1)), over=1))
    if has_said_so:
        requested(hosts, tmp_path)
        word = promoted_on(hosts[1], "newer") | {"primary_qemu_id": "older"}
        ServiceFiles.of(hosts[1], "web").status.write_text(json.dumps(word))
    assert asyncio.run(settle("web", hosts))
    assert asyncio.run(read_vm(hosts[0], "web")) is None
    assert asyncio.run(read_vm(hosts[1], "web")) is not None


@pytest.mark.parametrize("how", ["another VM", "all lost it"])
def test_a_home_is_not_removed_for_one_that_may_not_be_newer(
    hosts: Hosts, tmp_path: Path, how: str
) -> None:
    """Another VM of that name, or two homes that a third host has taken the term from."""
    vms = [home(host, f"qemu-{host.name}") for host in hosts]
    record(tmp_path, "c/3", None)
    for vm in vms if how == "all lost it" else vms[:1]:
        holder = f"{vm.host.name}/1"
        Claim("web", holder, "c", str(tmp_path / "leases")).write(vm.directory.claim)
    if how == "another VM":
        for vm in vms:
            vm.directory.identity.write_text(f"{new_identity()}\n")
    assert not asyncio.run(settle("web", hosts))
    assert all(asyncio.run(read_vm(host, "web")) is not None for host in hosts)


def test_a_vm_that_was_started_anew_meanwhile_is_not_protected_under_its_old_name(
    hosts: Hosts, tmp_path: Path
) -> None:
    """Its standby would have replaced a QEMU that was none, and both homes would have stayed."""
    request = read_request(requested(hosts, tmp_path).path)
    primary._require_same_qemu(request, home(hosts[0], "old"))
    with pytest.raises(RefusedError, match="another QEMU"):
        primary._require_same_qemu(request, home(hosts[1], "new"))


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_qemu_that_its_guard_held_is_let_go_when_the_guard_is_dead(*, is_killed: bool) -> None:
    """The guest was paused for good: nothing else sends SIGCONT."""
    service: Any = Protection.__new__(Protection)
    service._keeper = SimpleNamespace(must_stop=lambda: False, has_guard=not is_killed)
    with subprocess.Popen(["sleep", "60"]) as qemu:
        try:
            with open_fd(os.pidfd_open(qemu.pid)) as pidfd:
                service._handles = SimpleNamespace(pidfd=pidfd)
                _hold(qemu)
                asyncio.run(_for_a_moment(service._stop_without_right()))
            assert (_state(qemu.pid) == "T") is not is_killed
        finally:
            qemu.kill()


def test_a_hand_over_without_anything_that_keeps_the_lease_ends() -> None:
    """The guard had died while the guest was paused: nothing renewed the lease it waited for."""
    service: Any = Protection.__new__(Protection)
    service._keeper = SimpleNamespace(replaced=asyncio.Event())

    async def none(_replica: str, *, resume_guest: bool) -> bool:
        await asyncio.sleep(0.01)
        return resume_guest

    service._epochs = SimpleNamespace(one=none, stands_still="")
    service._replica, service._requested = "b/1", ProtectionEnding.YOURS

    async def main() -> None:
        async with asyncio.timeout(5):
            ended: asyncio.Task[None] = asyncio.ensure_future(asyncio.sleep(0))
            going_on: asyncio.Task[None] = asyncio.ensure_future(asyncio.sleep(60))
            with pytest.raises(StandbyLostError):
                await service._hand_over([going_on, ended])
            going_on.cancel()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("state", "refusals"), [("internal-error", math.inf), ("paused", 3), ("postmigrate", 3)]
)
def test_a_guest_that_qemu_does_not_let_run_keeps_no_protection_from_its_end(
    monkeypatch: pytest.MonkeyPatch, state: str, refusals: float
) -> None:
    """The service broke off, with its claim and without a last word, and `stop` had no answer. One
    that an epoch has stopped runs as soon as it can: something else may have its disk locked.
    """
    service: Any = Protection.__new__(Protection)
    did, left = list[str](), [refusals]

    async def done() -> None:
        did.append("output")

    async def reopen() -> None:
        """It is open."""

    async def resume() -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise CommandRefusedError("web", "cont", "Resetting the Virtual Machine is required")
        did.append("runs")

    async def status(_monitor: object) -> RunState:
        return RunState(state, running=False)

    monkeypatch.setattr(commands, "query_status", status)
    monkeypatch.setattr(protection, "RETRY_S", 0.001)
    service._keeper = SimpleNamespace(free=lambda: None)
    intake = SimpleNamespace(drop=lambda: None)
    service._handles = SimpleNamespace(
        mirrors=SimpleNamespace(intake=intake), output=SimpleNamespace(release_all=done),
        capture=SimpleNamespace(resume=resume),
    )  # fmt: skip
    service._monitor, service._qemu_lives = SimpleNamespace(reopen=reopen), lambda: True

    async def main() -> None:
        async with asyncio.timeout(5):
            await service._release_guest()

    asyncio.run(main())
    assert did[0] == "output"
    assert ("runs" in did) == (state != "internal-error")


@pytest.mark.parametrize(
    ("is_replaced", "why", "silent_s", "is_ended"),
    [
        (True, "the connection has ended", 60.0, True),
        (False, "the connection has ended", 0.0, False),
        # Its host has lost its power: no one says so.
        (False, "", 3.0, False),
        (False, "", 0.0, True),
    ],
)
def test_a_silent_qemu_is_ended_when_its_standby_goes_on_with_the_guest(
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_replaced: bool,
    why: str,
    silent_s: float,
    is_ended: bool,
) -> None:
    """Also when that has the term though it is lost: a QEMU that its guard holds, since it may not
    run, never answers, and the service never ended.
    """

    async def silent(_monitor: object, _timeout_s: float) -> None:
        raise MonitorLostError("silent", why="a test's", remedy="-")

    monkeypatch.setattr(commands, "query_status", silent)
    monkeypatch.setattr(epochs, "POLL_S", 0.001)
    one = _epochs(is_replaced=is_replaced, why=why, silent_s=silent_s)
    with _sleeping() as qemu, open_fd(os.pidfd_open(qemu.pid)) as pidfd:
        one._pidfd = pidfd
        asyncio.run(_for_a_moment(one._kill_when_silent()))
        if not is_ended:
            _spare(qemu)
        assert qemu.wait(10) == -signal.SIGKILL


@pytest.mark.parametrize(("silent_s", "is_open"), [(3.0, True), (3.0, False), (0.0, True)])
def test_a_qemu_that_answers_nothing_is_not_ended_for_a_standby_that_is_lost(
    silent_s: float, *, is_open: bool
) -> None:
    """It hung for longer than any command waits (its storage did), and was killed for a standby
    that was dead: the guest was lost. One that closes its monitor is about to end.
    """
    one: Any = Protection.__new__(Protection)
    one._epochs = _epochs(is_replaced=False, why="", silent_s=silent_s)
    one._monitor = SimpleNamespace(is_open=is_open)
    one._keeper = SimpleNamespace(give_up=_nothing)
    one._stream = SimpleNamespace(end=_nothing)
    with _sleeping() as qemu, open_fd(os.pidfd_open(qemu.pid)) as pidfd:
        itself = identify(qemu.pid)
        host = LocalHost("a", Path("/nowhere"), "127.0.0.1")
        vm = SimpleNamespace(qemu=SimpleNamespace(process=itself), host=host)
        one._vm, one._handles = vm, SimpleNamespace(pidfd=pidfd)
        if silent_s and is_open:
            with pytest.raises(StandbyLostError):
                asyncio.run(one._qemu_gone(is_off=False))
            _spare(qemu)
        else:
            assert asyncio.run(one._qemu_gone(is_off=False)) is ProtectionEnding.YOURS
        assert qemu.wait(10) == -signal.SIGKILL


def _epochs(*, is_replaced: bool, why: str, silent_s: float) -> Any:
    replaced_ = asyncio.Event()
    if is_replaced:
        replaced_.set()
    one: Any = Epochs.__new__(Epochs)
    heard_s = boottime_s() - silent_s
    one._monitor, one._stream = None, SimpleNamespace(why=why, heard_s=heard_s)
    one._keeper = SimpleNamespace(replaced=replaced_, is_silent=lambda: False)
    one.is_safe = True
    return one


def _sleeping() -> "subprocess.Popen[bytes]":
    return subprocess.Popen(["sleep", "60"])


def _spare(qemu: "subprocess.Popen[bytes]") -> None:
    """It was not killed; now it is."""
    with pytest.raises(subprocess.TimeoutExpired):
        qemu.wait(0.3)
    qemu.kill()


async def _nothing(*_: Any) -> None:
    pass


async def _for_a_moment(work: Any) -> None:
    task = asyncio.ensure_future(work)
    await asyncio.wait({task}, timeout=0.3)
    task.cancel()


def _hold(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGSTOP)
    while _state(process.pid) != "T":
        time.sleep(0.01)


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_recovery_lets_go_of_a_qemu_that_a_guard_held(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vm, files = protected(hosts, tmp_path)
    record(tmp_path, "a/1", "b/1")
    freed = list[str]()

    async def free(_vm: Vm, _files: ServiceFiles) -> None:
        freed.append(_state(qemu.pid))

    monkeypatch.setattr(recovery, "_free", free)
    with subprocess.Popen(["sleep", "60"]) as qemu:
        itself = identify(qemu.pid)
        assert itself is not None
        vm.directory.current.write_text(vm.qemu._replace(process=itself).to_json())
        _hold(qemu)
        asyncio.run(recover(files.path))
        qemu.kill()
    assert freed != ["T"]


def test_a_recovery_tries_again_while_qemu_does_not_answer(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another client had its monitor for some seconds, and the guest's output was held for good."""
    vm, files = protected(hosts, tmp_path)
    record(tmp_path, "a/1", "b/1")
    tries = list[str]()

    async def free(_vm: Vm, _files: ServiceFiles) -> None:
        tries.append(str(await hosts[0].lock_owner(lock_path(hosts[0].state_dir, "web"))))
        if len(tries) < 3:
            raise MonitorLostError("the monitor of web is silent", why="no greeting", remedy="-")

    async def main() -> None:
        recovering, was_free = asyncio.ensure_future(recover(files.path)), False
        while not recovering.done():
            was_free |= await hosts[0].lock_owner(lock_path(hosts[0].state_dir, "web")) is None
            await asyncio.wait({recovering}, timeout=0.02)
        await recovering
        assert was_free  # others may work on the VM between two tries

    monkeypatch.setattr(recovery, "_free", free)
    monkeypatch.setattr(recovery, "AGAIN_S", 0.2)
    with subprocess.Popen(["sleep", "60"]) as qemu:
        itself = identify(qemu.pid)
        assert itself is not None
        vm.directory.current.write_text(vm.qemu._replace(process=itself).to_json())
        asyncio.run(main())
        qemu.kill()
    assert len(tries) == 3
    assert json.loads(files.status.read_text())["ending"] == "alone"


def promoted_on(host: Host, qemu_id: str) -> dict[str, Any]:
    """The last word of a standby there that has the guest."""
    return ENDED | {
        "state": "promoted",
        "primary": "a",
        "standby": host.name,
        "qemu_id": qemu_id,
        "primary_qemu_id": "old",
    }


def taken_over(hosts: Hosts, tmp_path: Path) -> Vm:
    """A VM that its standby on b took over from a, and which is off there."""
    requested(hosts, tmp_path)
    vm = home(hosts[1], "new")
    vm.directory.taken_over.write_text("1")
    ServiceFiles.of(hosts[1], "web").status.write_text(json.dumps(promoted_on(hosts[1], "new")))
    record(tmp_path, "b/1", None)
    return vm


def robbed(tmp_path: Path) -> None:
    """`stop --standby-is-dead` on a, while b was off."""
    taken = LeaseRecord(2, "a/1/recovery", 1, LeaseSpan(0.1))
    asyncio.run(FileStore(tmp_path / "leases").replace("web", taken, over=1))


def test_a_home_that_took_over_is_not_started_once_its_term_was_taken_from_it(
    hosts: Hosts, tmp_path: Path
) -> None:
    """Its host was off, and the operator said so; what it had was a second guest afterwards."""
    vm = taken_over(hosts, tmp_path)
    for _ in "twice":
        asyncio.run(require_decided(vm))
    vm.directory.current.write_text(vm.qemu.to_json().replace("new", "started-again"))
    robbed(tmp_path)
    elsewhere_, offline = (
        LocalHost("c", tmp_path / "c", "127.0.0.1"),
        MigrationOptions(offline=True),
    )
    for begun in (
        lambda: DirectVm(vm).start(),
        lambda: DirectVm(vm).migrate(elsewhere_, offline, lambda _: None),
        lambda: start(vm, elsewhere_, replication.ReplicationOptions("/leases"), "2"),
    ):
        with pytest.raises(RefusedError, match="may run on a"):
            asyncio.run(begun())


def test_without_the_arbiters_word_a_home_that_took_over_is_not_started(
    hosts: Hosts, tmp_path: Path
) -> None:
    vm = taken_over(hosts, tmp_path)
    (tmp_path / "leases").rename(tmp_path / "not mounted")
    with pytest.raises(RefusedError, match="no record"):
        asyncio.run(require_decided(vm))
    asyncio.run(stop("web", hosts))  # both answer: it is nowhere else
    asyncio.run(require_decided(vm))


def test_a_stop_does_not_free_a_twin_while_the_other_host_is_silent(
    hosts: Hosts, tmp_path: Path
) -> None:
    vm = taken_over(hosts, tmp_path)
    robbed(tmp_path)
    silent = FaultyHost("a", tmp_path / "a", "127.0.0.1", faults=silence())
    with pytest.raises(RefusedError, match="may run on a") as refused:
        asyncio.run(stop("web", (silent, hosts[1])))
    assert "--standby-is-dead" in refused.value.remedy
    asyncio.run(stop("web", hosts))
    asyncio.run(require_decided(vm))


def test_a_home_that_took_over_asks_after_a_stop_too_while_the_other_host_is_silent(
    hosts: Hosts, tmp_path: Path
) -> None:
    """Later it is off itself, and the operator says so: the older home on the other goes on."""
    vm = taken_over(hosts, tmp_path)
    silent = FaultyHost("a", tmp_path / "a", "127.0.0.1", faults=silence())
    asyncio.run(stop("web", (silent, hosts[1])))
    asyncio.run(require_decided(vm))
    robbed(tmp_path)
    with pytest.raises(RefusedError, match="may run on a"):
        asyncio.run(require_decided(vm))


def test_so_it_does_when_the_operator_says_that_the_other_host_is_dead_which_is_back_later(
    hosts: Hosts, tmp_path: Path
) -> None:
    """Nothing would tell the two homes apart, once the other has got the term in turn."""
    vm = taken_over(hosts, tmp_path)
    silent = FaultyHost("a", tmp_path / "a", "127.0.0.1", faults=silence())
    asyncio.run(stop("web", (silent, hosts[1]), standby_is_dead=True))
    asyncio.run(require_decided(vm))
    robbed(tmp_path)
    with pytest.raises(RefusedError, match="may run on a"):
        asyncio.run(require_decided(vm))
    # That is the operator's to say: then it is free, without the arbiter.
    asyncio.run(stop("web", (silent, hosts[1]), standby_is_dead=True))
    asyncio.run(require_decided(vm))


def test_a_home_that_took_over_has_a_term_of_its_own_before_it_has_nothing_to_ask_by(
    hosts: Hosts, tmp_path: Path
) -> None:
    """A protection that does not begin has removed what its standby left, and changed no term."""
    vm = taken_over(hosts, tmp_path)
    third = LocalHost("c", tmp_path / "c", "127.0.0.1")
    for _ in "twice":  # the command may be killed between the two steps
        files = ServiceFiles.of(hosts[1], "web")
        asyncio.run(take_anew(files.path))
        assert stands(tmp_path).holder == "b/after-1"
        asyncio.run(require_decided(vm))
    asyncio.run(_require_new(vm, third))
    assert not files.path.exists()
    # The older home is not given the term any longer.
    older = ServiceFiles.of(hosts[0], "web")
    with pytest.raises(RefusedError, match="not a's to take back"):
        asyncio.run(recover(older.path, at_any_rate=True, standby_is_dead=True))
    asyncio.run(require_decided(vm))


@pytest.mark.parametrize("is_robbed", [True, False])
def test_what_a_standby_left_stays_until_its_host_has_a_term_of_its_own(
    hosts: Hosts, tmp_path: Path, *, is_robbed: bool
) -> None:
    vm = taken_over(hosts, tmp_path)
    third, files = LocalHost("c", tmp_path / "c", "127.0.0.1"), ServiceFiles.of(hosts[1], "web")
    if is_robbed:
        robbed(tmp_path)
        with pytest.raises(OperationFailedError, match="cannot be protected"):
            asyncio.run(_require_new(vm, third))
    else:
        asyncio.run(_require_new(vm, third))
        assert stands(tmp_path).holder == "b/after-1"
    assert files.path.exists() == is_robbed


def test_of_a_home_that_took_over_nothing_is_left_to_ask_when_no_host_is_silent(
    hosts: Hosts, tmp_path: Path
) -> None:
    vm = taken_over(hosts, tmp_path)
    silent = FaultyHost("a", tmp_path / "a", "127.0.0.1", faults=silence())
    asyncio.run(stop("web", (silent, hosts[1])))
    asyncio.run(stop("web", hosts))
    assert not ServiceFiles.of(hosts[1], "web").path.exists()
    (tmp_path / "leases").rename(tmp_path / "not mounted")
    asyncio.run(require_decided(vm))


def test_a_twin_whose_term_was_taken_goes_when_the_other_home_is_seen(
    hosts: Hosts, tmp_path: Path
) -> None:
    taken_over(hosts, tmp_path)
    robbed(tmp_path)
    home(hosts[0], "started-again")
    assert asyncio.run(settle("web", hosts))
    assert asyncio.run(read_vm(hosts[0], "web")) is not None
    assert asyncio.run(read_vm(hosts[1], "web")) is None


def test_a_home_that_a_stop_gave_the_term_stays_for_a_host_that_is_back_meanwhile(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was removed for the one that had lost its term, and a third, older home was left beside
    that: nothing told the two apart.
    """
    vm = replaced(hosts, tmp_path, "yours")
    record(tmp_path, "b/1", None)
    home(hosts[1], "new", Replaced("a", "old"))
    ServiceFiles.of(hosts[1], "web").status.write_text(json.dumps(promoted_on(hosts[1], "new")))
    older = LocalHost("o", tmp_path / "o", "127.0.0.1")
    stale = home(older, "older")
    Claim("web", "o/0", "a", str(tmp_path / "leases")).write(stale.directory.claim)
    said: list[ReplicaStatus] = []
    until_then = tuple(replace(one, of=lambda *_, **__: not said) for one in silence())
    back = FaultyHost("b", tmp_path / "b", "127.0.0.1", faults=until_then)
    release = terms.take_back_term

    async def released(*args: Any, **kwargs: Any) -> ReplicaStatus:
        said.append(await release(*args, **kwargs))
        return said[0]

    monkeypatch.setattr(stopping, "take_back_term", released)
    asyncio.run(stop("web", (hosts[0], back), standby_is_dead=True))
    assert stands(tmp_path).holder == "a/1/recovery"
    asyncio.run(settle("web", (*hosts, older)))
    homes = [asyncio.run(read_vm(host, "web")) is not None for host in (*hosts, older)]
    assert homes == [True, False, False]
    asyncio.run(require_decided(vm))


def test_a_home_that_a_stop_is_just_giving_the_term_stays(hosts: Hosts, tmp_path: Path) -> None:
    """It has the term, and has not said so yet: `keep` removed it with its guest."""
    vm = replaced(hosts, tmp_path, "yours")
    record(tmp_path, "a/1/recovery", None)
    home(hosts[1], "new", Replaced("a", "old"))
    ServiceFiles.of(hosts[1], "web").status.write_text(json.dumps(promoted_on(hosts[1], "new")))
    words = ["replica", "release", str(ServiceFiles.of(hosts[0], "web").path), "--standby-is-dead"]
    argv = [sys.executable, "-c", "input()", *words]
    with subprocess.Popen(argv, stdin=subprocess.PIPE) as release:
        eventually(lambda: find_by_argument("\0".join([*words, ""])))
        assert not asyncio.run(remove_taken_over(hosts[0], "web", "old", hosts[1]))
        assert vm.directory.path.exists()
        release.kill()
    assert asyncio.run(remove_taken_over(hosts[0], "web", "old", hosts[1]))
    assert not vm.directory.path.exists()


@pytest.mark.parametrize("without_arbiter", ["a", "b"])
def test_a_takeover_counts_for_a_home_that_the_arbiter_did_not_give_the_term(
    hosts: Hosts, tmp_path: Path, without_arbiter: str
) -> None:
    """The old home was freed by the operator's word alone; or so was the takeover."""
    vm = replaced(hosts, tmp_path, "alone")
    vm.directory.claim.unlink()
    new = home(hosts[1], "new", Replaced("a", "old"))
    freed = {"a": vm, "b": new}[without_arbiter]
    freed.directory.gone_replica.write_text("b/1")
    assert asyncio.run(settle("web", hosts))
    assert asyncio.run(read_vm(hosts[0], "web")) is None
    assert asyncio.run(read_vm(hosts[1], "web")) is not None


@pytest.mark.parametrize("has_record", [True, False])
def test_a_home_that_is_freed_without_the_arbiters_record_is_marked(
    hosts: Hosts, tmp_path: Path, *, has_record: bool
) -> None:
    """An arbiter that has forgotten the VM gives no term; one that gives it ends the mark."""
    vm, files = protected(hosts, tmp_path)
    (tmp_path / "leases").mkdir()
    if has_record:
        record(tmp_path, "b/1", None)
        vm.directory.gone_replica.write_text("b/1")  # by a command before
    asyncio.run(recover(files.path, at_any_rate=True, standby_is_dead=True))
    assert json.loads(files.status.read_text())["ending"] == "off"
    assert vm.directory.gone_replica.exists() != has_record


def test_a_vm_whose_last_replication_left_nothing_can_be_protected_again(
    hosts: Hosts, tmp_path: Path
) -> None:
    """Both its hosts were lost, and it was restored on c: the arbiter listed the standby for good,
    `start` named `stop`, and that found nothing.
    """
    record(tmp_path, "a/1", "b/1")
    third = LocalHost("c", tmp_path / "c", "127.0.0.1")
    vm = home(third, "restored")
    lost = [FaultyHost(name, tmp_path / name, "127.0.0.1", faults=silence()) for name in "ab"]
    entitled = primary._entitled(read_request(requested((third, hosts[0]), tmp_path).path), vm)
    with pytest.raises(RefusedError, match="protected already") as refused:
        asyncio.run(entitled)
    assert "--standby-is-dead" in refused.value.remedy
    request = read_request(ServiceFiles.of(third, "web").path)
    asyncio.run(third.remove(ServiceFiles.of(third, "web").path))  # as the failed `start` does
    with pytest.raises(HostDownError):
        asyncio.run(stop("web", (*lost, third)))
    last = asyncio.run(stop("web", (*lost, third), standby_is_dead=True))
    assert last is not None
    assert "b/1, which the arbiter still lists, is ignored" in str(last.why)
    asyncio.run(primary._entitled(request, vm))
    with pytest.raises(HostDownError):
        asyncio.run(stop("web", (*lost, third), standby_is_dead=True))


@pytest.mark.parametrize("is_left", [True, False])
def test_a_stop_removes_nothing_of_a_protection_that_began_meanwhile(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_left: bool
) -> None:
    """By `keep`, which sees the VM unprotected as soon as its services have ended: the new ones
    went on without their files, no command found them, and the VM stayed busy.
    """
    vm, files = home(hosts[0], "old"), requested(hosts, tmp_path)
    record(tmp_path, "a/2", None)
    ended = {"role": "primary", "state": "ended", "run": "1", "ending": "stopped", "why": "-"}
    files.status.write_text(json.dumps(ended))
    if is_left:  # its own claim, whose removal failed
        Claim("web", "a/1", "b", str(tmp_path / "leases")).write(vm.directory.claim)
    anew = Claim("web", "a/2", "b", str(tmp_path / "leases"))

    async def asked(vm: Vm) -> ClaimAnswer | None:
        answer = await ask_about(vm)
        for host in hosts:
            request = ServiceFiles.of(host, "web").request
            request.write_text(json.dumps(json.loads(request.read_text()) | {"run": "2"}))
        anew.write(vm.directory.claim)
        return answer

    monkeypatch.setattr(stopping, "ask_about", asked)
    asyncio.run(stop("web", hosts))
    assert [ServiceFiles.of(host, "web").request.exists() for host in hosts] == [True, True]
    assert Claim.read(vm.directory.claim) == anew


def test_what_is_known_of_a_lost_replica_moves_with_the_vm(hosts: Hosts, tmp_path: Path) -> None:
    """The arbiter was silent when its protection ended. Where it was migrated to afterwards, it
    could not be protected any more once the arbiter was back.
    """
    vm = home(hosts[0], "old")
    vm.directory.gone_replica.write_text("b/1")
    third = LocalHost("c", tmp_path / "c", "127.0.0.1")
    pair: Any = SimpleNamespace(destination=SimpleNamespace(host=third))
    there = vm_dir(third.state_dir, "web")
    there.path.mkdir(parents=True)
    asyncio.run(write_down(vm, pair))
    assert there.gone_replica.read_text() == "b/1"
    # What a migration that was undone has left there is not of the next VM of that name.
    asyncio.run(sweep(third, vm.spec, there, None))
    assert not there.gone_replica.exists()


def test_a_stop_declares_no_replica_gone_of_a_vm_that_a_standby_may_have(
    hosts: Hosts, tmp_path: Path
) -> None:
    vm = home(hosts[0], "old")
    vm.directory.listed_replica.write_text("b/1")
    Claim("web", "a/1", "b", str(tmp_path / "leases")).write(vm.directory.claim)
    with pytest.raises(NotFoundError):
        asyncio.run(stop("web", hosts, standby_is_dead=True))
    vm.directory.claim.unlink()
    home(hosts[1], "other")
    with pytest.raises(NotFoundError):
        asyncio.run(stop("web", hosts, standby_is_dead=True))
    assert not vm.directory.gone_replica.exists()


@pytest.mark.parametrize("is_taken", [True, False])
def test_a_standby_that_took_long_to_load_looks_whose_the_term_is(
    hosts: Hosts, tmp_path: Path, *, is_taken: bool
) -> None:
    """An operator took its host for dead, and the old primary goes on."""
    files = requested(hosts, tmp_path)
    record(tmp_path, "a/1", "b/1", released=True)
    service: Any = Standby.__new__(Standby)
    service._request, service._copies, service._files = read_request(files.path), (), files
    store, span = FileStore(tmp_path / "leases"), LeaseSpan(0.1)
    service._lease = Lease(store, "web", Claimant("b/1", replica="b/1"), span)
    service._may_have_run = False
    done = list[str]()

    class Waiting:
        async def load(self, _state: bytes) -> None:
            await asyncio.sleep(0.2)  # longer than the lease
            if is_taken:
                await Lease(store, "web", Claimant("a/1/recovery", succeeds="b/1"), span).take(
                    Holding(service._lease.held.term, "b/1")
                )

        def settle_here(self) -> None:
            done.append("settled")

        async def run(self) -> None:
            done.append("runs")
            raise OperationFailedError("it is paused", why="of this test", remedy="-")

    async def applied() -> None:
        """Nothing is under way."""

    replica: Any = SimpleNamespace(disks=SimpleNamespace(applied=applied), device_state=b"")
    service._warm = Waiting()

    async def main() -> None:
        await service._lease.take()
        await service._promote(replica, None)

    asyncio.run(main())
    assert done == ([] if is_taken else ["settled", "runs"])
    assert service.has_the_guest is not is_taken
