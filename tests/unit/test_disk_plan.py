"""Which disks are copied: decided from what was found on both hosts."""

import asyncio
from pathlib import Path

import pytest

from tests.faulty_host import Fault, FaultyHost
from vmckpt.errors import OperationFailedError
from vmckpt.hosts.local import LocalHost
from vmckpt.migrate.steps.disks import SILENCE_S, STALL_S, CopyWatch
from vmckpt.options.migration import Disks
from vmckpt.preflight.migration.disks import DiskCopy, DiskPaths, Owned, decide_disks, plan_disks
from vmckpt.qemu.block import DiskImage
from vmckpt.vm.spec.spec import Disk

HERE, THERE = Path("/a/images/root.qcow2"), Path("/b/images/root.qcow2")
DISK = Disk(Path("images/root.qcow2"), "qcow2", None, False, "none", "disk0")
NODES = ("disk0",)
IMAGES = {"disk0": DiskImage("disk0", 1 << 30, 5 << 20, ())}


def location(
    *, shared: bool | None = False, why: str = "", taken: bool = False, directory: bool = True
) -> DiskPaths:
    return DiskPaths(
        0, HERE, THERE, shared, why, destination_taken=taken, destination_has_directory=directory
    )


def test_a_disk_that_is_not_shared_is_copied() -> None:
    plan = decide_disks([DISK], NODES, [location()], IMAGES)
    nodes = ("disk0", "disk0")
    assert plan.copies == (DiskCopy(0, "qcow2", False, 1 << 30, 5 << 20, HERE, THERE, *nodes),)
    assert (plan.shared, plan.obstacles) == ((), ())


def test_a_shared_disk_stays_where_it_is() -> None:
    # On shared storage the file is on the target too, of course.
    plan = decide_disks([DISK], NODES, [location(shared=True, taken=True)], {})
    assert (plan.shared, plan.copies, plan.obstacles) == ((THERE,), (), ())


@pytest.mark.parametrize(
    ("there", "is_shared"),
    [("web.qcow2", True), ("link.qcow2", True), ("other.qcow2", False), ("wrong.qcow2", False)],
)
def test_another_image_in_a_shared_folder_is_not_the_same_disk(
    tmp_path: Path, there: str, *, is_shared: bool
) -> None:
    hosts = [LocalHost(name, tmp_path / name, "192.0.2.1") for name in ("a", "b")]
    for name in ("web.qcow2", "other.qcow2"):
        (tmp_path / name).touch()
    (tmp_path / "link.qcow2").symlink_to(tmp_path / "web.qcow2")
    (tmp_path / "wrong.qcow2").symlink_to(tmp_path / "other.qcow2")
    disk = DISK._replace(path=tmp_path / "web.qcow2")
    owned = Owned(hosts[0], "web", (disk,), NODES, {"disk0": tmp_path / there})
    plan = asyncio.run(plan_disks(owned, hosts[1], Disks.AUTO, IMAGES))
    assert plan.shared == ((tmp_path / there,) if is_shared else ())
    # Nor is it written over.
    assert [one.code for one in plan.obstacles] == ([] if is_shared else ["disk-target"])


@pytest.mark.parametrize("how", [Disks.AUTO, Disks.COPY])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        # A volume of LVM, and one that is not active: it is not there.
        ("/dev/loop0", "/dev/loop0"),
        ("/dev/pve/vm-100-disk-0", "/dev/pve/vm-100-disk-0"),
        ("web.raw", "/dev/pve/vm-100-disk-0"),
        ("/dev/pve/vm-100-disk-0", "web.raw"),
        ("web.raw", str(THERE)),
    ],
)
def test_a_device_is_neither_copied_nor_copied_to(
    tmp_path: Path, source: str, target: str, how: Disks
) -> None:
    device = Fault("is_block_device", by=lambda path: path == THERE)
    hosts = [FaultyHost(name, tmp_path / name, "192.0.2.1", faults=(device,)) for name in "ab"]
    (tmp_path / "web.raw").touch()
    disk = DISK._replace(path=tmp_path / source)
    owned = Owned(hosts[0], "web", (disk,), NODES, {"disk0": tmp_path / target})
    plan = asyncio.run(plan_disks(owned, hosts[1], how, IMAGES))
    (obstacle,) = plan.obstacles
    assert (obstacle.code, plan.copies) == ("disk-device", ())
    assert "--disks shared" in obstacle.remedy
    assert "copy" not in obstacle.remedy
    shared = asyncio.run(plan_disks(owned, hosts[1], Disks.SHARED, IMAGES))
    assert (shared.shared, shared.obstacles) == ((tmp_path / target,), ())


