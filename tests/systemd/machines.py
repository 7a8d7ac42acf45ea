"""Two machines that systemd runs: Debian 12 with the package installed, in namespaces of their own.

They are on one switch with this machine, which reaches them by SSH. Switching one off ends all of
its processes; its disk stays.
"""

import json
import os
import secrets
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from images.debian import BACKPORTS, private_sources
from tests.packages.roots import Root, bootstrap, package
from tests.qemu.world import image
from tests.role.commands import output
from tests.waiting import eventually

PACKAGES = ("dbus", "iproute2", "libpam-systemd", "openssh-server", "systemd-sysv")
GUEST = Path("/var/lib/vk/image")
COMMAND_S, BOOT_S = 120, 60
FIRST = Path(__file__).with_name("first.sh")
_HERE = "10.9.0.254"
# Its cgroup, then a command.
_APART = """\
echo 0 >"$0/cgroup.procs"
exec unshare --pid --fork --kill-child --mount --uts --ipc --cgroup --net "$@"
"""
_CABLE = """\
[Match]
Name=eth0

[Network]
Address={address}/24
"""


@dataclass
class Switch:
    """The network, kept by one sleeping process."""

    holder: subprocess.Popen[bytes]

    def enter(self, *command: str) -> list[str]:
        """A command as this machine gives it on that network."""
        return ["nsenter", f"--net=/proc/{self.holder.pid}/ns/net", *command]

    def connect(self, name: str, mac: str, pid: int) -> None:
        """Lay a cable to the network namespace of a process."""
        end = f"peer name eth0 address {mac} netns {pid}"
        output(self.enter("ip", "link", "add", "name", name, "type", "veth", *end.split()))
        output(self.enter("ip", "link", "set", "dev", name, "master", "switch", "up"))


@dataclass
class Machine:
    """One of the two."""

    name: str
    number: int
    directory: Path
    built: Path
    switch: Switch
    _first: subprocess.Popen[bytes] | None = field(default=None)

    @property
    def address(self) -> str:
        return f"10.9.0.{self.number}"

    @property
    def _own(self) -> Path:
        return self.directory / self.name

    @property
    def _group(self) -> Path:
        return _cgroups() / f"vk-{os.getpid()}-{self.name}"

    def boot(self) -> None:
        """Switch it on; it answers when this returns."""
        (self._own / "boot_id").write_text(f"{uuid.uuid4()}\n")
        self._group.mkdir(exist_ok=True)
        root = self.built / "root"
        with (self._own / "console").open("wb") as console:
            self._first = subprocess.Popen(
                ["sh", "-c", _APART, str(self._group), "sh", str(FIRST), str(self._own), str(root)],
                stdin=subprocess.PIPE,
                stdout=console,
                stderr=subprocess.STDOUT,
            )
        eventually(lambda: self._pid() is not None, BOOT_S, self.console)
        self.switch.connect(self.name, f"52:54:00:00:02:0{self.number}", self._pid() or 0)
        assert self._first.stdin is not None
        with self._first.stdin as ready:
            ready.write(b"\n")
        eventually(self._answers, BOOT_S, lambda: f"{self.name} answers: {self.console()}")

    def _pid(self) -> int | None:
        """Its first process, as this machine numbers it."""
        assert self._first is not None and self._first.poll() is None, self.console()
        pid = self._first.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(children[0]) if children else None

    def _answers(self) -> bool:
        return self._pid() is not None and self._ssh("true").returncode == 0

    def _ssh(self, command: str) -> subprocess.CompletedProcess[str]:
        options = ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"]
        quick = ["-o", "ConnectTimeout=5", "-o", "LogLevel=ERROR", "-o", "BatchMode=yes"]
        where = ["-i", str(self.built / "key"), f"root@{self.address}"]
        return subprocess.run(
            self.switch.enter("ssh", *options, *quick, *where, command),
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )

    def run(self, command: str) -> str:
        """What a command prints that a login gives there. Fails unless it ends well."""
        done = self._ssh(command)
        assert done.returncode == 0, f"{self.name}: {command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def json(self, command: str) -> Any:
        """What a command of vmckpt answers there."""
        return json.loads(self.run(f"vmckpt {command} --json"))

    def goes_down(self, command: str, within_s: float) -> float:
        """How long it takes to be off after `command`, which is to end it, s."""
        assert self._first is not None
        began = time.monotonic()
        self._ssh(command)
        self._first.wait(timeout=within_s)
        return time.monotonic() - began

    def off(self) -> None:
        """As by a power cut, if it is on."""
        if self._first is not None:
            self._first.kill()  # and with it all of its processes, by the kernel
            self._first.wait()
        if self._group.exists():
            eventually(lambda: _removed(self._group), 10, "its processes have ended")

    def console(self) -> str:
        """The end of what systemd said."""
        path = self._own / "console"
        return path.read_text(errors="replace")[-3000:] if path.exists() else ""


