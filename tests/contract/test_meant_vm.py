"""A host that has a home of a VM's name, while the VM's own host gives no answer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.contract.test_replication_leftovers import home
from tests.contract.test_two_sites import BERLIN, PARIS, take
from tests.faulty_host import FaultyHost, silence
from tests.silent_ends import PLATFORM, SPEC
from vmckpt.checkpoint import meant, operate
from vmckpt.checkpoint.catalogue.catalogue import catalogue
from vmckpt.checkpoint.domains import elsewhere
from vmckpt.checkpoint.facts import DomainFacts
from vmckpt.checkpoint.fork.fork import ForkOptions
from vmckpt.checkpoint.jobs import Fork, Forks
from vmckpt.checkpoint.operate import StoreJob
from vmckpt.checkpoint.requests import TakeOptions
from vmckpt.checkpoint.restore.requests import RestoreOptions
from vmckpt.drivers.find import restores_on
from vmckpt.errors import (
    BusyError,
    CancelledByUserError,
    HostDownError,
    OutcomeUnknownError,
    RefusedError,
    VmckptError,
)
from vmckpt.group import restore as group_restores
from vmckpt.group.groups import Group
from vmckpt.hosts.every import Answers
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory import inventory
from vmckpt.hosts.inventory.drained import close
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes.process import ProcessId
from vmckpt.jobs.kind import Outcome
from vmckpt.store.open import create_store, open_store
from vmckpt.store.sealing.keys import KeyHolder, KeySource, make_key_file
from vmckpt.vm import inventory as vms
from vmckpt.vm.domains.flags import DomainState
from vmckpt.vm.domains.inventory import Domain, as_domain
from vmckpt.vm.domains.replies import DomainInfo
from vmckpt.vm.lifecycle import owner
from vmckpt.vm.paths import lock_path, vm_dir
from vmckpt.vm.record import Qemu

pytestmark = pytest.mark.contract
IN_PLACE = RestoreOptions(None, in_place=True, eager=True, plugged=False, keep_macs=True)
WISH = TakeOptions("p", {}, "operator", 0.01)


class Site:
    """An encrypted store with a checkpoint of "web"; `evil` has one of that name too."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.good, self.evil = (LocalHost(name, path / name, "127.0.0.1") for name in "ae")
        self.location, file = path / "store", path / "key"
        make_key_file(file)
        self.key = KeySource(KeyHolder.FILE, str(file))
        create_store(str(self.location), self.key).close()
        with open_store(str(self.location), self.key) as store:
            take(store, BERLIN, 1, clock=1.0)
        self.vm = home(self.evil, "qe")

    async def take(self) -> bytes | None:
        """What opens the store, as its host is given it."""
        return (await operate.taking(self.vm, str(self.location), WISH, self.key)).access.secret

    async def go_back(self) -> bytes | None:
        """The same of a restore in place."""
        (entry,) = (await catalogue([], str(self.location), self.key)).entries
        work = await operate.restoring(self.evil, entry, IN_PLACE, self.key)
        return work.access.secret


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path / "op"))

    async def capturable(vm: object) -> None:
        return None

    monkeypatch.setattr("vmckpt.checkpoint.take.require_capturable", capturable)
    return Site(tmp_path)


def inventory_has(monkeypatch: pytest.MonkeyPatch, *hosts: Host) -> None:
    for module in (meant, operate, inventory, vms):
        monkeypatch.setattr(module, "all_hosts", lambda: list(hosts))


