"""The hosts of benchmarks/virsh, and one guest on them: as a libvirt domain, or as vmckpt's own."""

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks import setting
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory.inventory import find_host
from vmckpt.lab import lab as labs
from vmckpt.lab.real.build import MachineKit
from vmckpt.lab.state import Lab, ssh_config

NAME, NUMBER = "bench", 12
MEMORY_MIB = 512
VIRSH_HERE = ("virsh", "--connect", "qemu:///system")
LIBRARIES = Path("usr/lib/x86_64-linux-gnu")
LOAD = "vk.mem=rate=20M,set=256M,content=random"
Move = Callable[[str, str], Awaitable[setting.Process]]
_DOMAIN = """\
<domain type='qemu'><name>{name}</name><memory unit='MiB'>{memory}</memory><vcpu>1</vcpu>
<metadata><vmckpt:heartbeats xmlns:vmckpt='urn:vmckpt' id='{number}'/></metadata>
<os><type arch='x86_64' machine='pc-q35-10.0'>hvm</type><kernel>{image}/vmlinuz</kernel>
<initrd>{image}/initrd</initrd><cmdline>{cmdline}</cmdline></os><features><acpi/></features>
<cpu mode='custom' match='exact'><model fallback='forbid'>qemu64</model></cpu>
<devices><emulator>/usr/bin/qemu-system-x86_64</emulator>
<disk type='file' device='disk'><driver name='qemu' type='qcow2' cache='none'/>
<source file='{disk}'/><target dev='vda' bus='virtio'/></disk>
<interface type='bridge'><source bridge='br0'/><model type='virtio'/><rom enabled='no'/></interface>
<memballoon model='none'/></devices></domain>
"""


@dataclass(frozen=True, slots=True)
class Hosts:
    """Two hosts that look like machines; `listener` has the observer of heartbeats.

    `packages` has libvirt's client for this machine too, which logs in to them by `ssh`.
    """

    lab: Lab
    shared: Path
    listener: Host
    packages: Path
    ssh: Path

    @property
    def names(self) -> tuple[str, ...]:
        """Their names; the guest begins on the first."""
        return tuple(host.name for host in self.lab.hosts)

    def _inside(self, host: str, *argv: str) -> tuple[str, ...]:
        target = f"--target={self.lab.host(host).holder.pid}"
        kinds = ("--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup", "--root", "--wd=/")
        return ("nsenter", target, *kinds, *argv)

    async def on(self, host: str, *argv: str) -> setting.Process:
        """Run a command on a host."""
        return await setting.run(*self._inside(host, *argv))

    def by_virsh(self, *more: str) -> Move:
        """The domain moves by virsh, from this machine."""
        libraries = f"LD_LIBRARY_PATH={self.packages / LIBRARIES}"
        virsh = str(self.packages / "usr/bin/virsh")

        async def move(source: str, target: str) -> setting.Process:
            uri = f"qemu+ssh://root@{source}/system?command={self.ssh}"
            words = self._virsh_words(target)
            return await setting.run("env", libraries, virsh, "--connect", uri, *words, *more)

        return move

    async def by_virsh_on_source(self, source: str, target: str) -> setting.Process:
        """The domain moves by virsh, on its host."""
        return await self.on(source, *VIRSH_HERE, *self._virsh_words(target))

    def _virsh_words(self, target: str) -> tuple[str, ...]:
        address = self.lab.host(target).migration_address
        options = ("--live", "--p2p", "--persistent", "--undefinesource", "--unsafe")
        return ("migrate", *options, NAME, f"qemu+tcp://{address}/system", f"tcp://{address}")

    def by_vmckpt(self, *more: str) -> Move:
        """The domain or VM moves by vmckpt, from this machine."""

        async def move(source: str, target: str) -> setting.Process:
            del source  # vmckpt finds it
            return await setting.run(setting.VMCKPT, "migrate", NAME, target, "--tls", "off", *more)

        return move

    async def list_vms(self) -> setting.Process:
        """What a command that only asks takes: both hosts and their libvirtds are asked."""
        return await setting.run(setting.VMCKPT, "vm", "list")

    async def run_guest(
        self, *, direct: bool, memory_mib: int = MEMORY_MIB, load: str = LOAD
    ) -> int:
        """The guest on the first host, booted and beating; its number."""
        host, disk = self.names[0], self.shared / f"{NAME}.qcow2"
        disk.unlink(missing_ok=True)
        await self.on(host, "qemu-img", "create", "-q", "-f", "qcow2", str(disk), "256M")
        spec = setting.guest_spec(NAME, NUMBER, memory=f"{memory_mib}M", load=load)
        if direct:
            path = self.shared / f"{NAME}.toml"
            disk_table = f'\n[[disks]]\npath = "{disk}"\n'
            path.write_text(spec + disk_table)
            await setting.run(setting.VMCKPT, "vm", "run", path, "--host", host)
        else:
            path = self.shared / f"{NAME}.xml"
            cmdline = next(line for line in spec.splitlines() if line.startswith("cmdline"))
            path.write_text(
                _DOMAIN.format(
                    name=NAME,
                    memory=memory_mib,
                    number=NUMBER,
                    image=setting.image(),
                    cmdline=cmdline.split('"')[1],
                    disk=disk,
                )
            )
            await self.on(host, *VIRSH_HERE, "define", str(path))
            await self.on(host, *VIRSH_HERE, "start", NAME)
        await setting.await_beats(self.listener, NUMBER)
        return NUMBER

    async def end_guest(self) -> None:
        """The guest ends, wherever vmckpt finds it."""
        await setting.run(setting.VMCKPT, "vm", "stop", NAME, "--force")
        await setting.run(setting.VMCKPT, "vm", "rm", NAME)


@asynccontextmanager
async def hosts() -> AsyncIterator[Hosts]:
    """Two hosts for the block; nothing of them stays."""
    packages = os.environ.get("VMCKPT_TEST_HOSTS")
    if not packages:
        raise SystemExit("VMCKPT_TEST_HOSTS is not set: run this by `make bench BENCH=virsh`")
    state_dir = Path(tempfile.mkdtemp(prefix="vk-", dir="/tmp"))
    os.environ["VMCKPT_STATE_DIR"] = str(state_dir)
    try:
        lab = await labs.up(
            state_dir, hosts=2, qemus=[setting.qemu()] * 2, kit=MachineKit(Path(packages))
        )
        listener = find_host(lab.hosts[0].name)
        ssh = _ssh_command(lab)
        await _keep_bytecode()
        yield Hosts(lab, lab.directory / "shared", listener, Path(packages), ssh)
    finally:
        await asyncio.shield(labs.down(state_dir))
        shutil.rmtree(state_dir)


def _ssh_command(lab: Lab) -> Path:
    """OpenSSH's client with the lab's configuration, and without the libraries of its virsh."""
    path = lab.directory / "ssh" / "ssh"
    config = ssh_config(lab.directory)
    path.write_text(f'#!/bin/sh\nexec env -u LD_LIBRARY_PATH ssh -F {config} "$@"\n')
    path.chmod(0o700)
    return path


async def _keep_bytecode() -> None:
    """The hosts have this vmckpt read-only: they could keep none, as an installation does."""
    await setting.run(setting.PYTHON, "-m", "compileall", "-q", setting.REPOSITORY / "vmckpt")
