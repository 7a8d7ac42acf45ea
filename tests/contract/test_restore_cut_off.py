"""A restore that a power cut ended: its dead-man's switch is gone, too, and its record stays."""

import asyncio
import errno
import os
from pathlib import Path

import pytest

from tests.contract.test_restore_disks import COPY, PLATFORM, host, restored
from tests.faulty_host import FaultyHost, silence
from vmckpt.checkpoint.restore import restore_disks as module
from vmckpt.checkpoint.restore.making import PendingQemu, proof_of, settle, take_name, write_down
from vmckpt.drivers.find import find
from vmckpt.errors import BusyError, HostDownError, NotFoundError
from vmckpt.hosts.inventory import inventory
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes.process import ProcessId
from vmckpt.preflight.finding import OK, Finding
from vmckpt.vm import create, lifecycle
from vmckpt.vm.create import run_vm
from vmckpt.vm.inventory import Vm, read_vm
from vmckpt.vm.paths import vm_dir
from vmckpt.vm.record import Qemu
from vmckpt.vm.spec.spec import Spec, parse_spec
from vmckpt.vm.start import sweep

__all__ = ["host"]

pytestmark = pytest.mark.contract


@pytest.fixture
def possible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing speaks against the restore."""

    async def platform(*_: object) -> object:
        return PLATFORM

    async def checks(*_: object, **__: object) -> list[Finding]:
        return [Finding("disk-target", OK, "-")]

    monkeypatch.setattr(module, "_platform", platform)
    monkeypatch.setattr(module, "checks", checks)


@pytest.fixture
def cut_off(host: LocalHost, possible: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The image of a VM `copy` that was being made from a checkpoint when the power went."""

    class Cut(BaseException):
        pass

    async def cut(*_: object) -> None:
        raise Cut

    with monkeypatch.context() as broken:
        broken.setattr(module, "settle", cut)
        broken.setattr(module, "_commit", cut)
        with pytest.raises(Cut):
            restored(host, COPY)
    assert vm_dir(host.state_dir, "copy").restoring.exists()
    return host.state_dir / "images" / "copy-0.raw"


def copy_of(image: Path) -> Spec:
    text = f'name = "copy"\nmemory = "64M"\n\n[[disks]]\npath = "{image}"\nformat = "raw"\n'
    return parse_spec(text, "-", Path("/"))


def runs(host: LocalHost, spec: Spec) -> Vm:
    directory = vm_dir(host.state_dir, spec.name)
    directory.path.mkdir(parents=True, exist_ok=True)
    directory.spec.write_text(spec.text)
    qemu = Qemu(directory.qemu("other"), ProcessId(0, 0), PLATFORM)
    directory.current.write_text(qemu.to_json())
    return Vm(spec, host, directory, qemu)


@pytest.mark.usefixtures("possible")
def test_one_that_is_complete_leaves_one_name_of_each_image(host: LocalHost) -> None:
    restored(host, COPY)
    assert [path.name for path in (host.state_dir / "images").iterdir()] == ["copy-0.raw"]
    assert not vm_dir(host.state_dir, "copy").restoring.exists()


def test_what_it_made_is_removed(host: LocalHost, cut_off: Path) -> None:
    assert cut_off.exists()
    asyncio.run(settle(host, "copy"))
    assert list(cut_off.parent.iterdir()) == []
    assert not vm_dir(host.state_dir, "copy").path.exists()


def test_no_vm_is_run_from_its_images(host: LocalHost, cut_off: Path) -> None:
    """It ran from half an image, which the next command on it removed."""
    with pytest.raises(BusyError, match="a restore of 'copy' that was interrupted") as told:
        asyncio.run(run_vm(copy_of(cut_off), host))
    assert "vmckpt vm show copy" in told.value.remedy
    assert cut_off.exists()
    assert asyncio.run(read_vm(host, "copy")) is None


def test_no_vm_is_moved_adopted_or_protected_there_meanwhile(
    host: LocalHost, cut_off: Path
) -> None:
    """All of them come to this before they take the VM's directory."""
    directory = vm_dir(host.state_dir, "copy")
    with pytest.raises(BusyError, match="a restore of 'copy' that was interrupted"):
        asyncio.run(sweep(host, copy_of(cut_off), directory, None))


