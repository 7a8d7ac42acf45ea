"""Which way back there is for a VM that was taken over, and what keeps a VM that is not there."""

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.faulty_host import FaultyHost, silence
from tests.silent_ends import Guest, marked_as
from tests.silent_ends import Scripted as ScriptedQemu
from tests.waiting import eventually
from vmckpt.cli.options.replicate_options import ReplicateArguments
from vmckpt.errors import (
    BusyError,
    HostDownError,
    NotFoundError,
    OperationFailedError,
    OutcomeUnknownError,
    RefusedError,
    TimedOutError,
    UsageError,
)
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes.process import ProcessId, identify
from vmckpt.options.replication import ReplicationOptions
from vmckpt.replicate.control import answering
from vmckpt.replicate.operator import begin, operate, sides
from vmckpt.replicate.operator.begin import start
from vmckpt.replicate.operator.failback import came_from, failback, last_options
from vmckpt.replicate.operator.keep import keep
from vmckpt.replicate.operator.operate import failover
from vmckpt.replicate.request import REQUEST, ReplicationRequest, ServiceFiles
from vmckpt.replicate.status import ReplicaStatus, ReplicationOutcome, Role
from vmckpt.vm.inventory import Vm
from vmckpt.vm.paths import vm_dir
from vmckpt.vm.record import Platform, Qemu, Replaced
from vmckpt.vm.spec.spec import parse_spec

PLATFORM = Platform("q35", "tcg", "qemu64")
OPTIONS = ReplicationOptions("/leases", ("agent", "{host}"), epoch_s=0.05)


def a_vm(tmp_path: Path) -> Vm:
    """Of lab-b, which took it over from lab-a."""
    host, directory = LocalHost("b", tmp_path, "127.0.0.1"), vm_dir(tmp_path, "web")
    spec = parse_spec('name = "web"\nmemory = "32M"\n', "test", tmp_path)
    platform = PLATFORM
    qemu = Qemu(directory.qemu("0"), ProcessId(1, 1), platform, replaces=Replaced("a", "9"))
    return Vm(spec, host, directory, qemu)


def test_it_goes_back_to_where_it_came_from(tmp_path: Path) -> None:
    vm = a_vm(tmp_path)
    assert came_from(vm) == "a"
    with pytest.raises(NotFoundError) as unknown:
        came_from(vm._replace(qemu=vm.qemu._replace(replaces=None)))
    assert "failback web HOST" in unknown.value.remedy


def test_what_was_wished_last_is_remembered(tmp_path: Path) -> None:
    vm = a_vm(tmp_path)
    assert asyncio.run(last_options(vm, vm.host)) is None
    files = ServiceFiles.of(vm.host, "web")
    files.path.mkdir(parents=True)
    here = LocalHost("b", tmp_path, "127.0.0.1")
    request = ReplicationRequest(
        run="r", vm="web", spec=vm.spec.text, platform=PLATFORM, primary=here, standby=here,
        options=OPTIONS, one_machine=False, qemu_id="9",
    )  # fmt: skip
    files.request.write_text(REQUEST.encode(request))
    assert asyncio.run(last_options(vm, vm.host)) == OPTIONS
    files.request.write_text("{}")
    with pytest.raises(UsageError):
        asyncio.run(last_options(vm, vm.host))