@contextmanager
def two(directory: Path, built: Path) -> Iterator[tuple[Machine, Machine]]:
    """Both, running, each of which has the other as a host in root's inventory.

    `built` is what `build` made.
    """
    with _switch() as switch:
        a, b = (Machine(name, n, directory, built, switch) for n, name in enumerate("ab", start=1))
        try:
            for one in (a, b):
                _give_disk(one.directory / one.name, one)
                one.boot()
            for one, other in ((a, b), (b, a)):
                one.run(f"vmckpt host add {other.name} ssh://root@{other.address}")
                one.run(f"vmckpt host set local --migration-addr {one.address}")
            a.run("vmckpt pki init && vmckpt pki issue local b")
            yield a, b
        finally:
            a.off()
            b.off()


@contextmanager
def _switch() -> Iterator[Switch]:
    """The network, which ends with the block."""
    holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
    try:
        switch = Switch(holder)
        comm = Path(f"/proc/{holder.pid}/comm")
        eventually(lambda: comm.read_text() == "sleep\n", 10, "it has a network of its own")
        for words in (
            "link add switch type bridge",
            f"addr add {_HERE}/24 dev switch",
            "link set switch up",
        ):
            output(switch.enter("ip", *words.split()))
        yield switch
    finally:
        holder.kill()
        holder.wait()


def _cgroups() -> Path:
    """Where this machine has its cgroups, v2."""
    lines = (line.split() for line in Path("/proc/self/mounts").read_text().splitlines())
    return Path(next(where for _, where, kind, *_ in lines if kind == "cgroup2"))


def _removed(group: Path) -> bool:
    """Remove a cgroup with all in it, once no process is left in one."""
    with suppress(OSError):
        for path, *_ in os.walk(group, topdown=False):
            Path(path).rmdir()
    return not group.exists()


def _give_disk(own: Path, machine: Machine) -> None:
    """An empty disk over the root of both, but for what makes this one itself."""
    network = own / "upper/etc/systemd/network"
    for folder in (network, own / "work", own / "new"):
        folder.mkdir(parents=True)
    (network / "10-cable.network").write_text(_CABLE.format(address=machine.address))
    (own / "upper/etc/hostname").write_text(f"{machine.name}\n")
    (own / "upper/etc/machine-id").write_text(f"{machine.number:032x}\n")


def build(directory: Path) -> None:
    """The root of all machines, from Debian's packages and `make dist`'s, and the key to them."""
    root = Root(directory / "root", "bookworm")
    bootstrap(root.release, root.path, f"--include={','.join(PACKAGES)}")
    shutil.copy(package(), root.path / "vmckpt.deb")
    # Under TCG, Debian 12's own QEMU cannot be the source of a live migration.
    backports = root.path / "etc/apt/sources.list.d/backports.sources"
    backports.write_text(private_sources(BACKPORTS))
    root.install("/vmckpt.deb")
    root.install("--target-release", BACKPORTS, "qemu-system-x86")
    (root.path / "etc/hosts").write_text("127.0.0.1 localhost\n")
    shutil.copy(os.environ["VMCKPT_TEST_ETCD"], root.path / "usr/local/bin/etcd")
    shutil.copytree(image(), root.path / GUEST.relative_to("/"))
    (root.path / "var/log/journal").mkdir(exist_ok=True)  # what was said before a reboot stays
    root.run("systemctl", "enable", "systemd-networkd", "ssh")
    _keys(directory, root.path)


def _keys(directory: Path, root: Path) -> None:
    """Root of each may log in at both, and so may the test."""
    key = directory / "key"
    output(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", secrets.token_hex(4), "-f", str(key)]
    )
    home = root / "root/.ssh"
    home.mkdir(mode=0o700, exist_ok=True)
    shutil.copy(key, home / "id_ed25519")
    shutil.copy(key.with_suffix(".pub"), home / "authorized_keys")
    host_key = (root / "etc/ssh/ssh_host_ed25519_key.pub").read_text().split()[:2]
    names = ("10.9.0.1", "10.9.0.2")
    (home / "known_hosts").write_text("".join(f"{name} {' '.join(host_key)}\n" for name in names))
    for file in home.iterdir():
        os.chown(file, 0, 0)
        file.chmod(0o600)
