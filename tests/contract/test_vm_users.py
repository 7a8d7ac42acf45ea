"""A VM's own user gets the files that its QEMU needs, and no way to any other."""

import asyncio
import os
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.remote_hosts import PipedServes
from vmckpt.errors import HostDownError, RefusedError, StorageError
from vmckpt.hosts import uids
from vmckpt.hosts.grants import Grant, GrantKind
from vmckpt.hosts.host import Host
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes.process import ProcessId, identify
from vmckpt.hosts.uids import Uids
from vmckpt.migrate.outcome.ends import End
from vmckpt.migrate.steps.disk_files import MovedDisk, hand_over_files
from vmckpt.migrate.steps.handover import find_qemu
from vmckpt.preflight.finding import ask
from vmckpt.preflight.vm_users import host_checks
from vmckpt.vm.disks.images import HostImage, remove_image
from vmckpt.vm.identity import new_identity
from vmckpt.vm.paths import QemuDir, vm_dir
from vmckpt.vm.record import Platform
from vmckpt.vm.spec.spec import parse_spec
from vmckpt.vm.start import end_qemu, processes
from vmckpt.vm.users.users import VmUser, set_up, take_back, uid_of, user_of

T = TypeVar("T")
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
UIDS = Uids(2_000_000_000, 2_000_100_000)
ME, OTHER, PERSON = 2_000_000_007, 2_000_000_008, 65534
# Every user can reach it.
PYTHON = "/usr/bin/python3"
SPEC = """\
name = "guest"
memory = "16M"

[[disks]]
path = "{disk}"
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where every user can pass through."""
    for path in (tmp_path, *tmp_path.parents):
        if path.stat().st_uid == os.geteuid() and not path.stat().st_mode & stat.S_IXOTH:
            path.chmod(path.stat().st_mode | stat.S_IXOTH)
    return tmp_path


@pytest.fixture
def host(place: Path) -> LocalHost:
    return LocalHost("a", place / "state", "127.0.0.1", vm_uids=UIDS)


WAITS = "import time; print('here', flush=True); time.sleep(60)"
PLATFORM = Platform("q35", "tcg", "qemu64")


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def grant(host: Host, kind: GrantKind, path: Path, number: int = ME) -> list[int]:
    return run(host.grant([Grant(kind, path, number)], UIDS))


def shown(path: Path) -> tuple[int, int, int]:
    found = path.lstat()
    return found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)


def may(user: VmUser, test: str, path: Path) -> bool:
    argv = user.command(["test", test, str(path)])
    return subprocess.run(argv, check=False).returncode == 0


def test_files_are_given(host: LocalHost, place: Path) -> None:
    for name in ("image", "base", "open"):
        (place / name).write_text("x")
        (place / name).chmod(0o600 if name != "open" else 0o644)
    (place / "way").mkdir(mode=0o700)
    grant(host, GrantKind.OWN, place / "image")
    grant(host, GrantKind.MADE, place / "new")
    grant(host, GrantKind.READ, place / "base", UIDS.first)
    grant(host, GrantKind.READ, place / "open", UIDS.first)
    grant(host, GrantKind.ENTRANCE, place / "way", UIDS.first)
    grant(host, GrantKind.DIRECTORY, place / "own")
    grant(host, GrantKind.LINK, place / "sock")
    assert shown(place / "image") == shown(place / "new") == (ME, ME, 0o600)
    assert shown(place / "base") == (0, UIDS.first, 0o640)
    assert shown(place / "open") == (0, os.getegid(), 0o644)
    assert shown(place / "way") == (0, UIDS.first, 0o710)
    assert shown(place / "own") == (ME, ME, 0o700)
    assert (place / "sock").readlink() == Path("own/sock")
    # One that was another VM's, of an earlier range or identity.
    grant(host, GrantKind.OWN, place / "image", OTHER)
    assert shown(place / "image") == (OTHER, OTHER, 0o600)


