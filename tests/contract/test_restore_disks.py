"""The disks of a checkpoint alone, into a VM that is off: all of them, or as before."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.contract.test_checkpoint_disks import SIZE, content, raw
from tests.contract.test_checkpoint_disks import make as make_checkpoint
from tests.unit.test_checkpoint_tree import facts
from vmckpt.checkpoint.catalogue.catalogue import catalogue
from vmckpt.checkpoint.facts import DiskFacts
from vmckpt.checkpoint.operate import restoring
from vmckpt.checkpoint.origin import digest
from vmckpt.checkpoint.restore import restore_disks as module
from vmckpt.checkpoint.restore.making import settle
from vmckpt.checkpoint.restore.requests import CheckpointSource, RestoreOptions
from vmckpt.checkpoint.restore.restore_disks import DisksRestored, restore_disks
from vmckpt.drivers.direct import DirectVm
from vmckpt.drivers.driver import remove_with_disks
from vmckpt.errors import (
    BusyError,
    NotFoundError,
    OperationFailedError,
    RefusedError,
    StorageError,
)
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes.process import ProcessId, identify
from vmckpt.preflight.finding import OK, REFUSE, Finding
from vmckpt.store.errors import DamagedError
from vmckpt.store.files.pack import PACKS
from vmckpt.store.open import open_store
from vmckpt.vm.inventory import read_vm
from vmckpt.vm.paths import vm_dir
from vmckpt.vm.record import Platform, Qemu

PLATFORM = Platform("pc-q35-9.9", "tcg", "qemu64")
IN_PLACE = RestoreOptions(None, in_place=True, eager=False, plugged=True, keep_macs=False)
COPY = RestoreOptions("copy", in_place=False, eager=False, plugged=False, keep_macs=False)


def spec(folder: Path, image: str = "web.raw", memory: str = "64M") -> str:
    path = folder / image
    return f"""\
name = "web"
memory = "{memory}"

[boot]
kernel = "/boot/vmlinuz"

[[disks]]
path = "{path}"
format = "{path.suffix[1:]}"
"""


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalHost:
    """This machine, with a checkpoint of the VM `web`, which is off, and has changed since."""
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path))
    path = str(tmp_path / "web.raw")
    disks = (DiskFacts(path, "raw", SIZE, read_only=False, area="disk-0"),)
    said = replace(facts("one"), spec=spec(tmp_path), disks=disks, macs=())
    make_checkpoint(tmp_path, said.to_json())
    here = LocalHost("local", tmp_path, "127.0.0.1")
    at_home(here, spec(tmp_path, memory="96M"), ProcessId(0, 0))
    (tmp_path / "web.raw").write_bytes(b"newer")
    return here


def at_home(host: LocalHost, text: str, process: ProcessId) -> None:
    directory = vm_dir(host.state_dir, "web")
    directory.path.mkdir(parents=True, exist_ok=True)
    directory.spec.write_text(text)
    qemu = Qemu(directory.qemu("old"), process, PLATFORM)
    qemu.files.path.mkdir(exist_ok=True)
    directory.current.write_text(qemu.to_json())


def restored(host: LocalHost, wish: RestoreOptions = IN_PLACE) -> DisksRestored:
    location = str(host.state_dir / "checkpoints")
    with open_store(location) as store:
        found = store.find("one")
    return asyncio.run(restore_disks(host, CheckpointSource(location, found.id), wish))


def as_before(host: LocalHost) -> bool:
    """Nothing of a restore is there."""
    left = [path.name for path in host.state_dir.iterdir() if ".vmckpt-" in path.name]
    directory = vm_dir(host.state_dir, "web")
    current = directory.current.read_text()
    return (
        (host.state_dir / "web.raw").read_bytes() == b"newer"
        and not left
        and not directory.restoring.exists()
        and '"old"' in current
    )


def test_in_place_the_vm_stays_as_it_is_described_now(host: LocalHost) -> None:
    told = restored(host)
    assert told.disks == (str(host.state_dir / "web.raw"),)
    assert (host.state_dir / "web.raw").read_bytes() == content()
    vm = asyncio.run(read_vm(host, "web"))
    assert vm is not None
    assert (vm.spec.memory_bytes, vm.qemu.platform) == (96 << 20, PLATFORM)
    assert not asyncio.run(vm.is_alive())
    assert not vm.directory.restoring.exists()
    assert told.checkpoint in vm.directory.point.read_text()
    assert not vm.directory.qemu("old").path.exists()
    restored(host)  # and once more


def test_a_link_to_a_disk_stays_and_its_file_gets_the_content(host: LocalHost) -> None:
    """The image was put in the link's place, on another disk than the one that has room for it."""
    link, image = host.state_dir / "web.raw", host.state_dir / "large" / "1.raw"
    image.parent.mkdir()
    link.rename(image)
    link.symlink_to("large/1.raw")
    restored(host)
    assert link.is_symlink()
    assert image.read_bytes() == content()
    assert [path.name for path in image.parent.iterdir()] == ["1.raw"]