@pytest.mark.parametrize("knows", ["nothing", "another arbiter", "no JSON", "all"])
def test_what_is_used_on_the_other_host_is_not_taken_from_one_alone(
    tmp_path: Path, knows: str
) -> None:
    """A fencing agent is a command that runs there, and an arbiter is sent its credentials."""
    target, home = (
        FaultyHost(name, tmp_path / name, "127.0.0.1", is_this_machine=False) for name in "ab"
    )
    vm = a_vm(tmp_path / "b")._replace(host=home)
    request = ReplicationRequest(
        run="r", vm="web", spec=vm.spec.text, platform=PLATFORM, primary=target, standby=home,
        options=OPTIONS, one_machine=False, qemu_id="9",
    )  # fmt: skip
    text = REQUEST.encode(request)
    told = {
        "nothing": None,
        "another arbiter": text.replace("/leases", "/others"),
        "no JSON": "{",
        "all": text,
    }[knows]
    for host, said in ((home, text), (target, told)):
        if said is not None:
            files = ServiceFiles.of(host, "web")
            files.path.mkdir(parents=True)
            files.request.write_text(said)
    found = asyncio.run(last_options(vm, target))
    assert found is not None
    if knows == "all":
        assert found == OPTIONS
        return
    assert (found.arbiter, found.fence, found.epoch_s) == ("", (), OPTIONS.epoch_s)
    with pytest.raises(RefusedError, match="only b has a record") as refused:
        asyncio.run(
            failback(vm, target, ReplicateArguments().options(vm.host, target, found), "r", ())
        )
    assert "--lease" in refused.value.remedy
    assert (
        ReplicateArguments(lease="etcd:http://c:2379").options(vm.host, target, found).fence == ()
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (ReplicationOptions("leases"), "cannot hold leases"),
        (ReplicationOptions("/leases", lease_s=60.0), "--lease-time 1m00s cannot be kept"),
        (ReplicationOptions("/leases", epoch_s=60.0), "would hold the guest's output"),
        (ReplicationOptions("/leases", ("agent",)), "hosts of one machine"),
    ],
)
def test_a_program_begins_nothing_that_a_command_would_not(
    tmp_path: Path, options: ReplicationOptions, said: str
) -> None:
    standby = LocalHost("a", tmp_path / "a", "127.0.0.1")
    with pytest.raises((UsageError, RefusedError), match=said):
        asyncio.run(start(a_vm(tmp_path / "b"), standby, options, "r"))
    assert not ServiceFiles.of(standby, "web").path.exists()