def test_a_host_elsewhere_gives_the_same(place: Path) -> None:
    serves = PipedServes()

    async def work() -> None:
        host = serves.host(place / "state")
        try:
            assert await host.grant([Grant(GrantKind.MADE, place / "new", ME)], UIDS) == []
            with pytest.raises(RefusedError, match="cannot be given"):
                await host.grant([Grant(GrantKind.OWN, place, ME)], UIDS)
        finally:
            await host.close()
            serves.end()

    run(work())
    assert shown(place / "new") == (ME, ME, 0o600)


@pytest.mark.parametrize("kind", [GrantKind.OWN, GrantKind.READ])
def test_a_persons_file_and_a_link_stay(host: LocalHost, place: Path, kind: GrantKind) -> None:
    (place / "theirs").write_text("x")
    (place / "theirs").chmod(0o600)
    os.chown(place / "theirs", PERSON, PERSON)
    (place / "link").symlink_to("theirs")
    with pytest.raises(RefusedError) as refused:
        grant(host, kind, place / "theirs")
    assert f"uid {PERSON}" in refused.value.why
    with pytest.raises(RefusedError):
        grant(host, kind, place / "link")
    assert shown(place / "theirs") == (PERSON, PERSON, 0o600)
    with pytest.raises(StorageError, match=r"cannot make a VM.s own user the owner"):
        grant(host, kind, place / "gone")
    assert not (place / "gone").exists()


def prepared(host: LocalHost, name: str, identity: str) -> QemuDir:
    directory = vm_dir(host.state_dir, name)
    files = directory.qemu("12345678")
    run(host.make_dir(files.path))
    run(host.write_text(directory.identity, f"{identity}\n"))
    return files


@pytest.fixture
def files(host: LocalHost) -> Iterator[QemuDir]:
    found = prepared(host, "guest", new_identity())
    memory = found.memory(Path("/dev/shm"))
    run(host.make_private_dir(memory))
    yield found
    run(host.remove(memory))


def set_it_up(host: LocalHost, files: QemuDir, disk: Path) -> VmUser:
    spec = parse_spec(SPEC.format(disk=disk), "spec", host.state_dir)
    user = run(set_up(host, spec, files, has_kvm=False))
    assert user is not None
    return user


def image(path: Path, backing: Path | None = None, kind: bytes = b"") -> Path:
    """As much of a qcow2 image as says what it stands on, of which `kind`."""
    name = str(backing).encode() if backing else b""
    header = b"QFI\xfb" + (3).to_bytes(4) + (512 if backing else 0).to_bytes(8)
    header = (header + len(name).to_bytes(4)).ljust(100, b"\0") + (104).to_bytes(4)
    if kind:
        header += (0xE2792ACA).to_bytes(4) + len(kind).to_bytes(4) + kind
    path.write_bytes(header.ljust(512, b"\0") + name)
    path.chmod(0o600)
    return path


def test_a_vm_has_its_own_files_and_its_base_and_no_other(
    host: LocalHost, place: Path, files: QemuDir, device: Path
) -> None:
    base = image(place / "base.qcow2")
    disk = image(place / "disk.qcow2", base)
    user = set_it_up(host, files, disk)
    other = VmUser(user.uid + 1, UIDS)
    assert may(user, "-w", disk)
    assert not may(other, "-r", disk)
    assert may(user, "-r", base)
    assert not may(user, "-w", base)
    assert may(user, "-w", files.own)
    for path in (files.path, files.path.parent, files.user, files.path.parent / "identity"):
        assert not may(user, "-r", path), path
        assert not may(user, "-w", path), path
    assert not may(other, "-x", files.path.parent)
    assert run(user_of(host, files)) == user._replace(groups=())
    run(take_back(host, files))


def test_what_a_vm_writes_into_its_own_image_opens_nothing(
    host: LocalHost, place: Path, files: QemuDir, device: Path
) -> None:
    disk, secret = image(place / "disk.qcow2"), place / "secret"
    user = set_it_up(host, files, disk)
    secret.write_text("root's")
    secret.chmod(0o600)
    # It has broken out of QEMU, and has its image stand on that; then it is started again.
    image(disk, secret)
    assert disk.stat().st_uid == user.uid
    set_it_up(host, files, disk)
    assert shown(secret) == (0, os.getegid(), 0o600)


