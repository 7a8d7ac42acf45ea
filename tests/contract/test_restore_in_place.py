"""A restore in place that cannot be written down: the guest whose place was to be taken goes on."""

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.remote_hosts import PipedServes
from tests.scripted_qmp import Server
from tests.silent_ends import PLATFORM, SPEC, Guest, Scripted, make_home
from vmckpt.checkpoint.group.member import ALONE
from vmckpt.checkpoint.restore import making as restore_records
from vmckpt.checkpoint.restore import restore as restores
from vmckpt.checkpoint.restore.making import making, write_down
from vmckpt.checkpoint.restore.recover import recover
from vmckpt.checkpoint.restore.restore import _Restoring
from vmckpt.drivers.find import _restored, find
from vmckpt.errors import StorageError
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes.process import ProcessId
from vmckpt.qemu import commands
from vmckpt.vm.inventory import Vm, read_vm
from vmckpt.vm.paths import vm_dir
from vmckpt.vm.record import Qemu
from vmckpt.vm.spec.spec import parse_spec

pytestmark = pytest.mark.contract


class Stopping(Guest):
    """A guest that can be stopped."""

    async def _answer(self, server: Server, command: dict[str, Any]) -> None:
        if command["execute"] == "stop":
            self.run = "paused"
            await server.answer(command, {})
            return
        await super()._answer(server, command)


@dataclass(frozen=True, slots=True, kw_only=True)
class Full(Scripted):
    """A host whose disk is full, after so many more records."""

    room: list[int]

    async def write_text(self, path: Path, text: str) -> None:
        self.room[0] -= 1
        if self.room[0] < 0:
            raise StorageError(f"cannot write {path}", why="no space left", remedy="make room")
        path.write_text(text)


@pytest.mark.parametrize("room", [0, 1])
def test_a_full_disk_leaves_no_guest_standing(tmp_path: Path, room: int) -> None:
    """The old one was stopped, and its record could not be written again as it had been."""

    async def switch() -> Guest:
        guest = Stopping("running", "none")
        host = Full("a", tmp_path, "127.0.0.1", guest=guest, room=[room])
        directory = vm_dir(tmp_path, "web")
        directory.path.mkdir(parents=True)
        qemu = Qemu(directory.qemu("01234567"), ProcessId(1, 1), PLATFORM)
        directory.current.write_text(qemu.to_json())
        old = Vm(parse_spec(SPEC, "web.toml", directory.path), host, directory, qemu)
        new = Qemu(directory.qemu("89abcdef"), ProcessId(1, 2), PLATFORM)
        work = object.__new__(_Restoring)
        work._planned = SimpleNamespace(vm=old)  # type: ignore[assignment]
        work._old, work._host, work._files, work._member = old, host, new.files, ALONE

        async def refused(monitor: object) -> None:
            raise StorageError("it does not run", why="-", remedy="-")

        work._run = refused  # type: ignore[method-assign]
        with pytest.raises(StorageError):
            await work._switch(new, None)  # type: ignore[arg-type]
        return guest

    guest = asyncio.run(switch())
    assert guest.told == ["cont"]
    assert guest.run == "running"


