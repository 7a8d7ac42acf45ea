"""A power cut at any moment: each record is the old one or the new one, and recovery says which."""

import asyncio
import json
import os
from collections.abc import Callable, Coroutine, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.power_cut import Disk, lay_out
from tests.unit.test_domain_facts import facts, manifest
from vmckpt.checkpoint.disks.qcow2 import write_image
from vmckpt.checkpoint.domains import export
from vmckpt.checkpoint.restore.making import PendingQemu, settle, write_down
from vmckpt.checkpoint.restore.paging import is_whole
from vmckpt.codec import builtins
from vmckpt.errors import StorageError, VmckptError
from vmckpt.events.record import RunRecord
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes.process import ProcessId, identify
from vmckpt.migrate.outcome.ends import End
from vmckpt.migrate.outcome.journal import MigrationJournal, find_journal, newest
from vmckpt.migrate.steps.disk_files import MovedDisk, create_files, hand_over_files
from vmckpt.migrate.steps.handover import settle_on_destination
from vmckpt.preflight.migration.disks import DiskCopy
from vmckpt.vm.create import create_image
from vmckpt.vm.inventory import Vm, inspect_all, read_vm
from vmckpt.vm.paths import VmDir, vm_dir
from vmckpt.vm.record import Platform, Qemu
from vmckpt.vm.spec.spec import parse_spec

pytestmark = pytest.mark.contract

SPEC = 'name = "web"\nmemory = "64M"\n'
NOBODYS = ProcessId(2**22 - 1, 1)
PLATFORM = Platform("pc-q35-10.0", "tcg", "max")


def a_host(state: Path, name: str = "here") -> LocalHost:
    return LocalHost(name, state, "127.0.0.1")


def a_vm(host: LocalHost, qemu_id: str) -> Vm:
    directory = vm_dir(host.state_dir, "web")
    qemu = Qemu(directory.qemu(qemu_id), NOBODYS, PLATFORM)
    return Vm(parse_spec(SPEC, "web.toml", directory.path), host, directory, qemu)


async def is_at_home(vm: Vm) -> None:
    await vm.host.make_dir(vm.directory.path)
    await vm.host.write_text(vm.directory.spec, SPEC)
    await vm.host.write_text(vm.directory.current, vm.qemu.to_json())


def cuts(
    root: Path, work: Callable[[], Coroutine[Any, Any, None]], tmp_path: Path
) -> list[tuple[str, Path]]:
    """Where the power may be cut in `work`, and what the disk has then, laid out."""
    disk = Disk(root)
    with disk.recorded():
        asyncio.run(work())
    found = []
    for number, (when, image) in enumerate(disk.cuts):
        lay_out(image, tmp_path / f"cut-{number}")
        found.append((when, tmp_path / f"cut-{number}"))
    assert len(found) > 3
    return found


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "disk"
    path.mkdir()
    return path


def test_a_vm_that_starts_again_is_at_home_whenever_the_power_fails(
    root: Path, tmp_path: Path
) -> None:
    old, new = a_vm(a_host(root), "00000001"), a_vm(a_host(root), "00000002")
    asyncio.run(is_at_home(old))

    async def start() -> None:
        await new.host.make_dir(new.qemu.files.path)
        await new.host.write_text(new.directory.current, new.qemu.to_json())

    seen = set[str]()
    for when, state in cuts(root, start, tmp_path):
        found = asyncio.run(read_vm(a_host(state), "web"))
        assert found is not None, when
        seen.add(found.qemu.files.qemu_id)
    assert seen == {"00000001", "00000002"}


def test_a_journal_is_of_one_of_the_steps_that_were_begun(root: Path, tmp_path: Path) -> None:
    hosts = [a_host(root / name, name) for name in ("a", "b")]
    asyncio.run(is_at_home(a_vm(hosts[0], "00000001")))
    journal = MigrationJournal(
        "r", "web", "a", "b", "1", "2", "/dev/shm", was_running=True, step="begin"
    )
    steps = ("begin", "prepare", "transfer", "drain", "handover")
    begun = list[str]()

    async def move() -> None:
        for step in steps:
            begun.append(step)
            await replace(journal, step=step).write(hosts)

    seen = set[str | None]()
    for when, state in cuts(root, move, tmp_path):
        there = [a_host(state / name, name) for name in ("a", "b")]
        found = [asyncio.run(MigrationJournal.read(host, "web")) for host in there]
        seen.add(one.step if (one := newest(one for one in found if one)) else None)
        # One host at a time is told of a step.
        at = [steps.index(one.step) if one else -1 for one in found]
        assert at[0] - at[1] in (0, 1), (when, at)
        assert asyncio.run(find_journal("web", there)) == newest(one for one in found if one)
    assert seen == {None, *steps}