@pytest.mark.timeout(30)
def test_images_that_stand_on_one_another_are_followed_once(
    host: LocalHost, place: Path, files: QemuDir, device: Path
) -> None:
    """`vm start` never came back."""
    disk = image(place / "disk.qcow2", place / "base.qcow2", b"qcow2")
    base = image(place / "base.qcow2", disk, b"qcow2")
    user = set_it_up(host, files, disk)
    assert may(user, "-w", disk)
    assert not may(user, "-w", base)


def test_two_vms_are_never_the_same_user(
    host: LocalHost, place: Path, files: QemuDir, device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uids, "LEAST_USERS", 3)
    few = Uids(UIDS.first, UIDS.first + 2)  # no range that anyone may set
    narrow = LocalHost("a", host.state_dir, "127.0.0.1", vm_uids=few)
    identity = new_identity()
    assert uid_of(identity, few) == UIDS.first + 1
    prepared(host, "other", identity)
    with pytest.raises(RefusedError) as refused:
        set_it_up(narrow, files, image(place / "disk.qcow2"))
    assert "the same user as 'other'" in refused.value.what
    assert "--vm-uids" in refused.value.remedy


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ('[[passthrough]]\nid = "gpu0"\nmatch = "10de:2330"\n',
         "VFIO"),
        ('[[devices]]\ndriver = "vfio-pci"\nhost = "0000:01:00.0"\n', "vfio-pci"),
    ],
)  # fmt: skip
def test_what_cannot_be_given_is_refused_by_name(
    host: LocalHost, files: QemuDir, more: str, why: str
) -> None:
    spec = parse_spec(f'name = "guest"\nmemory = "16M"\n{more}', "spec", host.state_dir)
    with pytest.raises(RefusedError, match="a user of its own") as refused:
        run(set_up(host, spec, files, has_kvm=False))
    assert why in refused.value.why


def test_a_link_that_a_vm_made_is_not_followed(host: LocalHost, place: Path) -> None:
    (place / "own").mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place / "own/qmp.sock"))
        listener.listen()
        (place / "qmp.sock").symlink_to("own/qmp.sock")
        run(host.connect(place / "qmp.sock")).close()
        (place / "own/qmp.sock").rename(place / "other.sock")
        (place / "own/qmp.sock").symlink_to("../other.sock")
        os.chown(place / "own/qmp.sock", ME, ME, follow_symlinks=False)
        with pytest.raises(HostDownError) as refused:
            run(host.connect(place / "qmp.sock"))
        assert "another user created a link there" in refused.value.why


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, place: Path) -> Path:
    """In the place of this machine's own, which others use too."""
    path = place / "userfaultfd"
    os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    monkeypatch.setattr("vmckpt.vm.users.users.USERFAULTFD", path)
    return path


def test_a_device_of_roots_alone_becomes_a_groups(host: LocalHost, device: Path) -> None:
    assert grant(host, GrantKind.DEVICE, device, UIDS.last) == []
    assert shown(device) == (0, UIDS.last, 0o660)
    # One of a group's stays that group's, which is joined; one of everyone's stays so.
    assert grant(host, GrantKind.DEVICE, device, 42) == [UIDS.last]
    device.chmod(0o666)
    os.chown(device, 0, 0)
    assert grant(host, GrantKind.DEVICE, device, UIDS.last) == []
    assert shown(device) == (0, 0, 0o666)


