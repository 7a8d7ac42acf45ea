"""Every ending of a protection, and every command that an operator may give then.

Commands act or are refused; what a refusal names is done next. In the end the VM was started, once,
where its newest state is, and may be protected again. The services have ended, or were killed;
processes of vmckpt's own run within the test.
"""

import asyncio
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.contract.test_replication_leftovers import GONE, home, record, requested
from vmckpt.drivers.direct import DirectVm
from vmckpt.errors import HostDownError, NotFoundError, RefusedError, VmckptError
from vmckpt.hosts.host import Completed
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes.process import ProcessId
from vmckpt.lease.file_store import FileStore
from vmckpt.lease.record import LeaseRecord
from vmckpt.options.replication import ReplicationOptions
from vmckpt.replicate import recovery
from vmckpt.replicate.operator import begin, sides
from vmckpt.replicate.operator import keep as keeping
from vmckpt.replicate.operator.failback import failback
from vmckpt.replicate.operator.operate import failover, require_decided, settle
from vmckpt.replicate.operator.stop import stop
from vmckpt.replicate.primary.claim import Claim, examine
from vmckpt.replicate.recovery import abandon, recover
from vmckpt.replicate.request import ServiceFiles
from vmckpt.vm import lifecycle
from vmckpt.vm.inventory import Vm, read_vm, require_at_home
from vmckpt.vm.lifecycle import held
from vmckpt.vm.paths import vm_dir
from vmckpt.vm.record import Replaced

Hosts = tuple[LocalHost, LocalHost]


@dataclass(frozen=True)
class Case:
    """How both services ended (None: it was killed), what the arbiter has, and who is at home.

    `is_lost`: b is off for good, as the operator says when a command asks for it. `arbiter`: as
    `record`, "empty" (its directory is not mounted) or "broken".
    """

    ending: str | None
    standby: str | None
    arbiter: tuple[str, str | None, bool] | str
    goes_on: str = "a"
    has_claim: bool = True
    is_lost: bool = False