def test_a_handover_leaves_a_home_on_one_host_or_on_both(root: Path, tmp_path: Path) -> None:
    source, target = a_host(root / "a", "a"), a_host(root / "b", "b")
    asyncio.run(is_at_home(a_vm(source, "00000001")))
    arrived = a_vm(target, "00000002")

    async def hand_over() -> None:
        await target.make_dir(arrived.directory.path)
        await target.write_text(arrived.directory.spec, SPEC)
        await settle_on_destination(End(target, arrived.qemu.files), arrived.qemu, source)

    for when, state in cuts(root, hand_over, tmp_path):
        homes = [asyncio.run(read_vm(a_host(state / name, name), "web")) for name in ("a", "b")]
        assert any(homes), when


@pytest.mark.parametrize("committed", [False, True])
def test_a_restore_in_place_is_undone_or_finished(
    root: Path, tmp_path: Path, *, committed: bool
) -> None:
    host = a_host(root)
    old, new = a_vm(host, "00000001"), a_vm(host, "00000002")
    asyncio.run(is_at_home(old))
    images = root / "images"
    images.mkdir()
    (images / "web.qcow2").write_text("the old disk")
    made = images / "web.qcow2.vmckpt-1"

    def making(state: Path) -> PendingQemu:
        new, old = (
            str(path).replace(str(root), str(state)) for path in (made, images / "web.qcow2")
        )
        return PendingQemu("00000002", SPEC, (), ((new, old),))

    async def restore() -> None:
        await write_down(old, making(root))
        write_image(made, "raw", 12, [(np.array([0]), b"the new disk")])
        if committed:
            await host.write_text(new.directory.current, new.qemu.to_json())
        await settle(host, "web")

    for when, state in cuts(root, restore, tmp_path):
        there = a_host(state)
        directory = vm_dir(state, "web")
        if directory.restoring.exists():
            directory.restoring.write_text(json.dumps(builtins(making(state))))
        asyncio.run(settle(there, "web"))
        found = asyncio.run(read_vm(there, "web"))
        assert found is not None, when
        disk = (state / "images/web.qcow2").read_text()
        was = found.qemu.files.qemu_id == "00000002"
        assert disk == ("the new disk" if was else "the old disk"), when
        assert sorted(path.name for path in (state / "images").iterdir()) == ["web.qcow2"], when


def test_a_run_record_is_whole_or_not_there(root: Path, tmp_path: Path) -> None:
    async def save() -> None:
        for _ in range(2):
            RunRecord("r1", "migrate", {}).save(root / "runs")

    for when, state in cuts(root, save, tmp_path):
        path = state / "runs/r1.json"
        assert not path.exists() or RunRecord.load(path).operation == "migrate", when


EMPTIED: dict[str, Callable[[VmDir], Path]] = {
    "vm.json": lambda directory: directory.current,
    "spec.toml": lambda directory: directory.spec,
    "migration.json": lambda directory: directory.journal,
    "restore.json": lambda directory: directory.restoring,
}


async def recovered(vm: Vm) -> None:
    """What the next command on a VM does after a power cut, but for the commands of its own."""
    await find_journal("web", [vm.host])
    await settle(vm.host, "web")
    await read_vm(vm.host, "web")


@pytest.mark.parametrize("name", EMPTIED)
@pytest.mark.parametrize("content", ["", "\0" * 300, "{", "[]", "{}"])
def test_a_record_that_an_older_vmckpt_left_empty_is_named_once(
    root: Path, name: str, content: str
) -> None:
    vm = a_vm(a_host(root), "00000001")
    asyncio.run(is_at_home(vm))
    path = EMPTIED[name](vm.directory)
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    with pytest.raises(VmckptError) as caught:
        asyncio.run(recovered(vm))
    found = caught.value
    assert path.name in found.what + found.why
    assert ("power cut" in found.why) == (not content.strip("\0"))
    assert len(found.remedy) > 10


@pytest.mark.parametrize("runs", [False, True])
@pytest.mark.parametrize("content", ["", "\0" * 300, "{", "[]"])
def test_a_damaged_list_of_missing_pages_counts_while_its_qemu_runs(
    root: Path, content: str, *, runs: bool
) -> None:
    """After a power cut none does: the memory that was to come is gone with it."""
    vm = a_vm(a_host(root), "00000001")
    qemu = vm.qemu._replace(process=identify(os.getpid()) or NOBODYS) if runs else vm.qemu
    qemu.files.path.mkdir(parents=True)
    qemu.files.missing.write_text(content)
    if not runs:
        assert asyncio.run(is_whole(vm.host, qemu))
        return
    with pytest.raises(StorageError, match=r"missing\.json on here is damaged") as caught:
        asyncio.run(is_whole(vm.host, qemu))
    assert "restore" in caught.value.remedy