HOLDS_A_TAP = """\
import fcntl, os, struct, sys
tap = os.open("/dev/net/tun", os.O_RDWR)
fcntl.ioctl(tap, 0x400454CA, struct.pack("16sH14x", b"vktest0", 0x1002))
print("has it", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not os.access("/dev/net/tun", os.W_OK), reason="it makes a tap")
def test_a_tap_that_was_made_for_a_process_goes_with_it() -> None:
    alone = ["unshare", "--net", "sleep", "60"]
    with subprocess.Popen(alone) as namespace:
        enter = ["nsenter", f"--net=/proc/{namespace.pid}/ns/net"]

        def listed() -> str:
            shown = subprocess.run(
                [*enter, "ip", "-br", "link"], capture_output=True, text=True, check=True
            )
            return shown.stdout

        try:
            while Path(f"/proc/{namespace.pid}/comm").read_text() != "sleep\n":
                pass
            add = ["ip", "tuntap", "add", "dev", "vktest0", "mode", "tap", "user", str(ME)]
            subprocess.run([*enter, *add], check=True)
            holder = subprocess.Popen(
                [*enter, sys.executable, "-c", HOLDS_A_TAP],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            with holder:
                assert holder.stdout is not None
                assert holder.stdout.readline() == "has it\n"
                assert "vktest0" in listed()
                here = LocalHost("a", Path("/"), "127.0.0.1")
                run(here.bind_taps(identify(holder.pid) or ProcessId(0, 0)))
                assert "vktest0" in listed()
            assert "vktest0" not in listed()
            with pytest.raises(HostDownError):
                run(here.bind_taps(ProcessId(holder.pid, 0)))
        finally:
            namespace.kill()


def test_what_hosts_lack_of_users_for_vms_is_said(host: LocalHost, place: Path) -> None:
    def verdict(of: LocalHost) -> tuple[str, str]:
        [check] = run(ask(host_checks(of)))
        return check.verdict, check.reason

    run(host.make_dir(host.state_dir))
    assert verdict(host)[0] == "ok"  # whether there is a QEMU or not
    assert verdict(replace(host, vm_uids=None))[0] == "warn"
    program = place / "closed/qemu"
    program.parent.mkdir(mode=0o700)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    refused, why = verdict(replace(host, qemu=str(program)))
    assert refused == "refuse"
    assert f"{program}: {program.parent} is closed" in why


def overlay(path: Path, backing: Path, kind: str = "") -> Path:
    """The same with the word for what kind of image it stands on."""
    name, word = str(backing).encode(), kind.encode()
    header = b"QFI\xfb" + (3).to_bytes(4) + (512).to_bytes(8) + len(name).to_bytes(4)
    extension = (0xE2792ACA).to_bytes(4) + len(word).to_bytes(4) + word if kind else b""
    before = header.ljust(100, b"\0") + (104).to_bytes(4) + extension
    path.write_bytes(before.ljust(512, b"\0") + name)
    path.chmod(0o600)
    return path


def closed(path: Path) -> Path:
    path.write_text("root's")
    path.chmod(0o600)
    return path


def test_a_guest_that_writes_a_header_into_its_raw_disk_opens_nothing(
    host: LocalHost, place: Path, files: QemuDir, device: Path
) -> None:
    """The image is still root's: it was restored, or its VM had no user when it wrote that."""
    secret = closed(place / "secret")
    raw = image(place / "disk.raw", secret)
    spec = f'name = "guest"\nmemory = "16M"\n[[disks]]\npath = "{raw}"\nformat = "raw"\n'
    run(set_up(host, parse_spec(spec, "spec", host.state_dir), files, has_kvm=False))
    assert raw.stat().st_uid in UIDS
    assert shown(secret) == (0, os.getegid(), 0o600)


@pytest.mark.parametrize("kind", ["raw", ""])
def test_a_raw_base_names_no_file_that_is_opened(
    host: LocalHost, place: Path, files: QemuDir, device: Path, kind: str
) -> None:
    """As that of forks, which holds what the guest of the checkpoint wrote."""
    secret = closed(place / "secret")
    base = image(place / "base", secret)
    user = set_it_up(host, files, overlay(place / "disk.qcow2", base, kind))
    assert may(user, "-r", base)
    assert shown(secret) == (0, os.getegid(), 0o600)