def test_the_command_that_is_named_ends_it(
    host: LocalHost, cut_off: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = list[str]()
    with pytest.raises(NotFoundError):
        asyncio.run(find("copy", said.append))
    assert said == ["a restore of copy on local was interrupted: what it made is removed"]
    assert list(cut_off.parent.iterdir()) == []

    async def boot(*_: object, **__: object) -> str:
        return "runs"

    monkeypatch.setattr(create, "settled_platform", boot)
    monkeypatch.setattr(create, "boot", boot)
    cut_off.touch()
    assert asyncio.run(run_vm(copy_of(cut_off), host)) == "runs"  # type: ignore[comparison-overlap]


def test_one_that_is_under_way_is_not_ended(host: LocalHost, cut_off: Path) -> None:
    async def look() -> None:
        lock = host.state_dir / "locks" / "copy"
        async with host.lock(lock, lifecycle.owner("checkpoint restore")):
            with pytest.raises(NotFoundError):
                await find("copy", lambda _: None)

    asyncio.run(look())
    assert cut_off.exists()


def test_the_vm_on_another_host_is_found_though_the_record_here_is_damaged(
    host: LocalHost, cut_off: Path
) -> None:
    vm_dir(host.state_dir, "copy").restoring.write_text("{")
    said = list[str]()
    with pytest.raises(NotFoundError):
        asyncio.run(find("copy", said.append))
    assert "local keeps what an interrupted restore of copy left there" in said[0]
    assert cut_off.exists()


def test_a_host_that_does_not_get_on_with_it_keeps_no_command_waiting(
    host: LocalHost, cut_off: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("vmckpt.checkpoint.operate.undo_there", never)
    monkeypatch.setattr("vmckpt.drivers.find.UNDO_S", 0.05)
    said = list[str]()
    with pytest.raises(NotFoundError):
        asyncio.run(find("copy", said.append))
    assert said == [
        "local keeps what an interrupted restore of copy left there: not removed within 0.05 s"
    ]
    assert cut_off.exists()


@pytest.mark.parametrize("shared", [True, False])
def test_an_image_that_the_vm_has_on_another_host_by_now_stays(
    host: LocalHost, cut_off: Path, monkeypatch: pytest.MonkeyPatch, *, shared: bool
) -> None:
    """It was overwritten by a backup, say, on storage that both hosts share."""
    other = LocalHost("b", host.state_dir / "b", "127.0.0.1")
    monkeypatch.setattr(inventory, "all_hosts", lambda: [host, other])
    monkeypatch.setattr("vmckpt.vm.inventory.all_hosts", lambda: [host, other])
    spec = f'name = "copy"\nmemory = "64M"\n\n[[disks]]\npath = "{cut_off}"\nformat = "raw"\n'
    if not shared:
        image = other.state_dir / "images/copy-0.raw"
        image.parent.mkdir(parents=True)
        spec = spec.replace(f'path = "{cut_off}"', 'image = "copy-0.raw"')
    runs(other, parse_spec(spec, "-", Path("/")))
    said = list[str]()
    vm = asyncio.run(find("copy", said.append))
    assert vm.host.name == "b"
    assert cut_off.exists() is shared
    assert ("may be a disk of 'copy' by now" in said[0]) is shared


def test_while_a_host_is_silent_that_may_have_the_vm_all_stays(
    host: LocalHost, cut_off: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = FaultyHost("b", host.state_dir / "b", "127.0.0.1", faults=silence())
    monkeypatch.setattr(inventory, "all_hosts", lambda: [host, silent])
    monkeypatch.setattr("vmckpt.vm.inventory.all_hosts", lambda: [host, silent])
    with pytest.raises(HostDownError):
        asyncio.run(find("copy", lambda _: None))
    assert cut_off.exists()


def test_an_image_that_was_put_in_its_place_stays(host: LocalHost, cut_off: Path) -> None:
    cut_off.unlink()
    cut_off.write_bytes(b"from a backup")
    asyncio.run(settle(host, "copy"))
    assert [path.read_bytes() for path in cut_off.parent.iterdir()] == [b"from a backup"]


def test_an_image_that_a_vm_was_run_from_since_stays(host: LocalHost, cut_off: Path) -> None:
    vm = runs(host, copy_of(cut_off))
    asyncio.run(settle(host, "copy"))
    assert list(cut_off.parent.iterdir()) == [cut_off]
    assert not vm.directory.restoring.exists()
    assert asyncio.run(read_vm(host, "copy"))


def test_so_it_does_if_an_older_vmckpt_made_the_record(host: LocalHost) -> None:
    image, other = (host.state_dir / name for name in ("copy.raw", "other.raw"))
    for path in (image, other):
        path.write_bytes(b"the guest's")
    vm = runs(host, copy_of(image))
    record = PendingQemu("gone", vm.spec.text, (str(image), str(other)))
    asyncio.run(write_down(vm, record))
    asyncio.run(settle(host, "copy"))
    assert image.read_bytes() == b"the guest's"
    assert not other.exists()


@pytest.mark.parametrize("links", [True, False])
def test_a_name_that_is_taken_is_not_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, links: bool
) -> None:
    def no_link(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    path = tmp_path / "image"
    proof = proof_of(path, "q")
    if not links:
        monkeypatch.setattr(os, "link", no_link)
    proof.write_text("new")
    take_name(proof, path)
    assert path.read_text() == "new"
    assert proof.exists() is links
    proof.write_text("new")
    with pytest.raises(FileExistsError):
        take_name(proof, path)