def test_a_vm_with_a_damaged_record_hides_no_other(root: Path) -> None:
    host = a_host(root)
    asyncio.run(is_at_home(a_vm(host, "00000001")))
    broken = vm_dir(root, "broken")
    broken.path.mkdir()
    broken.spec.write_text(SPEC.replace("web", "broken"))
    broken.current.touch()
    answers = asyncio.run(inspect_all([host]))
    assert [look.vm.name for look in answers.given] == ["web"]
    assert [type(exc) for exc in answers.silent] == [StorageError]
    assert str(broken.current) in answers.silent[0].what
    assert answers.unanswered == ()


# Of images only their names matter here; what they hold is QEMU's to sync.
QEMU_IMG = '#!/bin/sh\n# create -q -f FORMAT PATH SIZE\ntruncate -s "$6" "$5"\n'


def with_qemu_img(host: LocalHost, tmp_path: Path) -> LocalHost:
    program = tmp_path / "qemu-img"
    program.write_text(QEMU_IMG)
    program.chmod(0o755)
    return replace(host, qemu=str(tmp_path / "qemu-system-x86_64"))


def test_a_new_vm_has_its_disk(root: Path, tmp_path: Path) -> None:
    """A guest that flushes its first writes must find them, not a disk that is made again."""
    host = with_qemu_img(a_host(root), tmp_path)
    image = root / "images/web.raw"

    async def start() -> None:
        await host.make_dir(image.parent)
        await create_image(host, image, "raw", 4096)
        await is_at_home(a_vm(host, "00000001"))

    for when, state in cuts(root, start, tmp_path):
        if asyncio.run(read_vm(a_host(state), "web")):
            assert (state / "images/web.raw").exists(), when


def test_an_image_is_whole_or_not_there(root: Path, tmp_path: Path) -> None:
    """Cut off while it was made it was empty, and the next `vm run` took it for the VM's disk."""
    host = with_qemu_img(a_host(root), tmp_path)
    image = root / "images/web.raw"

    async def make() -> None:
        await host.make_dir(image.parent)
        await create_image(host, image, "raw", 4096)

    found = cuts(root, make, tmp_path)
    seen = [(state / "images/web.raw") for _, state in found]
    assert {path.stat().st_size for path in seen if path.exists()} == {4096}
    assert [path.name for path in image.parent.iterdir()] == ["web.raw"]


def test_an_exported_domain_is_whole_or_not_there(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was said to be done, and was gone, or without its memory, after a power cut."""

    class Stored:
        manifest = manifest(facts())

        def area(self, _: str) -> "Stored":
            return self

        def stream(self) -> Iterator[tuple[Any, bytes]]:
            yield np.array([0]), b"1" * 65536

    store: Any = SimpleNamespace(read=lambda _: nullcontext(Stored()))
    monkeypatch.setattr(export, "write_save_image", lambda file, *_: file.write(b"memory"))

    async def work() -> None:
        export._export(store, "a" * 32, root / "out", lambda *_: None, lambda: None)

    states = cuts(root, work, tmp_path)
    for when, state in states:
        if (state / "out").exists():
            found = {path.name for path in (state / "out").iterdir() if path.stat().st_size}
            assert found == {"memory.save", "domain.xml", "vda.qcow2", "vdb.raw"}, when
    assert (states[-1][1] / "out").exists()  # whatever the file system promises


def test_a_copied_disk_is_where_the_vm_is(root: Path, tmp_path: Path) -> None:
    source, target = a_host(root / "a", "a"), a_host(root / "b", "b")
    target = with_qemu_img(target, tmp_path)
    asyncio.run(is_at_home(a_vm(source, "00000001")))
    old, new = root / "a/images/web.raw", root / "b/images/web.raw"
    old.parent.mkdir()
    old.write_text("the disk")
    (root / "b").mkdir(mode=0o700)
    arrived = a_vm(target, "00000002")
    kept = [MovedDisk(str(old), str(new))]

    async def move() -> None:
        copy = DiskCopy(0, "raw", False, 8, 8, old, new, "disk0", "disk0")
        await create_files(target, "web", "r1", [copy])
        with new.open("r+") as file:
            file.write("the disk")
            file.flush()
            os.fsync(file.fileno())
        await target.make_dir(arrived.directory.path)
        await target.write_text(arrived.directory.spec, SPEC)
        await settle_on_destination(End(target, arrived.qemu.files), arrived.qemu, source)
        await hand_over_files(source, target, "r1", kept, lambda _: None)

    for when, state in cuts(root, move, tmp_path):
        home = {name: asyncio.run(read_vm(a_host(state / name, name), "web")) for name in "ab"}
        assert any(home.values()), when
        for name in "ab":
            image = state / name / "images/web.raw"
            if home[name] and not (name == "a" and home["b"]):
                assert image.read_text() == "the disk", (when, name)