def test_a_chain_that_root_named_is_opened(
    host: LocalHost, place: Path, files: QemuDir, device: Path
) -> None:
    lowest = closed(place / "lowest")
    base = overlay(place / "base", lowest, "raw")
    user = set_it_up(host, files, overlay(place / "disk.qcow2", base, "qcow2"))
    assert may(user, "-r", base)
    assert may(user, "-r", lowest)
    assert not may(user, "-w", lowest)


def test_a_chain_below_a_link_is_where_qemu_looks_for_it(
    host: LocalHost, place: Path, files: QemuDir, device: Path
) -> None:
    """An image moved to a larger disk, a link in its place: its VM did not start any more."""
    base, larger = closed(place / "base"), place / "larger"
    larger.mkdir()
    larger.chmod(0o755)
    overlay(larger / "disk.qcow2", Path("base"), "raw")
    link = place / "disk.qcow2"
    link.symlink_to(larger / "disk.qcow2")
    user = set_it_up(host, files, link)
    assert may(user, "-w", larger / "disk.qcow2")
    assert may(user, "-r", base)


def test_what_a_vm_wrote_is_not_believed_as_anothers_base(
    host: LocalHost, place: Path, files: QemuDir, device: Path
) -> None:
    secret = closed(place / "secret")
    base = image(place / "base", secret)
    os.chown(base, OTHER, OTHER)
    user = set_it_up(host, files, overlay(place / "disk.qcow2", base, "qcow2"))
    assert may(user, "-r", base)
    assert not may(VmUser(OTHER, UIDS), "-w", base)
    # Another VM is made over it.
    set_it_up(host, files, overlay(place / "second.qcow2", base, "qcow2"))
    assert shown(secret) == (0, os.getegid(), 0o600)


def test_roots_environment_is_not_its_vms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of a store")
    monkeypatch.setenv("LANG", "C.UTF-8")
    argv = VmUser(ME, UIDS).command(["cat", "/proc/self/environ"])
    shown = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
    assert "of a store" not in shown
    assert "LANG=C.UTF-8" in shown


def test_no_other_users_process_passes_for_a_vms_qemu(
    host: LocalHost, place: Path, files: QemuDir, device: Path
) -> None:
    set_it_up(host, files, image(place / "disk.qcow2"))
    elsewhere = prepared(host, "other", new_identity())  # its QEMU is root's
    for mine in (files, elsewhere):
        argv = VmUser(OTHER, UIDS).command([PYTHON, "-c", WAITS, *mine.mark.split("\0")])
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as pretends:
            assert pretends.stdout
            assert pretends.stdout.readline() == "here\n"
            assert run(host.find_processes(mine.mark, of_anyone=True)) == [identify(pretends.pid)]
            assert run(processes(host, mine)) == []
            assert run(find_qemu(End(host, mine), PLATFORM)) is None
            pretends.kill()


# Root has a key in its session, and starts a VM's QEMU, and something else as its user.
HAS_KEYS = """\
import asyncio, ctypes, os, sys
from pathlib import Path
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.uids import make_uids
from vmckpt.vm.users.users import VmUser

libc, place, python = ctypes.CDLL(None), Path(sys.argv[1]), sys.argv[2]
assert libc.syscall(250, 1, None) > 0
assert libc.syscall(248, b"user", b"vmckpt-test", b"x", 1, -3) > 0
look = "import ctypes; print(ctypes.CDLL(None).syscall(250, 10, -3, b'user', b'vmckpt-test', 0))"
user = VmUser(2_000_000_007, make_uids(2_000_000_000, 2_000_100_000))

async def work():
    host = LocalHost("a", place, "127.0.0.1")
    argv = [python, "-c", look]
    print((await host.run(argv)).stdout)
    print((await host.run(user.command(argv))).stdout)
    process = await host.spawn(user.command(argv), place / "log")
    while await host.is_alive(process):
        await asyncio.sleep(0.01)
    print((place / "log").read_text())

asyncio.run(work())
"""


def test_keys_of_roots_session_are_not_its_vms(place: Path) -> None:
    argv = [sys.executable, "-c", HAS_KEYS, str(place), PYTHON]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if "assert libc" in done.stderr:
        pytest.skip("the kernel gives no keys here")
    before, *theirs = done.stdout.split()
    assert int(before) > 0
    assert theirs == ["-1", "-1"], done.stderr