@pytest.mark.parametrize("verb", ["take", "go_back"])
def test_another_vm_of_that_name_gets_no_key_while_the_right_one_may_be_silent(
    site: Site, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    do = getattr(site, verb)
    silent = FaultyHost("a", site.good.state_dir, "127.0.0.1", faults=silence())
    inventory_has(monkeypatch, site.evil, silent)
    site.vm.directory.identity.write_text(f"{PARIS}\n")
    with pytest.raises(RefusedError, match="is not the VM"):
        asyncio.run(do())
    site.vm.directory.identity.write_text(f"{BERLIN}\n")
    assert asyncio.run(do()) is not None
    # All hosts answer, and no other has it: it was made again.
    site.vm.directory.identity.write_text(f"{PARIS}\n")
    inventory_has(monkeypatch, site.evil, site.good)
    assert asyncio.run(do()) is not None


def test_a_vm_that_is_at_home_on_two_hosts_goes_back_on_neither(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would run twice; which of them was taken went by the inventory's order."""
    home(site.good, "qa")
    inventory_has(monkeypatch, site.evil, site.good)
    with pytest.raises(OutcomeUnknownError, match="at home on e and a"):
        asyncio.run(site.go_back())

    async def where() -> Host:
        (entry,) = (await catalogue([], str(site.location), site.key)).entries
        return await restores_on(entry, lambda _: None, copy=False)

    with pytest.raises(OutcomeUnknownError, match="at home on e and a"):
        asyncio.run(where())


def test_a_vm_that_may_run_on_a_silent_host_is_restored_where_it_is_asked_for_alone(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoint was taken on another host: there it came to run a second time."""
    silent = FaultyHost("a", site.good.state_dir, "127.0.0.1", faults=silence())
    asyncio.run(site.evil.remove(site.vm.directory.path))

    async def where(*, copy: bool) -> str:
        (entry,) = (await catalogue([], str(site.location), site.key)).entries
        assert entry.facts is not None
        there = replace(entry, facts=replace(entry.facts, host="e"))
        return (await restores_on(there, lambda _: None, copy=copy)).name

    monkeypatch.setattr(inventory, "find_host", lambda name: {"e": site.evil}[name])
    inventory_has(monkeypatch, site.evil, silent)
    with pytest.raises(HostDownError, match="would run twice") as refused:
        asyncio.run(where(copy=False))
    assert "--host" in refused.value.remedy
    assert asyncio.run(where(copy=True)) == "e"
    inventory_has(monkeypatch, site.evil, site.good)
    assert asyncio.run(where(copy=False)) == "e"


@pytest.mark.parametrize("copy", [False, True])
def test_nothing_is_restored_on_a_drained_host_that_was_not_named(
    site: Site, monkeypatch: pytest.MonkeyPatch, *, copy: bool
) -> None:
    """The checkpoint was taken there; then the host was to be free of VMs."""
    asyncio.run(site.evil.remove(site.vm.directory.path))
    inventory_has(monkeypatch, site.evil, site.good)
    monkeypatch.setattr(inventory, "find_host", lambda _: site.evil)

    async def where() -> str:
        (entry,) = (await catalogue([], str(site.location), site.key)).entries
        return (await restores_on(entry, lambda _: None, copy=copy)).name

    assert asyncio.run(where()) == "e"
    asyncio.run(close(site.evil, {}))
    with pytest.raises(RefusedError, match="e is drained"):
        asyncio.run(where())
    home(site.evil, "qe")  # where the VM is, it may be restored in place
    if not copy:
        assert asyncio.run(where()) == "e"


def test_a_vm_that_is_being_restored_on_another_host_is_not_restored_here(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That takes minutes, and only at its end the VM is at home there: it ran on both."""
    asyncio.run(site.evil.remove(site.vm.directory.path))
    inventory_has(monkeypatch, site.evil, site.good)
    itself = replace(IN_PLACE, in_place=False)

    async def restored_on(host: Host) -> None:
        (entry,) = (await catalogue([], str(site.location), site.key)).entries
        await operate.restoring(host, entry, itself, site.key)

    async def twice() -> None:
        lock = lock_path(site.good.state_dir, "web")
        async with site.good.lock(lock, owner("checkpoint restore")):
            with pytest.raises(BusyError, match="there may soon be a VM 'web' on a"):
                await restored_on(site.evil)
            await restored_on(site.good)  # it finds out there
        await restored_on(site.evil)

    asyncio.run(twice())


class Job:
    """A restore's job: whether its guest runs, and whether it was ended."""

    def __init__(self, *, runs: bool) -> None:
        self._outcome = Outcome(result={}) if runs else None
        self._ended = asyncio.Event()
        self.ended = False

    async def outcome(self, _: object) -> None:
        if self._outcome is None:
            await self._ended.wait()
            raise CancelledByUserError("cancelled", why="asked to stop", remedy="-")

    async def outcome_so_far(self) -> Outcome | None:
        return self._outcome

    async def cancel(self, _: str) -> None:
        self.ended = True
        self._ended.set()

    async def remove(self) -> None:
        assert self.ended


@pytest.mark.parametrize("runs", [False, True])
def test_a_vm_that_is_run_elsewhere_before_its_restore_has_the_name_is_not_restored(
    site: Site, monkeypatch: pytest.MonkeyPatch, *, runs: bool
) -> None:
    """Opening the store takes its time, and what was asked before that is old by then."""
    inventory_has(monkeypatch, site.evil, site.good)
    itself = replace(IN_PLACE, in_place=False)
    asyncio.run(site.evil.remove(site.vm.directory.path))
    jobs = list[Job]()

    async def restore() -> None:
        jobs.append(Job(runs=runs))
        (entry,) = (await catalogue([], str(site.location), site.key)).entries
        work = await operate.restoring(site.good, entry, itself, site.key)
        home(site.evil, "qe")  # another operator's `vm run`
        lock = lock_path(site.good.state_dir, "web")
        async with site.good.lock(lock, owner("checkpoint restore")):
            await operate._done(work, jobs[0], print)  # type: ignore[arg-type]

    error = OutcomeUnknownError if runs else RefusedError
    with pytest.raises(error, match="there is a VM 'web' already"):
        asyncio.run(restore())
    assert jobs[0].ended is not runs


@pytest.mark.parametrize(("copy", "error"), [("", OutcomeUnknownError), ("web-2", RefusedError)])
def test_a_domain_that_another_host_has_by_then_is_not_restored(
    site: Site, monkeypatch: pytest.MonkeyPatch, copy: str, error: type[VmckptError]
) -> None:
    """Two operators restored it on two hosts within a second: its guest ran twice. Or a copy had
    the name of a domain that another host has.
    """
    inventory_has(monkeypatch, site.evil, site.good)
    asyncio.run(site.evil.remove(site.vm.directory.path))
    job, there = Job(runs=False), list[Domain]()

    async def all_domains(_: object) -> Answers[Domain]:
        return Answers(there, [])

    monkeypatch.setattr(elsewhere, "all_domains", all_domains)
    name, uuid = (copy, "2" * 32) if copy else ("web", "1" * 32)
    xml = f"<domain><name>{name}</name><os><type machine='q35'>hvm</type></os></domain>"

    async def restore() -> None:
        (found,) = (await catalogue([], str(site.location), site.key)).entries
        assert found.facts is not None
        facts = replace(found.facts, domain=DomainFacts("1" * 32, xml, ""))
        options = replace(IN_PLACE, in_place=False, name=copy or None)
        entry = replace(found, facts=facts)
        work = await operate.restoring(site.good, entry, options, site.key)
        seen = DomainInfo(uuid, name, DomainState.RUNNING, 1, persistent=True, xml=xml)
        there.append(as_domain(site.evil, seen))
        lock = lock_path(site.good.state_dir, name)
        async with site.good.lock(lock, owner("checkpoint restore")):
            await operate._done(work, job, print)  # type: ignore[arg-type]

    with pytest.raises(error, match=f"'{name}'"):
        asyncio.run(restore())
    assert job.ended


def test_forks_of_a_domain_get_no_name_of_a_domain_elsewhere(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    inventory_has(monkeypatch, site.evil, site.good)
    xml = "<domain><name>ci-2</name><os><type machine='q35'>hvm</type></os></domain>"
    seen = DomainInfo("2" * 32, "ci-2", DomainState.SHUTOFF, 1, persistent=True, xml=xml)

    async def all_domains(_: object) -> Answers[Domain]:
        return Answers([as_domain(site.evil, seen)], [])

    monkeypatch.setattr(elsewhere, "all_domains", all_domains)

    async def fork() -> None:
        (found,) = (await catalogue([], str(site.location), site.key)).entries
        assert found.facts is not None
        facts = replace(found.facts, domain=DomainFacts("1" * 32, xml, ""))
        options = ForkOptions(found.id, "ci", 2, plugged=False)
        entry = replace(found, facts=facts)
        await operate.fork_on(site.good, entry, options, lambda _: None, site.key)

    with pytest.raises(RefusedError, match="there is a domain 'ci-2' already"):
        asyncio.run(fork())


def a_home(host: Host, name: str) -> None:
    directory = vm_dir(host.state_dir, name)
    directory.path.mkdir(parents=True)
    directory.spec.write_text(SPEC.replace("web", name))
    directory.current.write_text(Qemu(directory.qemu("1"), ProcessId(0, 0), PLATFORM).to_json())


def test_forks_whose_name_another_host_has_by_then_are_not_made(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two VMs of one name: no command on it worked, on either host."""
    inventory_has(monkeypatch, site.evil, site.good)
    asyncio.run(site.evil.remove(site.vm.directory.path))
    job = Job(runs=False)

    async def done(work: StoreJob[Fork, Forks], _: object) -> None:
        a_home(site.evil, "ci-2")  # another operator's
        async with AsyncExitStack() as locks:
            for name in ("ci-1", "ci-2"):
                lock = site.good.lock(lock_path(site.good.state_dir, name), owner("fork"))
                await locks.enter_async_context(lock)
            await operate._done(work, job, print)  # type: ignore[arg-type]

    monkeypatch.setattr(operate, "have_done", done)

    async def fork() -> None:
        (entry,) = (await catalogue([], str(site.location), site.key)).entries
        options = ForkOptions(entry.id, "ci", 2, plugged=False)
        await operate.fork_on(site.good, entry, options, lambda _: None, site.key)

    with pytest.raises(RefusedError, match="there is a VM 'ci-2' already"):
        asyncio.run(fork())
    assert job.ended


def test_a_group_one_of_whose_vms_runs_elsewhere_by_then_is_not_restored(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two operators restored it on two hosts within seconds: each of its VMs ran twice."""
    inventory_has(monkeypatch, site.evil, site.good)
    monkeypatch.setattr(group_restores, "all_hosts", lambda: [site.evil, site.good], raising=False)
    asyncio.run(site.evil.remove(site.vm.directory.path))

    @asynccontextmanager
    async def at_work(works: object) -> AsyncIterator[tuple[object, object]]:
        home(site.evil, "qe")  # the other operator's
        yield Ready(), works

    monkeypatch.setattr(group_restores, "at_work", at_work)

    async def restore() -> None:
        (entry,) = (await catalogue([], str(site.location), site.key)).entries
        group = Group("g", "g", {"web": entry.id}, {"web": entry})
        options = replace(IN_PLACE, in_place=False)
        there: dict[str, Host] = {"web": site.good}
        await group_restores.restore_group(group, there, options, lambda _: None, site.key)

    with pytest.raises(RefusedError, match="there is a VM 'web' already"):
        asyncio.run(restore())


class Ready:
    """A group's head whose members are ready."""

    async def expect_all(self, word: str, _: float | None = None) -> dict[str, object]:
        assert word == "ready", "no guest runs"
        return {}

    def send_all(self, word: str) -> None:
        raise AssertionError(word)
