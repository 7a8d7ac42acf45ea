"""Two operators, each with a state directory, who make a VM of one name or image at once."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.faulty_host import Fault, FaultyHost, silence
from tests.unit.test_adopted_rewrite import facts
from vmckpt.errors import (
    BusyError,
    HostDownError,
    OperationFailedError,
    RefusedError,
    StorageError,
)
from vmckpt.hosts.inventory.drained import close
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes.process import ProcessId
from vmckpt.migrate.outcome.journal import MigrationJournal
from vmckpt.vm import create, lifecycle
from vmckpt.vm.adopted import adopt as adopting
from vmckpt.vm.create import redefine_vm, run_vm
from vmckpt.vm.inventory import homes, read_vm
from vmckpt.vm.lifecycle import owner, set_autostart
from vmckpt.vm.paths import QemuDir, lock_path, vm_dir
from vmckpt.vm.record import Platform, Qemu
from vmckpt.vm.spec.spec import parse_spec

pytestmark = pytest.mark.contract
TEXT = 'name = "web"\nmemory = "64M"\n'
PLATFORM = Platform("q35", "tcg", "qemu64")


class Monitor:
    async def close(self) -> None:
        return None


class Site:
    """Two hosts; `other_runs` has the other operator put the VM on `b` while `a`'s QEMU starts."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.a, self.b = (LocalHost(name, path / name, "127.0.0.1") for name in ("a", "b"))
        self.ran = 0
        self.other_runs = False
        monkeypatch.setenv("VMCKPT_STATE_DIR", str(path / "operator"))
        self.sees(monkeypatch, self.a, self.b)
        monkeypatch.setattr(lifecycle, "start_qemu", self._start)
        monkeypatch.setattr(create, "settled_platform", self._platform)
        monkeypatch.setattr("vmckpt.qemu.commands.cont", self._cont)

    def sees(self, monkeypatch: pytest.MonkeyPatch, *hosts: LocalHost) -> None:
        """The inventory has these hosts."""
        for module in (create, lifecycle):
            monkeypatch.setattr(module, "all_hosts", lambda: list(hosts))

    async def _start(
        self, host: LocalHost, spec: object, platform: Platform, files: QemuDir, **_: Any
    ) -> tuple[Qemu, Monitor]:
        if self.other_runs:
            directory = vm_dir(self.b.state_dir, "web")
            directory.path.mkdir(parents=True)
            directory.spec.write_text(TEXT)
            theirs = Qemu(directory.qemu("11111111"), ProcessId(0, 0), PLATFORM)
            directory.current.write_text(theirs.to_json())
        return Qemu(files, ProcessId(0, 0), platform), Monitor()

    async def _platform(self, *_: object) -> Platform:
        return PLATFORM

    async def _cont(self, _: object) -> None:
        self.ran += 1

    def run(self) -> None:
        asyncio.run(run_vm(parse_spec(TEXT, "x", Path("/")), self.a))

    def homes(self) -> list[str]:
        found = asyncio.run(homes("web", [self.a, self.b]))
        return [vm.host.name for vm in found]