def test_what_lies_behind_a_closed_directory_is_not_found_from_roots_own(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = place / "root"
    (closed / "project").mkdir(parents=True)
    closed.chmod(0o700)
    (closed / "project").chmod(0o755)
    (closed / "project" / "password").write_text("root's")
    (closed / "project" / "password").chmod(0o644)
    monkeypatch.chdir(closed / "project")
    done = subprocess.run(
        VmUser(ME, UIDS).command(["sh", "-c", "pwd; cat password"]),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout == "/\n"


# It forgets its command line, as whoever has a QEMU can, and starts another process.
HIDES = """\
import ctypes, os, sys, time
start = int(open("/proc/self/stat").read().rpartition(")")[2].split()[45])
length = len(open("/proc/self/cmdline", "rb").read())
ctypes.memset(start, 0x78, length)
if os.fork() == 0:
    os.setsid()
print("hidden", flush=True)
time.sleep(600)
"""


def test_nothing_of_a_vms_user_outlasts_its_qemu(
    host: LocalHost, place: Path, files: QemuDir, device: Path
) -> None:
    user = set_it_up(host, files, image(place / "disk.qcow2"))
    argv = user.command([PYTHON, "-I", "-S", "-c", HIDES, *files.mark.split("\0")])
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as hidden:
        assert hidden.stdout is not None
        assert [hidden.stdout.readline() for _ in range(2)] == ["hidden\n"] * 2
        assert not run(host.find_processes(files.mark))
        assert hidden.pid in {one.pid for one in run(processes(host, files))}
        run(end_qemu(host, Path("/dev/shm"), files))
        assert hidden.wait(10) == -9
    assert not run(host.find_processes_of(user.uid))
    assert not files.path.exists()


def test_another_qemu_of_the_same_vm_runs_on(
    host: LocalHost, place: Path, files: QemuDir, device: Path
) -> None:
    """Hosts may be one machine, and a VM moves between them."""
    user = set_it_up(host, files, image(place / "disk.qcow2"))
    other = vm_dir(host.state_dir, "guest").qemu("87654321")
    run(host.make_dir(other.path))
    run(host.write_text(other.user, user.to_json()))
    sleep = [PYTHON, "-I", "-S", "-c", "import time; time.sleep(600)"]
    stranger = place / "own"
    stranger.mkdir()
    (stranger / "user.json").write_text(user.to_json())
    os.chown(stranger, user.uid, user.uid)
    with (
        subprocess.Popen(user.command([*sleep, *other.mark.split("\0")])) as kept,
        subprocess.Popen(user.command([*sleep, "-pidfile", str(stranger / "pid")])) as claims,
    ):
        try:
            while len(run(host.find_processes_of(user.uid))) < 2:
                pass
            run(end_qemu(host, Path("/dev/shm"), files))
            assert claims.wait(10) == -9
            assert kept.poll() is None
        finally:
            run(end_qemu(host, Path("/dev/shm"), other))
        assert kept.wait(10) == -9


@pytest.mark.parametrize("is_link", [True, False])
def test_no_record_that_every_user_may_write_names_another_qemu(
    host: LocalHost, place: Path, files: QemuDir, device: Path, *, is_link: bool
) -> None:
    """It hid behind a record of its own in /tmp, a directory of root's."""
    user = set_it_up(host, files, image(place / "disk.qcow2"))
    shared = place / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    record = shared / "user.json"
    if is_link:
        record.symlink_to(files.user)
    else:
        record.write_text(user.to_json())
    os.lchown(record, user.uid, user.uid)
    sleep = [PYTHON, "-I", "-S", "-c", WAITS, "-pidfile", str(shared / "pid")]
    with subprocess.Popen(user.command(sleep), stdout=subprocess.PIPE) as claims:
        assert claims.stdout is not None
        assert claims.stdout.readline() == b"here\n"
        run(end_qemu(host, Path("/dev/shm"), files))
        try:
            assert claims.wait(2) == -9
        finally:
            claims.kill()


class Theirs:
    """A VM's image in a directory that belongs to another user, beside what is root's."""

    def __init__(self, place: Path, host: LocalHost) -> None:
        self.host, self.told = host, list[str]()
        self.secret, self.tree = place / "secret", place / "tree"
        self.secret.write_text("root's")
        self.tree.mkdir()
        (self.tree / "file").write_text("root's")
        self.directory = place / "theirs"
        self.directory.mkdir()
        self.image = self.directory / "disk.raw"
        self.image.write_text("a disk")
        os.chown(self.directory, PERSON, PERSON)
        run(host.make_dir(host.state_dir))

    def leads_to(self, path: Path) -> None:
        self.image.unlink()
        self.image.symlink_to(path)
        os.lchown(self.image, PERSON, PERSON)

    def hand_over(self, image: Path | None = None) -> None:
        moved = [MovedDisk(str(image or self.image), "/nowhere/disk.raw")]
        run(hand_over_files(self.host, self.host, "r1", moved, self.told.append))

    def is_whole(self) -> bool:
        return self.secret.exists() and (self.tree / "file").exists()


@pytest.fixture
def theirs(place: Path, host: LocalHost) -> Theirs:
    return Theirs(place, host)


def test_the_image_of_a_vm_that_moved_goes_from_a_users_directory(theirs: Theirs) -> None:
    theirs.hand_over()
    assert not theirs.image.exists()
    assert theirs.told == []


@pytest.mark.parametrize("what", ["secret", "tree"])
def test_a_user_has_nothing_of_roots_removed_by_a_link_in_place_of_an_image(
    theirs: Theirs, what: str
) -> None:
    """Root removed the file, or all of the directory, to which it led."""
    theirs.leads_to(getattr(theirs, what))
    theirs.hand_over()
    assert theirs.is_whole()
    [told] = theirs.told
    assert "the VM's old image stays" in told
    assert f"uid {PERSON}" in told


def test_nor_by_a_link_in_place_of_a_directory_above(theirs: Theirs) -> None:
    below = theirs.directory / "images"
    below.mkdir()
    (below / "file").write_text("a disk")
    image = below / "file"
    shutil.rmtree(below)
    below.symlink_to(theirs.tree)
    os.lchown(below, PERSON, PERSON)
    theirs.hand_over(image)
    assert theirs.is_whole()


def test_nor_as_an_image_that_is_removed_with_its_vm(theirs: Theirs) -> None:
    theirs.leads_to(theirs.secret)
    found = HostImage(theirs.image, 6, 4096, ())
    with pytest.raises(StorageError):
        run(remove_image(theirs.host, found))
    assert theirs.is_whole()
    # The owner of a directory may be one whose state this is.
    os.chown(theirs.host.state_dir, PERSON, PERSON)
    theirs.leads_to(theirs.secret)
    theirs.hand_over()
    assert not theirs.secret.exists()


def given(theirs: Theirs, files: QemuDir, disk: Path) -> VmUser:
    """As a VM with that image starts."""
    return set_it_up(replace(theirs.host, vm_uids=UIDS), files, disk)


def test_no_file_of_roots_is_a_vms_by_a_link_in_place_of_its_image(
    theirs: Theirs, files: QemuDir, device: Path
) -> None:
    """It became that VM's, and its guest could read and write it."""
    before = shown(theirs.secret)
    theirs.leads_to(theirs.secret)
    with pytest.raises(RefusedError, match="cannot be given") as refused:
        given(theirs, files, theirs.image)
    assert "'disk.raw'" in refused.value.why
    assert shown(theirs.secret) == before
    # Nor by a link of root's that this user has moved there.
    os.lchown(theirs.image, 0, 0)
    with pytest.raises(RefusedError, match="cannot be given"):
        given(theirs, files, theirs.image)
    assert shown(theirs.secret) == before


def test_nor_as_what_an_image_stands_on(theirs: Theirs, files: QemuDir, device: Path) -> None:
    base = theirs.directory / "base.qcow2"
    disk = image(theirs.directory / "disk.qcow2", base, b"raw")
    theirs.secret.chmod(0o600)
    before = shown(theirs.secret)
    base.symlink_to(theirs.secret)
    os.lchown(base, PERSON, PERSON)
    text = SPEC.format(disk=disk) + 'format = "qcow2"\n'
    spec = parse_spec(text, "spec", theirs.host.state_dir)
    with pytest.raises(RefusedError, match="cannot be given"):
        run(set_up(replace(theirs.host, vm_uids=UIDS), spec, files, has_kvm=False))
    assert shown(theirs.secret) == before


def test_nor_by_a_link_in_place_of_a_directory_above_it(
    theirs: Theirs, files: QemuDir, device: Path
) -> None:
    (theirs.tree / "file").chmod(0o600)
    before = shown(theirs.tree / "file")
    below = theirs.directory / "images"
    below.symlink_to(theirs.tree)
    os.lchown(below, PERSON, PERSON)
    with pytest.raises(RefusedError, match="cannot be given"):
        given(theirs, files, below / "file")
    assert shown(theirs.tree / "file") == before


@pytest.mark.parametrize(
    ("mode", "goes"), [(0o777, False), (0o2775, False), (0o1777, True), (0o755, True)]
)
def test_links_of_roots_lead_to_an_image_where_others_cannot_replace_them(
    theirs: Theirs, files: QemuDir, device: Path, place: Path, mode: int, *, goes: bool
) -> None:
    links = place / "links"
    links.mkdir()
    os.chown(links, 0, PERSON)
    links.chmod(mode)
    (links / "disk").symlink_to("../hop")
    (place / "hop").symlink_to(theirs.secret)
    if goes:
        user = given(theirs, files, links / "disk")
        assert shown(theirs.secret) == (user.uid, user.uid, 0o600)
    else:
        with pytest.raises(RefusedError, match="cannot be given"):
            given(theirs, files, links / "disk")
        assert shown(theirs.secret)[0] == 0


def test_an_image_of_roots_in_a_users_directory_is_a_vms(
    theirs: Theirs, files: QemuDir, device: Path
) -> None:
    user = given(theirs, files, theirs.image)
    assert shown(theirs.image) == (user.uid, user.uid, 0o600)


def test_links_without_end_are_an_error(theirs: Theirs, place: Path) -> None:
    (place / "one").symlink_to("two")
    (place / "two").symlink_to("one")
    with pytest.raises(StorageError, match="own user the owner"):
        grant(theirs.host, GrantKind.OWN, place / "one")


def test_links_and_directories_of_roots_are_followed(theirs: Theirs, place: Path) -> None:
    link = place / "disk.raw"
    link.symlink_to(theirs.secret)
    theirs.hand_over(link)
    assert not theirs.secret.exists()
    assert not link.is_symlink()


@pytest.mark.parametrize(
    ("mode", "stays"), [(0o2775, True), (0o777, True), (0o1777, False), (0o755, False)]
)
def test_an_image_where_others_may_replace_it_stays(
    theirs: Theirs, mode: int, *, stays: bool
) -> None:
    """They put a link in its place between the walk along the path and the removal."""
    theirs.directory.chmod(mode)
    os.chown(theirs.directory, 0, PERSON)
    theirs.directory.chmod(mode)
    theirs.hand_over()
    assert theirs.image.exists() is stays
    assert any("others may write" in one for one in theirs.told) is stays


@pytest.mark.parametrize("language", ["en", "de"])
def test_no_directory_is_removed_as_an_image(theirs: Theirs, language: str) -> None:
    """Whatever stat(1) calls it there."""
    theirs.host = replace(theirs.host, enter=("env", "LC_ALL=C.UTF-8", f"LANGUAGE={language}"))
    os.chown(theirs.directory, 0, 0)
    theirs.image.unlink()
    theirs.image.mkdir()
    (theirs.image / "file").write_text("root's")
    theirs.hand_over()
    assert (theirs.image / "file").exists()