def test_a_disk_that_is_full_by_then_does_not_make_a_restore_one_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new guest ran, the old QEMU kept its memory, and the restore was said to have failed:
    who did it again lost what the guest had done since.
    """
    ended = list[Path]()

    async def end_qemu(_: object, __: object, files: Any) -> None:
        ended.append(files.path)

    async def nothing(*_: object, **__: object) -> list[str]:
        return []

    monkeypatch.setattr(restores, "end_qemu", end_qemu)
    monkeypatch.setattr(restores, "tell_guest", nothing)
    monkeypatch.setattr(restores, "bring_back", nothing)
    monkeypatch.setattr(commands, "migrate_set_capabilities", nothing)

    async def restored() -> list[str]:
        host = Full("a", tmp_path, "127.0.0.1", guest=Guest("running", "none"), room=[0])
        await make_home(LocalHost("a", tmp_path, "127.0.0.1"), "01234567")
        old = await read_vm(host, "web")
        assert old is not None
        new = Qemu(old.directory.qemu("89abcdef"), ProcessId(1, 2), PLATFORM)
        old.directory.current.write_text(new.to_json())
        old.directory.restoring.write_text(json.dumps({"qemu_id": "89abcdef", "spec": SPEC}))
        work: Any = object.__new__(_Restoring)
        work._planned = SimpleNamespace(vm=old, facts=None)
        work._point = SimpleNamespace(manifest=SimpleNamespace(id="c" * 32, vm_id=None))
        work._source = SimpleNamespace(location="/srv/points", checkpoint="c" * 32)
        work._options = SimpleNamespace(plugged=False)
        work._old, work._host, work._identity = old, host, "-"
        return list(await work._afterwards(new, None))

    told = asyncio.run(restored())
    assert [path.name for path in ended] == ["qemu-01234567"]
    assert len(told) == 2
    assert all("no space left" in one for one in told)


@pytest.mark.parametrize(
    "record", ["{", json.dumps({"qemu_id": "01234567", "spec": SPEC})], ids=["damaged", "committed"]
)
def test_a_guest_runs_whatever_cannot_be_settled(tmp_path: Path, record: str) -> None:
    """The service was killed with the guest paused; its recovery meets a full disk, or worse."""

    async def recovered() -> Guest:
        guest = Guest("paused", "none")
        host = Full("a", tmp_path, "127.0.0.1", guest=guest, room=[0])
        await make_home(LocalHost("a", tmp_path, "127.0.0.1"), "01234567")
        vm = await read_vm(host, "web")
        assert vm is not None
        vm.directory.restoring.write_text(record)
        with pytest.raises(StorageError):
            await recover(vm)
        return guest

    assert asyncio.run(recovered()).run == "running"


@pytest.mark.parametrize("was_paused", [False, True])
def test_a_guest_that_was_paused_stays_so_when_its_restore_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, was_paused: bool
) -> None:
    """`vm pause` had paused it, for good as far as its operator knew; it was resumed."""

    async def refused(*_: object, **__: object) -> None:
        raise StorageError("it does not run", why="-", remedy="-")

    async def ended(*_: object) -> None:
        return None

    async def failed() -> Guest:
        guest = Stopping("paused" if was_paused else "running", "none")
        host = Scripted("a", tmp_path, "127.0.0.1", guest=guest)
        await make_home(LocalHost("a", tmp_path, "127.0.0.1"), "01234567")
        old = await read_vm(host, "web")
        assert old is not None
        new = Qemu(old.directory.qemu("89abcdef"), ProcessId(1, 2), PLATFORM)
        work: Any = object.__new__(_Restoring)
        work._planned = SimpleNamespace(vm=old._replace(qemu=new), disks=(), own_variables=None)
        work._options = SimpleNamespace(in_place=True)
        work._old, work._host, work._files, work._member = old, host, new.files, ALONE
        work._made, work._created = {}, []
        work._start, work._run = refused, refused
        with pytest.raises(StorageError):
            await work._same_machine()
        with pytest.raises(StorageError):
            await work._switch(new, None)
        return guest

    monkeypatch.setattr(restores, "end_qemu", ended)
    guest = asyncio.run(failed())
    assert guest.run == ("paused" if was_paused else "running")


async def paused_guest(tmp_path: Path) -> tuple[Guest, Vm]:
    guest = Guest("paused", "none")
    host = Scripted("a", tmp_path, "127.0.0.1", guest=guest)
    await make_home(LocalHost("a", tmp_path, "127.0.0.1"), "01234567")
    vm = await read_vm(host, "web")
    assert vm is not None
    return guest, vm


@pytest.mark.parametrize("was_paused", [False, True])
@pytest.mark.parametrize("committed", [False, True])
def test_a_guest_that_was_paused_stays_so_when_its_restore_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, was_paused: bool, committed: bool
) -> None:
    """Unless the restore had replaced it: then the new guest runs."""

    async def ended(*_: object) -> None:
        return None

    async def recovered() -> Guest:
        guest, vm = await paused_guest(tmp_path)
        new = vm if committed else vm._replace(qemu=Qemu(vm.directory.qemu("89abcdef"),
              ProcessId(1, 2), PLATFORM))  # fmt: skip
        await write_down(new, making(new, was_paused=was_paused))
        await recover(vm)
        assert not vm.directory.restoring.exists()
        return guest

    monkeypatch.setattr(restore_records, "end_qemu", ended)
    is_to_run = committed or not was_paused
    assert asyncio.run(recovered()).run == ("running" if is_to_run else "paused")


def test_a_guest_that_was_paused_since_a_checkpoint_ended_stays_so(tmp_path: Path) -> None:
    """Another command had seen that checkpoint, and then that nothing held the VM any longer."""

    async def recovered() -> Guest:
        guest, vm = await paused_guest(tmp_path)
        await recover(vm)
        return guest

    assert asyncio.run(recovered()).run == "paused"


@pytest.mark.parametrize(
    "told",
    [
        '{"store": "/x", "checkpoint": "ab", "ram_file": "/x", "pager": null, "descriptor": 1}',
        '{"store": "/x", "checkpoint": "ab", "ram_file": "/x", "lost": "pack 07 is damaged"}',
    ],
)
def test_memory_that_was_still_to_come_is_nothing_to_be_waited_for_once_its_qemu_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str
) -> None:
    """After a power cut each command on the VM failed: its memory was to be recovered first."""
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path))
    directory = vm_dir(tmp_path, "web")
    qemu = Qemu(directory.qemu("01234567"), ProcessId(1, 1), PLATFORM)
    qemu.files.path.mkdir(parents=True, mode=0o700)
    directory.spec.write_text(SPEC)
    directory.current.write_text(qemu.to_json())
    qemu.files.missing.write_text(told)

    async def stopped() -> None:
        found = await find("web", lambda _: None)
        await found.stop(force=True, timeout_s=0)
        await found.remove()

    async def elsewhere() -> None:
        serves = PipedServes()
        host = serves.host(tmp_path, "far")
        try:
            vm = await read_vm(host, "web")
            assert vm is not None
            assert await _restored(vm, lambda _: None) == vm
        finally:
            await host.close()
            serves.end()

    asyncio.run(elsewhere())
    asyncio.run(stopped())
    assert not directory.path.exists()