@pytest.fixture
def site(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(short_path, monkeypatch)


def test_the_guest_of_the_later_one_never_runs_and_nothing_of_it_stays(site: Site) -> None:
    """Else the VM is at home on two hosts, and every command on it ends with exit code 9."""
    site.other_runs = True
    with pytest.raises(RefusedError, match="there is a VM 'web' already"):
        site.run()
    assert site.ran == 0
    assert site.homes() == ["b"]
    assert not vm_dir(site.a.state_dir, "web").path.exists()


def test_alone_it_runs(site: Site) -> None:
    site.run()
    assert site.ran == 1
    assert site.homes() == ["a"]


def test_a_name_that_is_being_restored_on_another_host_is_not_run(site: Site) -> None:
    """A restore takes minutes, and only at its end the VM is at home there: both ran."""

    async def run() -> None:
        async with site.b.lock(lock_path(site.b.state_dir, "web"), owner("checkpoint restore")):
            with pytest.raises(BusyError, match="there may soon be a VM 'web' on b"):
                await run_vm(parse_spec(TEXT, "x", Path("/")), site.a)

    asyncio.run(run())
    assert site.ran == 0
    assert not vm_dir(site.a.state_dir, "web").path.exists()
    site.run()
    assert site.homes() == ["a"]


def test_nor_one_whose_restore_begins_while_it_is_started(site: Site) -> None:
    async def run() -> None:
        async with AsyncExitStack() as stack:

            async def begins(*_: object) -> None:
                lock = lock_path(site.b.state_dir, "web")
                await stack.enter_async_context(site.b.lock(lock, owner("checkpoint restore")))

            begin = Fault("write_text", of=lambda path, _: path.name == "vm.json", first=begins)
            host = FaultyHost("a", site.a.state_dir, "127.0.0.1", faults=(begin,))
            with pytest.raises(BusyError, match="there may soon be a VM 'web' on b"):
                await run_vm(parse_spec(TEXT, "x", Path("/")), host)

    asyncio.run(run())
    assert site.ran == 0
    assert not vm_dir(site.a.state_dir, "web").path.exists()


def test_a_name_whose_guest_may_have_arrived_on_another_host_is_not_run(site: Site) -> None:
    """Its source died after the switchover, and the VM was not at home there yet: both ran."""
    journal = MigrationJournal(
        "r1", "web", "c", "b", "qa", "qb", "/nowhere", was_running=True, step="verify"
    )
    asyncio.run(journal.write((site.b,)))
    with pytest.raises(BusyError, match="b has remains of an interrupted migration of 'web'"):
        site.run()
    assert site.ran == 0
    assert not vm_dir(site.a.state_dir, "web").path.exists()


def test_a_host_that_is_off_is_asked_for_no_vm_if_you_say_so(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    down = FaultyHost("b", site.b.state_dir, "127.0.0.1", faults=silence())
    site.sees(monkeypatch, site.a, down)
    with pytest.raises(HostDownError):
        site.run()
    # One that answers counts, whatever it says.
    directory = vm_dir(site.b.state_dir, "web")
    directory.path.mkdir(parents=True)
    directory.spec.write_text(TEXT)
    directory.current.write_text("damaged")
    spec = parse_spec(TEXT, "x", Path("/"))
    site.sees(monkeypatch, site.a, site.b)
    with pytest.raises(StorageError):
        asyncio.run(run_vm(spec, site.a, silent_are_off=True))
    assert site.ran == 0
    site.sees(monkeypatch, site.a, down)
    asyncio.run(run_vm(spec, site.a, silent_are_off=True))
    assert site.ran == 1


def test_an_image_that_another_vm_has_made_meanwhile_stays(site: Site, short_path: Path) -> None:
    """Its guest was running, and lost all that it wrote.

    The other VM has it made as soon as it was looked for.
    """
    image = short_path / "web.raw"
    text = f'{TEXT}[[disks]]\npath = "{image}"\nsize = "1M"\nformat = "raw"\n'
    outrun = Fault(
        "exists",
        of=lambda path: path == image,
        first=lambda path: path.write_bytes(b"the other guest's"),
        answers=False,
        times=1,
    )
    host = FaultyHost("a", site.a.state_dir, "127.0.0.1", faults=(outrun,))
    with pytest.raises(OperationFailedError, match="cannot create disk image"):
        asyncio.run(run_vm(parse_spec(text, "x", Path("/")), host))
    assert image.read_bytes() == b"the other guest's"
    assert not vm_dir(site.a.state_dir, "web").path.exists()


def test_no_image_is_made_among_devices(site: Site) -> None:
    """It would be in the host's memory: an inactive volume's content, it seemed, until a boot."""
    text = f'{TEXT}[[disks]]\npath = "/dev/vg0/web"\nsize = "1M"\nformat = "raw"\n'
    with pytest.raises(RefusedError, match="/dev/vg0/web is not on a"):
        asyncio.run(run_vm(parse_spec(text, "x", Path("/")), site.a))
    assert not vm_dir(site.a.state_dir, "web").path.exists()


@pytest.mark.parametrize("uses_it", [True, False])
def test_an_image_that_another_vm_has_begun_to_use_outlasts_the_one_that_made_it(
    site: Site, short_path: Path, monkeypatch: pytest.MonkeyPatch, *, uses_it: bool
) -> None:
    """Its guest was running, and the image went with the VM whose QEMU did not start."""
    image = short_path / "data.raw"
    disk = f'[[disks]]\npath = "{image}"\nsize = "1M"\nformat = "raw"\n'

    async def image_made(_host: object, path: Path, *_: object) -> None:
        path.write_bytes(b"the other guest's")

    async def fails(*_: object, **__: object) -> None:
        if uses_it:
            other = vm_dir(site.a.state_dir, "other")
            other.path.mkdir(parents=True)
            other.spec.write_text(f'name = "other"\nmemory = "64M"\n{disk}')
        raise OperationFailedError("QEMU did not start", why="-", remedy="-")

    monkeypatch.setattr(create, "create_image", image_made)
    monkeypatch.setattr(lifecycle, "start_qemu", fails)
    with pytest.raises(OperationFailedError, match="did not start"):
        asyncio.run(run_vm(parse_spec(f"{TEXT}{disk}", "x", Path("/")), site.a))
    assert image.exists() is uses_it
    assert not vm_dir(site.a.state_dir, "web").path.exists()


def test_a_new_vm_is_not_the_one_whose_removal_was_cut_off(site: Site) -> None:
    """It got its identity, and the retention of its checkpoints removed the other's."""
    directory = vm_dir(site.a.state_dir, "web")
    directory.path.mkdir(parents=True)
    directory.identity.write_text("11111111-2222-4333-8444-555555555555\n")
    directory.point.write_text("{}")
    directory.saving.write_text("")
    site.run()
    assert "11111111" not in directory.identity.read_text()
    assert not directory.point.exists()
    assert not directory.saving.exists()


def test_a_host_that_is_drained_at_that_moment_gets_no_vm(site: Site) -> None:
    """It was said to be empty, and switched off.

    Its drain begins when the VM's name has been asked for, and finds nothing there.
    """
    drain = Fault("lock", first=lambda *_: close(site.a, {"run": "r1"}))
    host = FaultyHost("a", site.a.state_dir, "127.0.0.1", faults=(drain,))
    with pytest.raises(RefusedError, match="a is drained"):
        asyncio.run(run_vm(parse_spec(TEXT, "x", Path("/")), host))
    assert site.ran == 0
    assert not site.homes()


def test_a_name_that_is_taken_while_a_qemu_is_adopted_is_not_given_to_it(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was at home on two hosts, and no command worked on either."""
    monkeypatch.setattr(adopting, "all_hosts", lambda: [site.a, site.b])
    directory = vm_dir(site.a.state_dir, "web")
    process = ProcessId(1, 1)

    async def adopt() -> None:
        found = facts("-m 512")
        monitors = [site.a.state_dir / "qmp.sock"]
        await adopting._become(directory, site.a, monitors, found, process)

    async def beside_a_restore() -> None:
        async with site.b.lock(lock_path(site.b.state_dir, "web"), owner("checkpoint restore")):
            await adopt()

    with pytest.raises(BusyError, match="there may soon be a VM 'web' on b"):
        asyncio.run(beside_a_restore())
    assert not directory.path.exists()
    asyncio.run(adopt())
    assert site.homes() == ["a"]


def test_a_spec_that_was_changed_meanwhile_is_not_overwritten(site: Site) -> None:
    """An editor was open while another command changed it."""
    site.run()
    vm = asyncio.run(read_vm(site.a, "web"))
    assert vm is not None
    asyncio.run(set_autostart(vm, on=True))
    with pytest.raises(BusyError, match="was changed meanwhile"):
        asyncio.run(redefine_vm(vm, vm.spec))
    now = asyncio.run(read_vm(site.a, "web"))
    assert now is not None
    assert now.spec.autostart