def test_of_two_who_begin_a_protection_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both wrote to the same files, and what failed of the one ended what the other had begun."""
    vm, begins = a_vm(tmp_path / "b"), asyncio.Event()
    first, second = (LocalHost(name, tmp_path / name, "127.0.0.1") for name in "ac")

    async def checked(*_: object) -> None:
        begins.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(begin, "check", checked)

    async def main() -> None:
        options = ReplicationOptions(str(tmp_path / "leases"))
        beginning = asyncio.ensure_future(start(vm, first, options, "1"))
        async with asyncio.timeout(20):
            await begins.wait()
            with pytest.raises(BusyError, match="replicate start"):
                await start(vm, second, options, "2")
        beginning.cancel()
        await asyncio.wait({beginning})

    asyncio.run(main())


@pytest.mark.parametrize("options", [None, {"arbiter": 1}, {"arbiter": "/x", "fence": "sh"}])
def test_wishes_of_other_types_are_none(tmp_path: Path, options: object) -> None:
    vm = a_vm(tmp_path)
    files = ServiceFiles.of(vm.host, "web")
    files.path.mkdir(parents=True)
    files.request.write_text(json.dumps({"format": 2, "options": options}))
    with pytest.raises(UsageError):
        asyncio.run(last_options(vm, vm.host))


def test_one_that_another_host_protects_is_left_so(tmp_path: Path) -> None:
    vm, other = a_vm(tmp_path), LocalHost("c", tmp_path / "c", "127.0.0.1")
    files = ServiceFiles.of(vm.host, "web")

    async def answer(_word: str) -> ReplicaStatus:
        return ReplicaStatus(role=Role.PRIMARY, state="protected", primary="b", standby="a")

    async def main() -> None:
        await vm.host.make_dir(files.path)
        files.request.write_text("{}")
        async with answering(files.control, answer):
            with pytest.raises(RefusedError) as refused:
                await failback(vm, other, OPTIONS, "run", [vm.host, other])
        assert "from b to a" in refused.value.why

    asyncio.run(main())


def taken_over(vm: Vm, took_over_ms: float | None) -> None:
    """By lab-b, whose service has ended; how long it took until the guest ran, if it did."""
    files = ServiceFiles.of(vm.host, "web")
    status = {
        "role": "standby", "state": "promoted", "primary": "a", "standby": "b", "why": "the word",
        "run": "1", "qemu_id": "0", "primary_qemu_id": "9", "took_over_ms": took_over_ms,
    }  # fmt: skip
    files.path.mkdir(parents=True)
    files.request.write_text("{}")
    files.status.write_text(json.dumps(status))
    vm.directory.current.parent.mkdir(parents=True)
    vm.directory.spec.write_text(vm.spec.text)
    vm.directory.current.write_text(vm.qemu.to_json())


def test_a_failover_from_a_host_that_is_gone_has_succeeded(tmp_path: Path) -> None:
    vm = a_vm(tmp_path)
    old = FaultyHost("a", tmp_path / "a", "127.0.0.1", faults=silence())
    taken_over(vm, 12.0)
    done = asyncio.run(failover("web", [old, vm.host]))
    assert done.status.state == "promoted"
    (warning,) = done.warnings
    assert "a does not answer (no way to it)" in warning


@pytest.mark.parametrize("state", ["promoted", "following"])
def test_a_standby_that_still_flushes_its_disks_has_the_guest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """As after a `failback`, which has just copied a disk: it was said not to have taken over, and
    what might be done about that ends it.
    """
    monkeypatch.setattr(sides, "BEGIN_S", 0.3)
    vm = a_vm(tmp_path)
    taken_over(vm, 12.0)
    files = ServiceFiles.of(vm.host, "web")
    last = json.loads(files.status.read_text())
    files.status.write_text(json.dumps(last | {"state": state}))
    service = [sys.executable, "-c", "import time; time.sleep(60)", "replica", "standby"]
    with subprocess.Popen([*service, str(files.path)]) as flushing:
        try:
            eventually(lambda: asyncio.run(sides.services(vm.host, "web")), 10, "it is there")
            waiting = operate._await_decision(vm.host, "web", "1")
            if state == "promoted":
                asyncio.run(waiting)
            else:
                with pytest.raises(TimedOutError, match="has not taken") as late:
                    asyncio.run(waiting)
                assert late.value.why == last["why"]  # not that it waits for the arbiter
        finally:
            flushing.kill()


def test_a_guest_that_was_taken_over_and_does_not_run_is_no_success_however_often_asked(
    tmp_path: Path,
) -> None:
    vm = a_vm(tmp_path)
    taken_over(vm, None)
    for _ in range(2):
        with pytest.raises(OutcomeUnknownError, match="does not run there") as unknown:
            asyncio.run(failover("web", [vm.host]))
        assert "the word" in unknown.value.why


class WithoutService(ScriptedQemu):
    """A host with the guest's QEMU; the standby's service has ended."""

    async def connect(self, path: Path, *, of_anyone: bool = True) -> socket.socket:
        if path.name == "control.sock":
            raise HostDownError("no service", why="it has ended", remedy="-")
        return await ScriptedQemu.connect(self, path)


def test_a_guest_that_was_taken_over_paused_and_started_since_is_a_success(
    tmp_path: Path,
) -> None:
    vm = a_vm(tmp_path)
    taken_over(vm, None)
    there = WithoutService("b", tmp_path, "127.0.0.1", guest=Guest("paused", "completed"))

    async def main() -> ReplicationOutcome:
        with pytest.raises(OutcomeUnknownError, match="does not run there"):
            await failover("web", [there])
        there.guest.run = "running"  # vmckpt vm start
        return await failover("web", [there])

    with marked_as(vm.qemu.files) as process:
        ours = identify(process.pid)
        assert ours is not None
        vm.directory.current.write_text(vm.qemu._replace(process=ours).to_json())
        assert asyncio.run(main()).status.state == "promoted"


class Scripted:
    """Services that tell how they are, and hear what they are asked to do."""

    def __init__(self, tmp_path: Path) -> None:
        self.hosts = {name: LocalHost(name, tmp_path / name, "127.0.0.1") for name in "abc"}
        self.heard = list[tuple[str, str]]()

    def has_ended(self, name: str, **status: Any) -> None:
        """Its last word."""
        files = ServiceFiles.of(self.hosts[name], "web")
        files.path.mkdir(parents=True, exist_ok=True)
        files.request.write_text("{}")
        files.status.write_text(json.dumps(status | {"why": "", "took_over_ms": 12.0}))

    @asynccontextmanager
    async def answers(self, name: str, **status: Any) -> AsyncIterator[None]:
        files = ServiceFiles.of(self.hosts[name], "web")
        files.path.mkdir(parents=True, exist_ok=True)
        files.request.write_text("{}")

        async def answer(word: str) -> ReplicaStatus:
            if word == "failover":
                self.heard.append((name, word))
            return ReplicaStatus.from_json(status)

        async with answering(files.control, answer):
            yield


@pytest.mark.parametrize("state", ["promoted", "ended"])
def test_who_was_a_standby_once_is_not_asked_for_the_one_of_now(tmp_path: Path, state: str) -> None:
    scripted = Scripted(tmp_path)
    of_now = {"primary": "a", "standby": "c", "run": "2", "qemu_id": "5", "primary_qemu_id": "4"}
    of_then = {"primary": "a", "standby": "b", "run": "1", "qemu_id": "0", "primary_qemu_id": "9"}
    scripted.has_ended("b", role="standby", state=state, **of_then)

    async def main() -> ReplicationOutcome:
        async with (
            scripted.answers("a", role="primary", state="protected", **of_now),
            scripted.answers("c", role="standby", state="following", **of_now),
        ):
            scripted.has_ended("c", role="standby", state="promoted", **of_now)
            return await failover("web", [scripted.hosts[name] for name in "bac"])

    assert asyncio.run(main()).status.standby == "c"
    assert scripted.heard == [("a", "failover"), ("c", "failover")]


def test_a_standby_that_is_still_being_copied_to_is_not_asked_to_take_over(tmp_path: Path) -> None:
    """That ended the copy: the primary was asked to hand over what its standby did not have."""
    scripted = Scripted(tmp_path)
    of_now = {"primary": "a", "standby": "c", "run": "2", "state": "copying"}

    async def main() -> None:
        async with (
            scripted.answers("a", role="primary", **of_now),
            scripted.answers("c", role="standby", **of_now),
        ):
            with pytest.raises(OperationFailedError, match="cannot take 'web' over yet"):
                await failover("web", [scripted.hosts[name] for name in "ac"])

    asyncio.run(main())
    assert scripted.heard == []


def test_where_only_a_standby_of_once_is_known_nobody_is_asked(tmp_path: Path) -> None:
    """Its last word, that it has the guest, is not true any longer: that has moved on since."""
    scripted = Scripted(tmp_path)
    of_then = {"primary": "a", "standby": "b", "run": "1", "qemu_id": "0", "primary_qemu_id": "9"}
    scripted.has_ended("b", role="standby", state="promoted", **of_then)

    async def main() -> None:
        hosts = [scripted.hosts[name] for name in "bac"]
        with pytest.raises(NotFoundError, match="is not replicated"):
            await failover("web", hosts)
        of_now = of_then | {"standby": "c", "run": "2"}
        async with scripted.answers("a", role="primary", state="protected", **of_now):
            with pytest.raises(OperationFailedError, match="no standby was asked") as failed:
                await failover("web", hosts)
        assert "c, which protects it" in failed.value.why

    asyncio.run(main())
    assert scripted.heard == []


def test_who_keeps_a_vm_says_once_what_is_in_the_way(tmp_path: Path) -> None:
    hosts = [LocalHost(name, tmp_path / name, "127.0.0.1") for name in "ab"]
    told: list[tuple[str, str]] = []

    async def main() -> None:
        def tell(event: str, text: str) -> None:
            told.append((event, text))

        keeping = keep("web", hosts, lambda _vm, _host: OPTIONS, new_run=lambda: "r", tell=tell)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(keeping, 1.0)

    asyncio.run(main())
    ((event, text),) = told
    assert event == "failed"
    assert "there is no VM 'web'" in text


def test_a_standby_that_ends_as_it_is_compared_is_an_error(tmp_path: Path) -> None:
    """Its directory is gone by then: that was "vmckpt has a bug"."""
    vm = a_vm(tmp_path)
    with pytest.raises(OperationFailedError, match="QEMU on c has ended") as ended:
        asyncio.run(begin._require_same(vm, LocalHost("c", tmp_path / "c", "127.0.0.1")))
    assert "link.log" in ended.value.remedy