def test_an_image_in_memory_is_no_device(tmp_path: Path) -> None:
    hosts = [LocalHost(name, tmp_path / name, "192.0.2.1") for name in ("a", "b")]
    disk = DISK._replace(path=Path("/dev/shm/vmckpt-no-such-image.raw"))
    owned = Owned(hosts[0], "web", (disk,), NODES)
    plan = asyncio.run(plan_disks(owned, hosts[1], Disks.COPY, IMAGES))
    assert [copy.target for copy in plan.copies] == [disk.path]


@pytest.mark.parametrize(
    ("found", "code", "words"),
    [
        (location(shared=None, why="read-only"), "disk-shared", "read-only"),
        (location(taken=True), "disk-target", "never written over"),
        (location(directory=False), "disk-target", "no directory /b/images"),
    ],
)
def test_what_cannot_be_copied_is_an_obstacle(found: DiskPaths, code: str, words: str) -> None:
    plan = decide_disks([DISK], NODES, [found], IMAGES)
    (obstacle,) = plan.obstacles
    assert (obstacle.code, words in obstacle.reason, plan.copies) == (code, True, ())
    assert obstacle.remedy


def test_snapshots_that_a_copy_would_lose_are_named() -> None:
    images = {"disk0": DiskImage("disk0", 1 << 30, 5 << 20, ("before", "after"))}
    (obstacle,) = decide_disks([DISK], NODES, [location()], images).obstacles
    assert obstacle.code == "disk-snapshots"
    assert "before, after" in obstacle.reason


def test_a_stopped_vm_has_nothing_to_copy() -> None:
    plan = decide_disks([DISK], NODES, [location()], {})
    assert (plan.copies, plan.obstacles) == ((), ())


def test_a_disk_that_a_running_qemu_does_not_know_by_its_node_does_not_drop_out() -> None:
    others = {"#block124": DiskImage("#block124", 1 << 30, 5 << 20, ())}
    plan = decide_disks([DISK], NODES, [location()], others)
    (obstacle,) = plan.obstacles
    assert (obstacle.code, plan.copies) == ("disk-node", ())
    assert "'disk0'" in obstacle.reason


def test_a_copy_that_moves_but_comes_no_nearer_is_told_once() -> None:
    watch = CopyWatch(0.0)
    said = [watch.stalls(second, 100, float(second)) for second in range(60)]
    assert said.index(True) == STALL_S + 1
    assert said.count(True) == 1


def test_a_copy_that_comes_nearer_does_not_stall() -> None:
    watch = CopyWatch(0.0)
    assert not any(watch.stalls(second, 1000 - second, float(second)) for second in range(200))


def test_a_copy_in_which_nothing_moves_fails() -> None:
    watch = CopyWatch(0.0)
    watch.stalls(5, 100, 1.0)
    watch.stalls(5, 100, 1.0 + SILENCE_S)
    with pytest.raises(OperationFailedError, match="makes no progress"):
        watch.stalls(5, 100, 1.1 + SILENCE_S)


def test_the_files_behind_a_shared_disk_have_to_be_there_too() -> None:
    chain = ("/images/base.qcow2", 'json:{"driver":"nbd"}', "/images/bottom.raw")
    images = {"disk0": DiskImage("disk0", 1 << 30, 5 << 20, (), chain)}
    plan = decide_disks([DISK], NODES, [location(shared=True)], images)
    assert plan.shared == (THERE, Path("/images/base.qcow2"), Path("/images/bottom.raw"))
