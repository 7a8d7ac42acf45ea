"""Hosts that look like machines, for tests: vmckpt runs here, QEMUs and libvirtds run on them."""

import asyncio
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.qemu.world import Said, World, run_here, show_evidence
from vmckpt.hosts.processes.process import ProcessId, find_by_argument
from vmckpt.lab import lab as labs
from vmckpt.lab.processes import find
from vmckpt.lab.real.build import MachineKit
from vmckpt.lab.real.management import set_operator_link
from vmckpt.lab.state import ssh_config

LOGS = ("lab/*.log", "lab/*/log/sshd.log", "lab/*/log/libvirt/**/*.log")
VM_LOGS = "lab/*/state/vms/*/qemu-*/*.log"


def packages() -> Path:
    """What images/hosts.py provides."""
    return Path(os.environ["VMCKPT_TEST_HOSTS"])


@dataclass(frozen=True, slots=True)
class Machines(World):
    """Hosts lab-a, lab-b, ...; the operator is this machine.

    `ok("vm", "list")` runs vmckpt here. `ssh` runs something on a host as anybody would, `inside`
    as the host's root and not by SSH. All hosts have `shared`, at the same path; /var/lib/vmckpt
    and /var/lib/libvirt are each host's own.
    """

    @property
    def shared(self) -> Path:
        """The folder that this machine and all hosts share."""
        return self.lab.directory / "shared"

    def here(self, host: str, path: Path) -> Path:
        """What is at `path` on a host, as a path of this machine's."""
        return Path(f"/proc/{self.lab.host(host).holder.pid}/root", path.relative_to("/"))

    def folder(self, host: str) -> Path:
        """Where a host's own folders are on this machine: `state`, `libvirt`, `log`."""
        return self.lab.directory / host

    def ssh(self, host: str, command: str, *, user: str = "root") -> Said:
        """Run a line of its shell's on a host, by OpenSSH's client."""
        config = str(ssh_config(self.lab.directory))
        return run_here([*self.packaged("ssh"), "-F", config, "-l", user, host, command])

    def inside(self, host: str, *argv: str) -> Said:
        """Run a command on a host where neither links nor sshd matter."""
        target = f"--target={self.lab.host(host).holder.pid}"
        kinds = ("--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup", "--root", "--wd=/")
        return run_here(["nsenter", target, *kinds, *argv])

    def virsh(self, host: str, *words: str) -> str:
        """What virsh says on a host; the command must succeed."""
        said = self.inside(host, "virsh", "--connect", "qemu:///system", *words)
        assert said.code == 0, f"{words}: {said.stderr}"
        return said.stdout.strip()

    def packaged(self, name: str) -> list[str]:
        """A program of images/hosts.py, such as `ssh` or `virsh`, as it runs on this machine."""
        libraries = packages() / "usr/lib/x86_64-linux-gnu"
        return ["env", f"LD_LIBRARY_PATH={libraries}", str(packages() / "usr/bin" / name)]

    def operator_address(self) -> str:
        """Where hosts reach this machine."""
        return f"{str(self.lab.hosts[0].ssh_address).rpartition('.')[0]}.254"

    def operator_link(self, *, up: bool, host: str | None = None) -> None:
        """Plug in or pull the operator's cable, or only that to one host."""
        asyncio.run(set_operator_link(self.lab, up=up, host=host))

    def certify(self) -> None:
        """Give every host certificates of one authority, as `vmckpt pki` does."""
        self.ok("pki", "init")
        self.ok("pki", "issue", *(host.name for host in self.lab.hosts))

    def qemus(self, name: str | None = None) -> list[ProcessId]:
        """QEMU processes of a VM of these hosts, of all without a name."""
        mark = f"-name\0{name},process=" if name else "-pidfile\0/var/lib/vmckpt/"
        ours = {process.pid for process in find(self.lab.directory)}
        return [process for process in find_by_argument(mark) if process.pid in ours]

    def jobs(self) -> list[ProcessId]:
        """Processes on the hosts that do a migration."""
        recover = self.processes("\0--recover\0")  # and the switches that would start it
        return [one for one in self.processes("\0job\0") if one not in recover]

    def processes(self, argument: str) -> list[ProcessId]:
        """Processes on the hosts that have it in their command line."""
        ours = {process.pid for process in find(self.lab.directory)}
        return [one for one in find_by_argument(argument) if one.pid in ours]

    def pids(self, name: str) -> list[int]:
        """The pids of a VM's QEMUs, as their hosts number them."""
        return [_inner_pid(process.pid) for process in self.qemus(name)]

    def is_fresh(self) -> bool:
        """Whether the next test would find nothing of this one: no VM, file, record, dead service.

        Links that are cut or narrow are not seen: whoever does that repairs them.
        """
        names = [host.name for host in self.lab.hosts]
        processes = [Path(f"/proc/{p.pid}/comm") for p in find(self.lab.directory)]
        running = [path.read_text().strip() for path in processes if path.exists()]
        used = [
            *self.shared.iterdir(),
            *self.state_dir.glob("runs/*"),
            *self.state_dir.glob("pki/*"),
        ]
        for name in names:
            domains = Path(f"/proc/{self.lab.host(name).holder.pid}/root/etc/libvirt/qemu")
            used += [*domains.glob("*.xml"), *self.folder(name).glob("libvirt/images/*")]
            used += [
                p
                for part in ("vms", "images", "pki", "replicas")
                for p in self.folder(name).glob(f"state/{part}/*")
            ]
        served = all(running.count(service) >= len(names) for service in ("sshd", "libvirtd"))
        return served and not used and not any(name.startswith("qemu") for name in running)


@contextmanager
def machines(qemus: Sequence[Path], *, bare: bool = False) -> Iterator[Machines]:
    """A lab of real hosts, the i-th with the i-th QEMU; nothing stays, whatever happens.

    Takes root, and pytest's skip says so.
    """
    state_dir = Path(tempfile.mkdtemp(prefix="vk-", dir="/tmp"))
    try:
        kit = MachineKit(packages(), bare)
        lab = asyncio.run(labs.up(state_dir, hosts=len(qemus), qemus=qemus, kit=kit))
        yield Machines(state_dir, lab)
    finally:
        show_evidence(state_dir, *LOGS, VM_LOGS)
        asyncio.run(labs.down(state_dir))
        shutil.rmtree(state_dir)


def _inner_pid(pid: int) -> int:
    """The pid that a process has in its own namespace (proc(5), NSpid)."""
    status = Path(f"/proc/{pid}/status").read_text()
    (words,) = (line.split() for line in status.splitlines() if line.startswith("NSpid:"))
    return int(words[-1])
