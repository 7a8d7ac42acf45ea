"""The file system of a simulated host: where each directory comes from.

    /           this machine's; the host's writes go to memory of its own
    /usr        with the packages of images/hosts.py on top
    /etc        with a name, users and settings of its own
    /var/lib/vmckpt, /var/lib/libvirt, /var/log     folders of its own on this machine's disk
    /dev, /dev/shm, /home, /proc, /root, /run, /sys, /tmp     its own

A bare host has this machine's /usr, and nothing in vmckpt's and libvirt's directories.
"""

import os
import shutil
import stat
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from vmckpt.lab.real.machine import HOST_KEY, OPERATOR_KEY, STATE_DIR, LabMachine

PACKAGES = Path("/run/packages")
AUTHORIZED_KEYS = Path("/etc/ssh/authorized_keys")  # a file for each user
_OLD = Path("/.old")
# A user that may log in and has no rights. sshd and libvirtd look up their own.
PLAIN_USER = "plain"
_PLAIN_ID = 5001
_USERS = {
    PLAIN_USER: f"{_PLAIN_ID}:{_PLAIN_ID}::/home/{PLAIN_USER}:/bin/bash",
    "sshd": "64056:64056::/run/sshd:/usr/sbin/nologin",
}
_LIBVIRT_USER = {"libvirt-qemu": "64055:64055::/nonexistent:/usr/sbin/nologin"}
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty", "kvm", "net/tun", "userfaultfd")
_LINKS = {"fd": "/proc/self/fd", "ptmx": "pts/ptmx"} | {
    name: f"/proc/self/fd/{number}" for number, name in enumerate(("stdin", "stdout", "stderr"))
}
# Settings of the whole kernel: a bare host's administrator must not change this machine's.
_KERNEL_WIDE = ("vm/unprivileged_userfaultfd", "vm/nr_hugepages")


class LayoutError(Exception):
    """A host's root could not be set up; the message is mount's own."""


def lay_out(machine: LabMachine) -> None:
    """Make the calling process's mount namespace the host's. Raises LayoutError, OSError."""
    base = machine.folder / "root"
    base.mkdir()
    _mount("tmpfs", base, "mode=0755")
    os.chdir(base)
    new = base / "new"
    _overlay("root", new, "/")
    if not machine.bare:
        # Under a name without the characters that are special in an overlay's options.
        _bind(machine.packages / "usr", base / "packages")
        _overlay("usr", new / "usr", "packages:/usr")
    _pivot(new)
    # From here on paths lead to this machine's own files only below _OLD.
    _make_own(machine)
    _make_devices()
    _write_settings(machine)
    (_make_bare if machine.bare else _make_equipped)(machine)
    _run(["umount", "--lazy", str(_OLD)])
    _OLD.rmdir()


def _overlay(name: str, target: Path, lower: str) -> None:
    for layer in ("upper", "work"):
        Path(f"{name}-{layer}").mkdir()
    options = f"lowerdir={lower},upperdir={name}-upper,workdir={name}-work"
    _mount("overlay", target, options)


def _pivot(new: Path) -> None:
    os.chdir(new)
    Path(_OLD.name).mkdir()
    _run(["pivot_root", ".", _OLD.name])
    os.chdir("/")


def _make_own(machine: LabMachine) -> None:
    _mount("proc", Path("/proc"))
    _mount("sysfs", Path("/sys"))
    for name, mode in (("/dev", "0755"), ("/run", "0755"), ("/tmp", "1777"), ("/etc/ssh", "0755")):
        _mount("tmpfs", Path(name), f"mode={mode}")
    _mount("devpts", Path("/dev/pts"), "newinstance,ptmxmode=0666,mode=0620")
    # Space for guests' memory; unused space costs nothing.
    _mount("tmpfs", Path("/dev/shm"), "mode=1777,size=90%")
    # The contents of home directories, such as keys, belong to their users.
    _mount("tmpfs", Path("/root"), "mode=0700")
    _mount("tmpfs", Path("/home"), "mode=0755")
    _bind_own(machine, "log", Path("/var/log"))
    Path("/var/log/apt").mkdir()  # apt expects it


