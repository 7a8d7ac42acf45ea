"""What hosts, users and libvirtds do to a replicated domain at the wrong moment."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.contract.test_replicated_domain import (
    DEFINITION,
    DISK,
    DOMAIN,
    HERE,
    LIVE,
    NAME,
    UUID,
    XML,
    World,
    begun,
    world,
)
from vmckpt.drivers import find
from vmckpt.drivers.domain import LibvirtDomain
from vmckpt.errors import HostDownError, OperationFailedError, RefusedError
from vmckpt.hosts.processes.process import ProcessId, identify
from vmckpt.options.replication import ReplicationOptions
from vmckpt.qemu import commands
from vmckpt.replicate import recovery
from vmckpt.replicate.domains import described, describing, guest
from vmckpt.replicate.operator import begin, operate
from vmckpt.replicate.operator import stop as stopping
from vmckpt.replicate.operator.leftovers import end_waiting
from vmckpt.replicate.primary.ending import LibvirtMoves, ProtectionEnding
from vmckpt.replicate.primary.protection import Protection
from vmckpt.replicate.request import REQUEST, ReplicationRequest, ServiceFiles
from vmckpt.replicate.status import PROMOTED
from vmckpt.state.documents import save_to
from vmckpt.vm.domains.faults import LibvirtRefusedError
from vmckpt.vm.inventory import Vm
from vmckpt.vm.paths import vm_dir
from vmckpt.vm.record import Replaced
from vmckpt.vm.start import sweep

__all__ = ["world"]
pytestmark = [pytest.mark.contract, pytest.mark.timeout(60)]
NOBODY = 65534
REFUSED = LibvirtRefusedError("no", why="another domain has that name", remedy="-", code=1)


async def asked_for(world: World, *names: str, run: str = "r") -> None:
    """The request of a replication from a to b, on these hosts."""
    a, b = world.hosts["a"], world.hosts["b"]
    request = ReplicationRequest(
        run, NAME, world.vm("a").spec.text, HERE, a, b, ReplicationOptions("/l"),
        one_machine=False, qemu_id="0123abcd", domain=DOMAIN,
    )  # fmt: skip
    for name in names:
        files = ServiceFiles.of(world.hosts[name], NAME)
        await world.hosts[name].make_dir(files.path)
        await save_to(world.hosts[name], files.request, REQUEST, request)


async def has_ended(world: World, name: str, **words: str) -> None:
    files = ServiceFiles.of(world.hosts[name], NAME)
    await world.hosts[name].write_text(files.status, json.dumps({"run": "r", **words}))


@contextmanager
def qemu_of_the_domain(opens: Path | None = None, user: int | None = None) -> Iterator[ProcessId]:
    """A process with the command line of the domain's QEMU, which may have a file open."""
    code = "file = sys.argv[3] and open(sys.argv[3], 'r+b', 0); print(flush=True); time.sleep(600)"
    words = [sys.executable, "-c", f"import sys, time; {code}", "-uuid", UUID, str(opens or "")]
    child = subprocess.Popen(words, user=user, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        assert child.stdout.read(1)  # it is as it is to be
        which = identify(child.pid)
        assert which is not None
        yield which
    finally:
        child.kill()
        child.communicate()


# -- a guest lost ---------------------------------------------------------------------------------


def test_a_domain_that_came_to_a_killed_standbys_host_since_is_not_ended(world: World) -> None:
    """Its host lost power as a standby. libvirt migrated the domain there later."""
    host = world.hosts["b"]

    async def run(which: ProcessId) -> None:
        await asked_for(world, "b")
        directory = vm_dir(host.state_dir, NAME)
        await host.make_dir(directory.path)
        await host.write_text(directory.spec, world.vm("b").spec.text)
        await end_waiting(host, NAME)
        assert await host.is_alive(which)
        assert not await host.exists(directory.path)

    with qemu_of_the_domain() as which:
        asyncio.run(run(which))


@pytest.mark.parametrize("known_by", ["its record", "its pipe"])
def test_a_qemu_that_waits_is_ended_whichever_user_it_has(world: World, known_by: str) -> None:
    """Distributions have libvirt's QEMUs run as a user of their own."""
    host = world.hosts["b"]
    directory = vm_dir(host.state_dir, NAME)
    pipe = directory.qemu("0123abcd").path / "image"
    user = NOBODY if os.geteuid() == 0 and known_by == "its record" else None

    async def run(which: ProcessId) -> None:
        await asked_for(world, "b")
        await host.write_text(directory.spec, world.vm("b").spec.text)
        if known_by == "its record":
            qemu = world.vm("b").qemu._replace(process=which)
            await host.write_text(directory.awaited_domain, qemu.to_json())
        await end_waiting(host, NAME)
        assert not await host.is_alive(which)

    pipe.parent.mkdir(parents=True)
    os.mkfifo(pipe)
    with qemu_of_the_domain(pipe if known_by == "its pipe" else None, user) as which:
        asyncio.run(run(which))


# -- two guests -----------------------------------------------------------------------------------


def test_a_guest_that_libvirt_moved_away_is_not_left_to_the_standby() -> None:
    """The arbiter is slow: libvirt's migration ends before it has recorded that no replica may take
    over.
    """
    moved = [{"event": "MIGRATION", "data": {"status": "completed"}}]
    service: Any = Protection.__new__(Protection)
    service._epochs = SimpleNamespace(is_safe=True)
    service._monitor = SimpleNamespace(is_lent=True)
    events: Any = SimpleNamespace(drain=lambda: moved)
    service._moves = LibvirtMoves(events)
    service._why, service._is_handing_over = "", False
    service._qemu_lives = lambda: False
    told = list[str]()

    async def solo() -> bool:
        await asyncio.sleep(0.3)
        return True

    async def end(word: str, why: str) -> None:
        told.append(word)

    async def dead_here(*_: object) -> None:
        raise AssertionError("the standby gets a guest that runs elsewhere")

    service._keeper = SimpleNamespace(solo=solo, free=lambda: None)
    service._stream = SimpleNamespace(end=end, abort=lambda: None)
    service._handles = SimpleNamespace(mirrors=SimpleNamespace(intake=SimpleNamespace(drop=int)))
    service._dead_here = dead_here
    assert asyncio.run(service._go_on_alone()) is ProtectionEnding.ALONE
    assert told


def test_a_domain_that_moved_on_after_a_takeover_is_not_defined_where_it_was(world: World) -> None:
    """It would start there with its host, with the disks of then."""
    world.defined, b = {}, world.hosts["b"]

    async def run() -> None:
        await asked_for(world, "b")
        vm = world.vm("b", Replaced("a", "0123abcd"))
        await guest.record_home(vm, DOMAIN)
        await guest.concluded(vm, DOMAIN)
        assert world.defined.keys() == {"b"}
        world.defined = {}  # migrated, by libvirt or vmckpt
        await guest.return_to_libvirt(b, NAME, (world.hosts["a"], b))

    asyncio.run(run())
    assert world.defined == {}
    assert world.left("b") == []


def test_a_start_that_fails_as_the_standby_takes_over_defines_no_old_domain(world: World) -> None:
    a, b = world.hosts["a"], world.hosts["b"]

    async def run() -> None:
        await asked_for(world, "a", "b")
        await begun(world.vm("a"))
        await a.write_text(world.vm("a").directory.claim, "{}")
        await guest.record_home(world.vm("b", Replaced("a", "0123abcd")), DOMAIN)
        await begin._undo(a, ServiceFiles.of(a, NAME), b, ServiceFiles.of(b, NAME))

    asyncio.run(run())
    assert world.defined == {}
    assert ServiceFiles.of(b, NAME).request.exists()


def test_a_domain_that_is_defined_meanwhile_is_no_longer_protected(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its old state could be started once its standby has taken over."""
    monkeypatch.setattr(described, "_WATCH_S", 0.01)
    domain = replace(DOMAIN, devices=described.devices_of(LIVE))
    world.defined = {}

    async def run() -> None:
        watching = asyncio.ensure_future(described.until_changed(world.hosts["a"], domain))
        await asyncio.wait({watching}, timeout=0.1)
        assert not watching.done()
        world.defined["a"] = LIVE
        with pytest.raises(OperationFailedError, match="defined again"):
            await watching

    asyncio.run(run())


@pytest.mark.parametrize(
    "now",
    [
        "<vcpu current='2'>4</vcpu>",
        "<vcpu current='1'>4</vcpu><vcpus><vcpu id='3' enabled='yes'/></vcpus>",
    ],
)
def test_a_vcpu_that_is_plugged_in_ends_the_protection(
    world: World, monkeypatch: pytest.MonkeyPatch, now: str
) -> None:
    """The standby's QEMU does not have it: it could not load the guest when the primary is dead."""
    monkeypatch.setattr(described, "_WATCH_S", 0.01)
    world.live = LIVE.replace("<devices>", "<vcpu current='1'>4</vcpu><devices>")
    domain = replace(DOMAIN, devices=described.devices_of(world.live))
    world.defined = {}

    async def run() -> None:
        watching = asyncio.ensure_future(described.until_changed(world.hosts["a"], domain))
        await asyncio.wait({watching}, timeout=0.1)
        assert not watching.done()
        world.live = LIVE.replace("<devices>", f"{now}<devices>")
        async with asyncio.timeout(5):
            with pytest.raises(OperationFailedError, match="vCPU"):
                await watching

    asyncio.run(run())


# -- a definition lost ----------------------------------------------------------------------------


def test_a_definition_that_was_edited_as_its_protection_began_is_not_lost(world: World) -> None:
    world.definition = XML.format(DISK.format("") + "<!-- mine, edited -->")

    async def run() -> None:
        await begun(world.vm("a"))

    with pytest.raises(RefusedError, match="was changed"):
        asyncio.run(run())
    assert world.defined == {"a": LIVE}


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_start_that_fails_keeps_the_definition_that_libvirt_does_not_take(
    world: World, *, is_refused: bool
) -> None:
    a, b = world.hosts["a"], world.hosts["b"]
    ours, theirs = ServiceFiles.of(a, NAME), ServiceFiles.of(b, NAME)

    async def run() -> None:
        await asked_for(world, "a", "b")
        await begun(world.vm("a"))  # its service failed, and so did `give_back`
        world.refuses = REFUSED if is_refused else None
        await begin._undo(a, ours, b, theirs)
        assert await begin._is_undefined(world.vm("a")) is is_refused

    asyncio.run(run())
    assert (world.defined, ours.request.exists()) == (
        ({}, True) if is_refused else ({"a": DEFINITION}, False)
    )
    assert bool(world.left("a")) == is_refused


@pytest.mark.parametrize("how", ["protected", "ended", "refused"])
def test_a_command_on_a_domain_first_returns_its_definition(world: World, how: str) -> None:
    """It could be migrated on without it, and be defined later where it was."""
    domain: Any = SimpleNamespace(host=world.hosts["a"], name=NAME, uuid=UUID)
    world.refuses, said = REFUSED if how == "refused" else None, list[str]()

    async def run() -> bool:
        await asked_for(world, "a")
        await begun(world.vm("a"))
        world.defined = {}
        if how != "protected":
            await has_ended(world, "a", role="primary", state="ended", ending="alone")
        return await find._was_returned(domain, said.append)

    assert asyncio.run(run()) is (how == "ended")
    assert world.defined == ({"a": DEFINITION} if how == "ended" else {})
    assert bool(said) is (how == "refused")


@pytest.mark.parametrize("role", ["primary", "standby"])
def test_the_next_protection_first_returns_what_the_last_one_could_not(
    world: World, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    """Libvirtd was down when that ended. Described now, the domain would have no definition."""
    name = {"primary": "a", "standby": "b"}[role]
    seen = list[dict[str, str]]()

    async def describe(*_: object) -> None:
        seen.append(dict(world.defined))
        raise RefusedError("enough", why="-", remedy="-")

    monkeypatch.setattr(describing, "described", describe)
    old = Replaced("a", "0123abcd") if role == "standby" else None
    domain: Any = SimpleNamespace(host=world.hosts[name], name=NAME, uuid=UUID)

    async def run() -> None:
        await asked_for(world, name)
        await begun(world.vm(name, old))
        world.defined = {}
        options = ReplicationOptions("/l")
        other = world.hosts["b" if name == "a" else "a"]
        with pytest.raises(RefusedError, match="enough"):  # its service still runs, or was killed
            await describing.start_domain(domain, other, options, "s")
        ending = "alone" if role == "primary" else ""
        state = "ended" if role == "primary" else PROMOTED
        await has_ended(world, name, role=role, state=state, ending=ending)
        with pytest.raises(RefusedError, match="enough"):
            await describing.start_domain(domain, other, options, "s")

    asyncio.run(run())
    assert [sorted(one) for one in seen] == [[], [name]]


@pytest.mark.parametrize("what", ["resume", "reboot"])
def test_a_domain_whose_standby_may_take_over_is_not_resumed_by_a_user(
    world: World, what: str
) -> None:
    """Everything of vmckpt's was killed on the primary's host; its guard has paused the guest."""
    a = world.hosts["a"]

    async def run() -> None:
        await asked_for(world, "a")
        await guest.record_home(world.vm("a"), DOMAIN)
        await a.write_text(world.vm("a").directory.claim, "{}")
        domain: Any = SimpleNamespace(host=a, name=NAME, uuid=UUID)
        words = {"force": True, "timeout_s": 1.0} if what == "reboot" else {}
        await getattr(LibvirtDomain(domain), what)(**words)

    with pytest.raises(RefusedError, match="may be about to take over"):
        asyncio.run(run())


def test_no_checkpoint_takes_the_place_of_a_domain_that_its_standby_may_have(world: World) -> None:
    """Its primary's host lost power. The host of its standby does not answer the operator."""
    a = world.hosts["a"]

    async def run() -> None:
        await asked_for(world, "a")
        await guest.record_home(world.vm("a"), DOMAIN)
        await a.write_text(world.vm("a").directory.claim, "{}")
        await find.require_own(NAME, a)

    with pytest.raises(RefusedError, match="may be about to take over"):
        asyncio.run(run())


def test_a_takeover_that_was_cut_off_goes_on_when_libvirtd_is_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails, b = [2], world.hosts["b"]

    @asynccontextmanager
    async def monitor_of(_: Vm) -> Any:
        if fails[0]:
            fails[0] -= 1
            raise HostDownError("no", why="it is restarted", remedy="-")
        yield SimpleNamespace(is_lent=True)

    async def status(_: object) -> object:
        return SimpleNamespace(status="running")

    monkeypatch.setattr(recovery, "operator_monitor", monitor_of)
    monkeypatch.setattr(commands, "query_status", status)
    world.defined = {}

    async def run(which: ProcessId) -> None:
        await asked_for(world, "b")
        vm = world.vm("b", Replaced("a", "0123abcd"))
        await guest.record_home(vm._replace(qemu=vm.qemu._replace(process=which)), DOMAIN)
        await recovery.abandon(ServiceFiles.of(b, NAME).path)

    with qemu_of_the_domain() as which:
        asyncio.run(run(which))
    assert world.defined.keys() == {"b"}


def test_no_vm_takes_the_name_of_a_domain_whose_definition_no_libvirt_has(world: World) -> None:
    """What says where the definition is, and who may run the guest, would go."""
    world.defined, vm = {}, world.vm("a")

    async def run() -> None:
        await asked_for(world, "a")
        await guest.record_home(vm, DOMAIN)
        with pytest.raises(RefusedError, match="no libvirt has"):
            await sweep(vm.host, vm.spec, vm.directory, None)
        await guest.return_to_libvirt(vm.host, NAME, ())

    asyncio.run(run())
    assert world.defined == {"a": DEFINITION}


def test_a_protection_removes_nothing_of_another_domain_that_no_libvirt_has(world: World) -> None:
    """One of the same name: it was taken over, and its host lost power before it was defined."""
    b = world.hosts["b"]

    async def run() -> None:
        await guest.record_home(world.vm("b", Replaced("a", "0123abcd")), DOMAIN)
        vm = world.vm("a")
        other = vm._replace(qemu=vm.qemu._replace(domain=UUID.replace("7", "8")))
        with pytest.raises(RefusedError, match="another domain"):
            await describing.forget_gone(b, other)

    asyncio.run(run())
    assert "domain.json" in world.left("b")


def test_a_stop_does_not_define_a_domain_that_is_protected_again_by_then(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`keep` was quicker. Defined, it could be started here once its standby has taken over."""
    a = world.hosts["a"]

    async def nothing(*_: object, **__: object) -> str:
        return ""

    async def kept_meanwhile(*_: object, **__: object) -> None:
        await asked_for(world, "a", run="s")
        await begun(world.vm("a"))

    monkeypatch.setattr(stopping, "_settled", nothing)
    monkeypatch.setattr(stopping, "_require_may_run", nothing)
    monkeypatch.setattr(stopping, "_settle_term", kept_meanwhile)

    async def run() -> None:
        await asked_for(world, "a")
        await has_ended(world, "a", role="primary", state="ended", ending="stopped")
        await stopping.stop(NAME, (a,))

    asyncio.run(run())
    assert world.defined == {}
    assert "domain.json" in world.left("a")


def test_a_stop_returns_a_definition_although_the_old_host_is_silent(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its standby took it over and lost power at once. The files stay, to ask the arbiter with."""
    b, world.defined = world.hosts["b"], {}

    async def nothing(*_: object, **__: object) -> str:
        return ""

    async def asking(*_: object, **__: object) -> str:
        return "b"

    for name in ("_settled", "_settle_term"):
        monkeypatch.setattr(stopping, name, nothing)
    monkeypatch.setattr(stopping, "_require_may_run", asking)

    async def run() -> None:
        await asked_for(world, "b")
        await guest.record_home(world.vm("b", Replaced("a", "0123abcd")), DOMAIN)
        await has_ended(world, "b", role="standby", state=PROMOTED)
        await stopping.stop(NAME, (b,))

    asyncio.run(run())
    assert world.defined.keys() == {"b"}
    assert ServiceFiles.of(b, NAME).request.exists()


# -- wrong answers --------------------------------------------------------------------------------


@pytest.mark.parametrize("runs", [False, True])
def test_a_failover_knows_whether_the_domain_runs(world: World, *, runs: bool) -> None:
    """Its standby was killed in the takeover, and its recovery resumed the guest."""
    world.runs = runs
    host = world.hosts["b"]

    async def run() -> bool:
        with qemu_of_the_domain() as which:
            vm = world.vm("b", Replaced("a", "0"))
            await guest.record_home(vm._replace(qemu=vm.qemu._replace(process=which)), DOMAIN)
            return await operate._runs_by_now(host, NAME)

    assert asyncio.run(run()) is runs


@pytest.mark.parametrize("what", ["name", "uuid", "disks", "nodes"])
def test_what_a_host_says_of_another_domain_or_of_other_disks_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    vm = world.vm("a")
    facts = replace(DOMAIN, uuid=UUID.replace("7", "8")) if what == "uuid" else DOMAIN
    text = vm.spec.text.replace(NAME, "other") if what == "name" else vm.spec.text
    if what in ("disks", "nodes"):  # a disk without an image, or without a node
        text += '[[disks]]\npath = "/i/one"\nformat = "raw"\n'
    qemu = vm.qemu._replace(nodes=("node0",) if what == "disks" else ())
    answer = described.DescribedDomain((), text, qemu.to_json(), domain=facts)

    class Told(type(vm.host)):  # type: ignore[misc]
        async def own_command(self) -> list[str]:
            return ["vmckpt"]

        async def run(self, *_: object, **__: object) -> object:
            from vmckpt.codec import builtins

            said = json.dumps(builtins(answer))
            return subprocess.CompletedProcess([], 0, said, "")

    host = Told("a", vm.host.state_dir, "127.0.0.1", libvirt=Path("/run/l"))
    domain: Any = SimpleNamespace(host=host, name=NAME, uuid=UUID)
    with pytest.raises(OperationFailedError, match="malformed"):
        asyncio.run(describing.described(domain, ReplicationOptions("/l")))