ALONE, IN_SYNC = ("a/1", None, False), ("a/1", "b/1", False)
TAKEN, GIVEN_BACK = ("b/1", None, False), ("b/1/abandon/2", None, True)
CASES = {
    "stopped": Case("stopped", "ended", ALONE, has_claim=False),
    "alone": Case("alone", None, ALONE, has_claim=False),
    "alone, the claim could not be removed": Case("alone", "ended", ALONE),
    "alone, b is off": Case("alone", None, ALONE, has_claim=False, is_lost=True),
    "powered off": Case("guest_off", "ended", ALONE, has_claim=False),
    "lost in the first copy": Case("lost", "ended", ALONE, has_claim=False),
    "handed over": Case("yours", "promoted", TAKEN, "b"),
    "handed over, b is off": Case("yours", "promoted", TAKEN, is_lost=True),
    "handed over, the standby could not": Case("yours", "ended", GIVEN_BACK),
    "handed over, the standby ended with the term": Case("yours", "ended", TAKEN),
    "handed over, the standby was killed": Case("yours", None, TAKEN),
    "handed over, the standby never took it": Case("yours", "ended", ("a/1", "b/1", True)),
    "replaced": Case("replaced", "promoted", TAKEN, "b"),
    "replaced, b is off": Case("replaced", "promoted", TAKEN, is_lost=True),
    "replaced, the standby ended with the term": Case("replaced", "ended", TAKEN),
    "replaced, the standby was killed": Case("replaced", None, TAKEN),
    "both killed": Case(None, None, IN_SYNC),
    "both killed, b is off": Case(None, None, IN_SYNC, is_lost=True),
    "both killed, taken over": Case(None, "promoted", TAKEN, "b"),
    "both killed, b had the term": Case(None, None, TAKEN),
    "both killed in the first copy": Case(None, None, ALONE),
    "both killed before the first term": Case(None, None, "empty", has_claim=False),
    "both killed, no arbiter's directory": Case(None, None, "empty"),
    "both killed, b and the arbiter are off": Case(None, None, "broken", is_lost=True),
    "replaced, b and the arbiter are off": Case("replaced", "promoted", "broken", is_lost=True),
    "taken over, the arbiter is off": Case("replaced", "promoted", "broken", "b"),
    "both killed, the arbiter is off": Case(None, None, "broken"),
    "alone, the standby was killed, the arbiter is off": Case("alone", None, "broken"),
    "handed over, the standby was killed, the arbiter is off": Case("yours", None, "broken"),
    "replaced, the standby was killed, the arbiter is off": Case("replaced", None, "broken"),
    "handed over, the standby ended, the arbiter is off": Case("yours", "ended", "broken"),
    "replaced, the standby ended, the arbiter is off": Case("replaced", "ended", "broken"),
    "primary killed, the standby ended, the arbiter is off": Case(None, "ended", "broken"),
    "primary killed, taken over, the arbiter is off": Case(None, "promoted", "broken", "b"),
}
COMMANDS = (
    "vm start", "migrate --offline", "replicate failover", "replicate failback", "replicate stop",
    "replicate keep", "replicate start",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class QuickHost(LocalHost):
    """Its `vmckpt replica` runs within this process. `is_off`: it gives no answer."""

    is_off: bool = False

    async def run(self, argv: Sequence[str], timeout_s: float = 20.0) -> Completed:
        if "replica" not in argv:
            return await LocalHost.run(self, argv, timeout_s)
        role, path = argv[-2], Path(argv[-1])
        if role not in ("abandon", "examine"):  # copies of disks
            return Completed(0, "", "")
        try:
            if role == "abandon":
                async with asyncio.timeout(2.0):
                    await abandon(path)
                return Completed(0, "", "")
            answer = await examine(path)
        except (VmckptError, TimeoutError) as exc:
            return Completed(1, "", str(exc))
        return Completed(0, json.dumps(answer._asdict() | {"right": answer.right.name}), "")

    async def spawn(self, argv: Sequence[str], stderr_path: Path) -> ProcessId:
        path = Path(argv[argv.index("release") + 1])
        is_dead = "--standby-is-dead" in argv
        try:
            async with asyncio.timeout(2.0):
                await recover(path, at_any_rate=True, standby_is_dead=is_dead)
        except (VmckptError, TimeoutError) as exc:
            stderr_path.write_text(str(exc))
        return GONE

    async def exists(self, path: Path) -> bool:
        self._answers()
        return await LocalHost.exists(self, path)

    async def read_text(self, path: Path) -> str | None:
        self._answers()
        return await LocalHost.read_text(self, path)

    async def require_up(self) -> None:
        self._answers()

    def _answers(self) -> None:
        if self.is_off:
            raise HostDownError(self.name, why="no answer", remedy="check that host")


def made(case: Case, tmp_path: Path) -> Hosts:
    hosts = QuickHost("a", tmp_path / "a", "-"), QuickHost("b", tmp_path / "b", "-")
    requested(hosts, tmp_path)
    is_taken = case.standby == "promoted"
    about = {"run": "1", "why": "-", "primary": "a", "standby": "b"}
    for host, role, state in zip(
        hosts, ("primary", "standby"), (case.ending, case.standby), strict=True
    ):
        files = ServiceFiles.of(host, "web")
        request = json.loads(files.request.read_text())
        files.request.write_text(json.dumps(request | {"one_machine": False}))
        if state is None:
            continue
        told: dict[str, Any] = {"role": role, "state": "ended", "ending": state} | about
        if role == "standby":
            ids = {"qemu_id": "new", "primary_qemu_id": "old"}
            told = {"role": role, "state": state, "took_over_ms": 1.0} | about | ids
        files.status.write_text(json.dumps(told))
    vm = home(hosts[0], "old")
    if case.has_claim:
        Claim("web", "a/1", "b", str(tmp_path / "leases")).write(vm.directory.claim)
    if is_taken:
        home(hosts[1], "new", Replaced("a", "old"))
    if isinstance(case.arbiter, tuple):
        holder, in_sync, released = case.arbiter
        record(tmp_path, holder, in_sync, released=released)
    elif case.arbiter == "broken":
        (tmp_path / "leases").write_text("no directory")
    if case.is_lost:
        hosts = hosts[0], QuickHost("b", tmp_path / "b", "-", is_off=True)
    return hosts


class Operator:
    """Gives a command, and then those that its error names, in their order."""

    def __init__(self, case: Case, hosts: Hosts) -> None:
        self._case, self._hosts = case, hosts
        self.said = list[str]()
        self.started = list[str]()

    async def obey(self, command: str, tried: frozenset[str] = frozenset()) -> bool:
        """Whether it, or what it led to, was done."""
        try:
            await self._do(command)
        except VmckptError as exc:
            self.said.append(f"{command}: {exc.what}: {exc.why} -> {exc.remedy}")
            assert exc.remedy.strip("- "), exc
            for remedy in self._named(exc.remedy):
                if remedy not in tried | {command} and await self.obey(remedy, tried | {command}):
                    return True
            return False
        self.said.append(f"{command}: done")
        return True

    def _named(self, remedy: str) -> list[str]:
        """Those that apply: b is dead only if it is."""
        words = list[str]()
        pattern = "vmckpt (vm start|replicate (?:stop|failover|start))([^;:,.]*)"
        for word, more in re.findall(pattern, remedy):
            if "(with" in more or "--standby-is-dead" not in more:
                words.append(word)
            if "--standby-is-dead" in more and self._case.is_lost:
                words.append(f"{word} --standby-is-dead")
        return words

    async def _do(self, command: str) -> None:
        hosts, word = self._hosts, command.removeprefix("replicate ")
        match word:
            case "stop" | "stop --standby-is-dead":
                await stop("web", hosts, standby_is_dead="dead" in word)
            case "failover":
                await failover("web", hosts)
            case "keep":
                seen = await keeping._inspect("web", hosts, None)
                assert not (seen.vm and self.started)
            case _:
                await self._do_with(word, await self._found())

    async def _do_with(self, word: str, vm: Vm) -> None:
        other = self._hosts[vm.host.name == "a"]
        match word:
            case "vm start":
                await DirectVm(vm).start()
                self.started.append(vm.host.name)
            case "migrate --offline":
                await require_decided(vm)  # as it begins
            case "start":
                await begin.start(vm, other, ReplicationOptions("/leases"), "2")
            case _:
                await failback(vm, other, ReplicationOptions("-"), "2", self._hosts)

    async def _found(self) -> Vm:
        """As every command finds it."""
        for _ in range(2):
            homes, silent = list[Vm](), list[HostDownError]()
            for host in self._hosts:
                try:
                    homes += [vm] if (vm := await read_vm(host, "web")) else []
                except HostDownError as exc:
                    silent.append(exc)
            if len(homes) == 1:
                return homes[0]
            if not homes:
                raise (
                    silent[0] if silent else NotFoundError("web", why="no host has it", remedy="-")
                )
            assert await settle("web", self._hosts), "two homes"
        raise AssertionError("two homes")


def cases() -> Iterator[Any]:
    """Each ending with each command; of most all but one are long."""
    for number, (name, case) in enumerate(CASES.items()):
        for location, command in enumerate(COMMANDS):
            is_long = location != number % len(COMMANDS)
            marks = [pytest.mark.long] if is_long else []
            yield pytest.param(case, command, id=f"{name}, {command}", marks=marks)


@pytest.mark.parametrize(("case", "command"), list(cases()))
def test_no_ending_leaves_a_vm_that_cannot_be_started_or_protected(
    case: Case, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start_vm(vm: Vm) -> Vm:
        async with held(vm, "vm start"):
            anew = vm.qemu.to_json().replace(vm.qemu.files.qemu_id, f"again-{vm.host.name}")
            vm.directory.current.write_text(anew)
        return vm

    monkeypatch.setattr(lifecycle, "start_vm", start_vm)
    for module, name in ((recovery, "GIVEN_UP_S"), (recovery, "ARBITER_S"), (sides, "BEGIN_S")):
        monkeypatch.setattr(module, name, 0.2)
    hosts = made(case, tmp_path)
    operator = Operator(case, hosts)

    async def walk() -> None:
        await operator.obey(command)
        for _ in range(3):
            if not operator.started:
                await operator.obey("vm start")
        assert operator.started == [case.goes_on]
        vm = await operator._found()
        assert vm.host.name == case.goes_on
        other = hosts[vm.host.name == "a"]
        if case.is_lost:  # another host protects it
            other = LocalHost("c", tmp_path / "c", "-")
        await operator.obey("replicate stop")
        await begin._require_new(vm, other)

    try:
        asyncio.run(walk())
    except AssertionError as exc:
        raise AssertionError("\n".join([str(exc), *operator.said])) from exc


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_vm_whose_host_lost_power_in_the_first_copy_starts_when_it_has_booted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    """No standby could have it, as the arbiter has it; but it stayed off until `replicate stop`."""
    monkeypatch.setattr(recovery, "GIVEN_UP_S", 0.2)
    hosts = made(replace(CASES["both killed in the first copy"], is_lost=is_lost), tmp_path)

    async def start() -> LeaseRecord:
        vm = await require_at_home(hosts[0], "web")
        await require_decided(vm)
        assert not vm.directory.claim.exists()
        found = await FileStore(tmp_path / "leases").read("web")
        assert found is not None
        return found.record

    overlays = vm_dir(hosts[0].state_dir, "web").overlays_request
    overlays.parent.mkdir()
    overlays.write_text("{}")
    with pytest.raises(RefusedError, match="may be about to take over"):
        asyncio.run(start())  # `stop` commits them
    overlays.unlink()
    # The next term, over which nothing comes that its service still had on its way.
    assert asyncio.run(start()).term == 2


def test_a_vm_whose_hosts_both_lost_power_is_freed_by_keep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its standby was in sync, and its memory is gone: it stayed off until `replicate stop`,
    whatever its autostart is.
    """
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path / "operator"))
    hosts, told, options = (
        made(CASES["both killed"], tmp_path),
        list[str](),
        ReplicationOptions("-"),
    )

    async def main() -> None:
        said = asyncio.Event()

        def tell(event: str, _text: str) -> None:
            told.append(event)
            said.set()

        kept = asyncio.ensure_future(
            keeping.keep("web", hosts, lambda *_: options, new_run=lambda: "r", tell=tell)
        )
        async with asyncio.timeout(20):
            await said.wait()
        kept.cancel()
        await asyncio.wait({kept})
        await require_decided(await require_at_home(hosts[0], "web"))

    asyncio.run(main())
    assert told == ["freed"]


@pytest.mark.parametrize(
    "case", ["both killed", "both killed, b had the term", "both killed, no arbiter's directory"]
)
def test_one_that_a_standby_may_have_does_not(case: str, tmp_path: Path) -> None:
    hosts = made(CASES[case], tmp_path)

    async def start() -> None:
        await require_decided(await require_at_home(hosts[0], "web"))

    with pytest.raises(RefusedError, match="may be about to take over"):
        asyncio.run(start())
    assert (vm_dir(hosts[0].state_dir, "web").claim).exists()
