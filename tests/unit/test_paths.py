"""A VM's files: where they stand, and that the kernel takes their names."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmckpt.errors import UsageError
from vmckpt.hosts.processes.process import ProcessId
from vmckpt.vm.paths import QemuDir, lock_path, new_qemu_id, vm_dir, vms_dir
from vmckpt.vm.record import Platform, Qemu

STATE = Path("/var/lib/vmckpt")
names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}", fullmatch=True)
ids = st.from_regex(r"[0-9a-f]{8}", fullmatch=True)


def test_a_vms_files_stand_together() -> None:
    files = vm_dir(STATE, "web")
    assert files.path == STATE / "vms/web"
    assert [path.name for path in (files.spec, files.current, files.journal)] == [
        "spec.toml",
        "vm.json",
        "migration.json",
    ]
    qemu = files.qemu("0123abcd")
    assert qemu.operator == STATE / "vms/web/qemu-0123abcd/qmp.sock"
    assert (qemu.vm_name, qemu.qemu_id) == ("web", "0123abcd")


def test_each_file_of_a_qemu_has_a_name_of_its_own() -> None:
    qemu = vm_dir(STATE, "web").qemu("0123abcd")
    paths = [
        qemu.operator,
        qemu.onlooker,
        qemu.rescue,
        qemu.pid,
        qemu.stderr,
        qemu.console,
        qemu.console_log,
        qemu.agent,
    ]
    assert len(set(paths)) == len(paths)
    assert all(path.parent == qemu.path for path in paths)


def test_a_lock_outlives_the_vms_directory() -> None:
    # `vm rm` removes the directory while it holds the lock.
    lock = lock_path(STATE, "web")
    assert vm_dir(STATE, "web").path not in lock.parents
    assert vms_dir(STATE) not in lock.parents


@given(names, ids, st.integers(0, 31))
def test_a_taps_name_fits_the_kernel(name: str, qemu_id: str, number: int) -> None:
    tap = QemuDir(STATE / "x", name, qemu_id).tap(number)
    assert len(tap) <= 15
    assert "/" not in tap
    assert not tap.isspace()


@given(names, names, ids, ids)
def test_two_qemus_never_share_ram_mark_or_tap(
    vm: str, other: str, qemu_id: str, other_id: str
) -> None:
    one, two = vm_dir(STATE, vm).qemu(qemu_id), vm_dir(STATE, other).qemu(other_id)
    if (vm, qemu_id) == (other, other_id):
        return
    ram_dir = Path("/dev/shm")
    assert one.ram(ram_dir) != two.ram(ram_dir)
    assert one.memory(ram_dir) != two.memory(ram_dir)
    assert one.mark not in two.mark
    if qemu_id != other_id:
        assert one.tap(0) != two.tap(0)


@pytest.mark.parametrize("is_loose", [False, True])
def test_the_memory_of_a_qemu_that_an_older_vmckpt_started_is_where_it_was(is_loose: bool) -> None:
    directory, ram_dir = vm_dir(STATE, "web"), Path("/dev/shm")
    qemu = Qemu(directory.qemu("0123abcd"), ProcessId(1, 2), Platform("q35", "tcg", "qemu64"))
    record = json.loads(qemu.to_json())
    if is_loose:  # as a25fa57 wrote it
        del record["memory"]
    read = Qemu.from_json(json.dumps(record), directory)
    where = "vmckpt-web-0123abcd" + (".ram" if is_loose else "/ram")
    assert read.files.ram(ram_dir) == ram_dir / where
    assert Qemu.from_json(read.to_json(), directory) == read


def test_qemu_ids_are_eight_hex_digits_and_new_each_time() -> None:
    drawn = {new_qemu_id() for _ in range(100)}
    assert len(drawn) == 100
    assert all(len(qemu_id) == 8 and int(qemu_id, 16) >= 0 for qemu_id in drawn)


@pytest.mark.parametrize("name", ["/etc/passwd", "../web", "..", ".", "", "a/b", "a\0b", "a" * 256])
def test_a_name_that_leads_elsewhere_is_no_vms(name: str) -> None:
    for location in (vm_dir, lock_path):
        with pytest.raises(UsageError, match="not a name for a VM"):
            location(STATE, name)