def _make_bare(machine: LabMachine) -> None:
    for path in (STATE_DIR, Path("/var/lib/libvirt")):
        if path.exists():
            _mount("tmpfs", path, "mode=0755")  # this machine's content stays separate
    _bind(_old(machine.packages / "usr"), PACKAGES, read_only=True)
    for name in _KERNEL_WIDE:
        stands_for = Path("/run", Path(name).name)
        stands_for.write_text("0\n")
        _bind(stands_for, Path("/proc/sys", name))


def _make_equipped(machine: LabMachine) -> None:
    _mount("tmpfs", Path("/etc/libvirt"), "mode=0755")
    _mount("tmpfs", Path("/var/cache/libvirt"), "mode=0711")
    _bind_own(machine, "libvirt", Path("/var/lib/libvirt"))
    _bind_own(machine, "state", STATE_DIR, mode=0o700)
    for path in machine.seen:
        _bind(_old(path), path, read_only=True)
    _bind(_old(machine.shared), machine.shared)
    for name, target in machine.programs.items():
        Path(name).unlink(missing_ok=True)
        Path(name).symlink_to(target)


def _write_settings(machine: LabMachine) -> None:
    etc = Path("/etc")
    (etc / "hostname").write_text(f"{machine.name}\n")
    (etc / "machine-id").write_text(machine.uuid.replace("-", "") + "\n")
    hosts = {"localhost": "127.0.0.1"} | machine.names
    (etc / "hosts").write_text("".join(f"{where}\t{name}\n" for name, where in hosts.items()))
    _add_users(etc, _USERS if machine.bare else _USERS | _LIBVIRT_USER)
    _copy(_old(machine.keys / HOST_KEY), etc / "ssh" / HOST_KEY, mode=0o600)
    AUTHORIZED_KEYS.mkdir()
    for user in ("root",) if machine.bare else ("root", PLAIN_USER):
        _copy(_old(machine.keys / OPERATOR_KEY), AUTHORIZED_KEYS / user, mode=0o644)


def _copy(source: Path, target: Path, *, mode: int) -> None:
    shutil.copyfile(source, target)
    target.chmod(mode)


def _add_users(etc: Path, users: dict[str, str]) -> None:
    _own_lines(etc / "passwd", {name: f"{name}:x:{rest}" for name, rest in users.items()})
    groups = {name: rest.split(":")[1] for name, rest in users.items()}
    _own_lines(etc / "group", {name: f"{name}:x:{number}:" for name, number in groups.items()})
    # A password that begins with "!" locks the account, even for an sshd without PAM.
    _own_lines(etc / "shadow", {name: f"{name}:*:19000::::::" for name in ("root", *users)})
    home = Path("/home", PLAIN_USER)
    home.mkdir()
    os.chown(home, _PLAIN_ID, _PLAIN_ID)


def _own_lines(path: Path, own: dict[str, str]) -> None:
    """Replace the machine's lines for these names."""
    with suppress(FileNotFoundError):
        kept = [x for x in path.read_text().splitlines() if x.partition(":")[0] not in own]
        path.write_text("\n".join([*kept, *own.values()]) + "\n")


def _make_devices() -> None:
    dev = Path("/dev")
    for name in _DEVICES:
        with suppress(FileNotFoundError):  # a kernel without it
            there = (_OLD / "dev" / name).stat()
            (dev / name).parent.mkdir(exist_ok=True)
            os.mknod(dev / name, there.st_mode, there.st_rdev)
            (dev / name).chmod(stat.S_IMODE(there.st_mode))
    for name, target in _LINKS.items():
        (dev / name).symlink_to(target)


def _old(path: Path) -> Path:
    return _OLD / path.relative_to("/")


def _bind_own(machine: LabMachine, name: str, target: Path, *, mode: int = 0o755) -> None:
    folder = _old(machine.folder / name)
    folder.mkdir(mode=mode)
    _bind(folder, target)


def _mount(kind: str, target: Path, options: str = "defaults") -> None:
    target.mkdir(parents=True, exist_ok=True)
    _run(["mount", "-t", kind, "-o", options, kind, str(target)])


def _bind(source: Path, target: Path, *, read_only: bool = False) -> None:
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    _run(["mount", "--bind", str(source), str(target)])
    if read_only:
        _run(["mount", "-o", "remount,bind,ro", str(target)])


def _run(argv: Sequence[str]) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LayoutError(f"'{' '.join(argv)}': {done.stderr.strip()}")