@pytest.mark.parametrize("full", ["checkpoint", "spec.toml"])
def test_a_disk_that_is_full_after_the_commit_makes_it_no_failure(
    host: LocalHost, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    """It said "nothing was changed", and the VM had the checkpoint's disks."""
    write, is_full = LocalHost.write_text, True

    async def write_text(self: LocalHost, path: Path, text: str) -> None:
        if is_full and path.name == full:
            raise StorageError(f"cannot write {path}", why="no space left", remedy="-")
        await write(self, path, text)

    monkeypatch.setattr(LocalHost, "write_text", write_text)
    (said,) = restored(host).warnings
    assert said.startswith("left for the next command on 'web'")
    assert (host.state_dir / "web.raw").read_bytes() == content()
    is_full = False
    asyncio.run(settle(host, "web"))
    assert not vm_dir(host.state_dir, "web").restoring.exists()


def test_a_disk_that_was_renamed_is_known_by_its_order_and_has_its_own_format(
    host: LocalHost,
) -> None:
    at_home(host, spec(host.state_dir, "other.qcow2"), ProcessId(0, 0))
    restored(host)
    assert raw(host.state_dir / "other.qcow2") == content()
    assert (host.state_dir / "web.raw").read_bytes() == b"newer"


def test_a_disk_that_the_checkpoint_has_not_stays_and_is_named(host: LocalHost) -> None:
    more = f'\n[[disks]]\npath = "{host.state_dir}/more.raw"\nformat = "raw"\n'
    at_home(host, spec(host.state_dir) + more, ProcessId(0, 0))
    assert "more.raw is not in the checkpoint" in restored(host).warnings[0]
    moved = spec(host.state_dir, "other.raw") + more
    at_home(host, moved, ProcessId(0, 0))
    with pytest.raises(RefusedError, match="differ from"):
        restored(host)


def test_a_vm_that_runs_or_is_not_there_is_left_alone(host: LocalHost) -> None:
    me = identify(os.getpid())
    assert me is not None
    at_home(host, spec(host.state_dir), me)
    with pytest.raises(RefusedError) as told:
        restored(host)
    assert "vm stop web" in told.value.remedy
    assert as_before(host)
    with pytest.raises(NotFoundError):
        restored(host, replace(IN_PLACE, name="none"))


def test_damage_leaves_the_old_disks(host: LocalHost) -> None:
    (pack,) = (host.state_dir / "checkpoints" / PACKS).glob("[0-9a-f]*")
    data = bytearray(pack.read_bytes())
    data[200] ^= 1
    pack.write_bytes(data)
    with pytest.raises(DamagedError):
        restored(host)
    assert as_before(host)


@pytest.mark.parametrize("committed", [False, True])
def test_killed_anywhere_it_is_undone_or_finished_by_the_next(
    host: LocalHost, monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    class Killed(BaseException):
        pass

    async def dies(*_: object) -> None:
        raise Killed

    async def dies_before(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as broken:
        broken.setattr(module, "settle", dies)  # neither the undo nor the rest of the commit
        if not committed:
            broken.setattr(module, "_commit", dies_before)
        with pytest.raises(Killed):
            restored(host)
    directory = vm_dir(host.state_dir, "web")
    assert directory.restoring.exists()
    asyncio.run(settle(host, "web"))
    assert not directory.restoring.exists()
    if committed:
        assert (host.state_dir / "web.raw").read_bytes() == content()
    else:
        assert as_before(host)


def cut_off_past_its_commit(host: LocalHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a power cut: its dead-man's switch is gone, too."""

    class Cut(BaseException):
        pass

    async def cut(*_: object) -> None:
        raise Cut

    with monkeypatch.context() as broken:
        broken.setattr(module, "settle", cut)
        with pytest.raises(Cut):
            restored(host)
    assert (host.state_dir / "web.raw").read_bytes() == b"newer"


def test_the_next_one_does_not_forget_what_was_restored_before_a_power_cut(
    host: LocalHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It wrote over what says which disks the VM has, and its undo removed that: the old ones."""
    cut_off_past_its_commit(host, monkeypatch)
    with monkeypatch.context() as broken:
        broken.setattr(module, "_write_one", no_room)
        with pytest.raises(BusyError, match="was interrupted"):
            restored(host)
    asyncio.run(settle(host, "web"))
    assert (host.state_dir / "web.raw").read_bytes() == content()


def test_the_operators_next_one_ends_what_was_cut_off_first(
    host: LocalHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_off_past_its_commit(host, monkeypatch)

    async def again() -> None:
        entry = (await catalogue([host], None, vm="web")).find("one")
        await restoring(host, entry, IN_PLACE)

    asyncio.run(again())
    assert (host.state_dir / "web.raw").read_bytes() == content()
    assert not vm_dir(host.state_dir, "web").restoring.exists()
    restored(host)


def no_room(*_: object) -> None:
    raise RefusedError("there is no room", why="the disk is full", remedy="make room")


def test_a_cancelled_one_is_undone(host: LocalHost, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = asyncio.Event()

    def slow(*words: object) -> None:
        loops[0].call_soon_threadsafe(begun.set)
        still_wanted: Callable[[], None] = words[-1]  # type: ignore[assignment]
        while True:
            still_wanted()

    async def cancelled() -> None:
        loops.append(asyncio.get_running_loop())
        location = str(host.state_dir / "checkpoints")
        with open_store(location) as store:
            found = store.find("one")
        work = asyncio.ensure_future(
            restore_disks(host, CheckpointSource(location, found.id), IN_PLACE)
        )
        await begun.wait()
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    loops: list[asyncio.AbstractEventLoop] = []
    monkeypatch.setattr(module, "_write_one", slow)
    asyncio.run(cancelled())
    assert as_before(host)


@pytest.fixture
def _fits(monkeypatch: pytest.MonkeyPatch) -> None:
    async def checks(*_: object, **__: object) -> list[Finding]:
        return [Finding("machine-type", REFUSE, "no such machine", "-"), Finding("disk", OK, "-")]

    async def no_such(*_: object) -> Platform:
        raise RefusedError("no such machine", why="-", remedy="-")

    monkeypatch.setattr(module, "checks", checks)
    monkeypatch.setattr(module, "settled_platform", no_such)


@pytest.mark.usefixtures("_fits")
def test_a_copy_is_off_where_its_machine_does_not_fit(host: LocalHost) -> None:
    told = restored(host, COPY)
    assert told.warnings == ("no such machine",)
    (image,) = map(Path, told.disks)
    assert image.parent == host.state_dir / "images"
    assert image.read_bytes() == content()
    vm = asyncio.run(read_vm(host, "copy"))
    assert vm is not None
    assert vm.directory.identity.exists()
    with pytest.raises(RefusedError, match="already"):
        restored(host, COPY)


@pytest.mark.usefixtures("_fits")
def test_a_copy_can_be_made_again_when_it_was_removed_with_its_disks(
    host: LocalHost, tmp_path: Path
) -> None:
    """Its UEFI variables stayed, and no copy of that name could be made. So did a guard's."""
    (tmp_path / "vars.fd").write_bytes(b"variables")
    firmware = f'[firmware]\ncode = "{tmp_path}/vars.fd"\nvars = "{tmp_path}/vars.fd"\n'
    disks = (DiskFacts(str(tmp_path / "web.raw"), "raw", SIZE, read_only=False, area="disk-0"),)
    text = spec(tmp_path).replace('[boot]\nkernel = "/boot/vmlinuz"\n', firmware)
    said = replace(facts("uefi"), spec=text, disks=disks, macs=())
    make_checkpoint(tmp_path / "uefi", said.to_json())
    location = str(tmp_path / "uefi/checkpoints")
    with open_store(location) as store:
        one = store.find("uefi")
    source = CheckpointSource(location, one.id, known=digest(one), is_foreign=False)
    for _ in range(2):
        asyncio.run(restore_disks(host, source, COPY))
        vm = asyncio.run(read_vm(host, "copy"))
        assert vm is not None
        assert (tmp_path / "images/copy-vars.fd").read_bytes() == b"variables"
        removed = asyncio.run(remove_with_disks(DirectVm(vm))).removed_disks
        assert [Path(one).name for one in removed] == ["copy-0.raw", "copy-vars.fd"]
    at_home(host, text, ProcessId(0, 0))  # what its user has given it stays
    web = asyncio.run(read_vm(host, "web"))
    assert web is not None
    assert DirectVm(web).own_images() == [tmp_path / "web.raw"]


@pytest.mark.usefixtures("_fits")
def test_a_copy_that_fails_leaves_nothing(host: LocalHost, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: object) -> None:
        raise OperationFailedError("it fails", why="-", remedy="-")

    monkeypatch.setattr(module, "_commit", fails)
    with pytest.raises(OperationFailedError):
        restored(host, COPY)
    assert not vm_dir(host.state_dir, "copy").path.exists()
    assert not list((host.state_dir / "images").iterdir())
