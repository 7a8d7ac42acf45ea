"""Which VMs a machine starts when it has booted."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contract.test_replication_leftovers import home
from vmckpt.drivers.direct import DirectVm
from vmckpt.errors import HostDownError, StorageError
from vmckpt.fleet import autostart as starting
from vmckpt.hosts.local import LocalHost
from vmckpt.vm.inventory import Vm
from vmckpt.vm.paths import vms_dir

pytestmark = pytest.mark.contract


@pytest.mark.parametrize("is_here", [True, False])
def test_a_vm_that_another_host_has_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_here: bool
) -> None:
    """What a failover left here is not it; it may be stopped there on purpose."""
    here, there = (LocalHost(name, tmp_path / name, "127.0.0.1") for name in ("a", "b"))
    left = home(here, "old")
    left.directory.spec.write_text("autostart = true\n" + left.directory.spec.read_text())
    left = left._replace(spec=left.spec._replace(autostart=True))
    started: list[str] = []

    async def found(*_: object) -> Vm:
        return left if is_here else home(there, "new")

    async def start(self: DirectVm) -> None:
        started.append(self.host.name)

    monkeypatch.setattr(starting, "local_host", lambda: here)
    monkeypatch.setattr(starting, "find_own", found)
    monkeypatch.setattr(DirectVm, "start", start)
    done = asyncio.run(starting.autostart(lambda _: None))
    assert started == (["a"] if is_here else [])
    assert [one.vm for one in done] == (["web"] if is_here else [])


class Machine:
    """One with a VM that starts with it. Its starts fail while the arbiter does not answer."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host = LocalHost("a", path / "a", "127.0.0.1")
        self.vm = home(self.host, "old")
        self.vm.directory.spec.write_text("autostart = true\n" + self.vm.directory.spec.read_text())
        self.vm = self.vm._replace(spec=self.vm.spec._replace(autostart=True))
        self.tries = self.silent_for = 0
        self.meanwhile: Callable[[], None] = lambda: None
        self.is_on = False
        monkeypatch.setattr(starting, "local_host", lambda: self.host)
        monkeypatch.setattr(starting, "find_own", self._find)
        monkeypatch.setattr(starting, "RETRY_S", 0.01)
        monkeypatch.setattr(DirectVm, "start", self._start)
        monkeypatch.setattr(Vm, "is_alive", self._is_alive)

    async def _find(self, *_: object) -> Vm:
        return self.vm

    async def _is_alive(self, *_: object) -> bool:
        return self.is_on

    async def _start(self, *_: object) -> None:
        self.tries += 1
        if self.tries <= self.silent_for:
            self.meanwhile()
            raise HostDownError("the arbiter does not answer", why="it boots too", remedy="-")
        self.is_on = True

    def boot(self, retry_s: float) -> list[starting.Autostarted]:
        return asyncio.run(starting.autostart(lambda _: None, retry_s=retry_s))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_what_cannot_be_started_yet_is_tried_again(machine: Machine) -> None:
    """After a power cut of a whole site all hosts boot at once: it stayed off for good."""
    machine.silent_for = 3
    assert machine.boot(60.0) == [starting.Autostarted("web", None)]
    assert machine.tries == 4


def test_it_is_given_up_in_time(machine: Machine) -> None:
    machine.silent_for = 1_000_000
    [one] = machine.boot(0.2)
    assert isinstance(one.error, HostDownError)
    assert machine.tries > 1


def test_what_an_operator_has_started_meanwhile_is_left_alone(machine: Machine) -> None:
    machine.silent_for = 1

    def starts() -> None:
        machine.is_on = True

    machine.meanwhile = starts
    assert machine.boot(60.0) == []
    assert machine.tries == 1


def test_nor_is_one_started_that_shall_not_be_by_now(machine: Machine) -> None:
    machine.silent_for = 1

    def switches_off() -> None:
        machine.vm = machine.vm._replace(spec=machine.vm.spec._replace(autostart=False))

    machine.meanwhile = switches_off
    assert machine.boot(60.0) == []
    assert machine.tries == 1


def test_a_host_that_is_drained_meanwhile_starts_no_more(machine: Machine) -> None:
    """Its drain had ended: it was to be switched off."""
    machine.silent_for = 1

    def drain() -> None:
        mark = machine.host.state_dir / "drained.json"
        mark.write_text(json.dumps({"run": "r1"}))

    machine.meanwhile = drain
    [one] = machine.boot(0.3)
    assert isinstance(one.error, HostDownError)
    assert machine.tries == 1


def test_vms_that_cannot_be_listed_are_not_none(machine: Machine) -> None:
    """ "no VM of this machine had to be started", and exit code 0."""
    directory = vms_dir(machine.host.state_dir)
    directory.rename(directory.with_name("gone"))
    directory.write_text("no directory")
    with pytest.raises(StorageError):
        machine.boot(0.0)
