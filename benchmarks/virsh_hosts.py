"""The hosts of benchmarks/virsh, and one guest on them: as a libvirt domain, or as vmckpt's own."""

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks import setting
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory import find_host
from vmckpt.lab import lab as labs
from vmckpt.lab.real.build import Look
from vmckpt.lab.state import Lab

NAME, NUMBER = "bench", 12
MEMORY_MIB = 512
LOAD = "vk.mem=rate=20M,set=256M,content=random"
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
    """Two hosts that look like machines; `listener` has the observer of heartbeats."""

    lab: Lab
    shared: Path
    listener: Host

    @property
    def names(self) -> tuple[str, ...]:
        """Their names; the guest begins on the first."""
        return tuple(host.name for host in self.lab.hosts)

    def _inside(self, host: str, *argv: str) -> tuple[str, ...]:
        target = f"--target={self.lab.host(host).holder.pid}"
        kinds = ("--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup", "--root", "--wd=/")
        return ("nsenter", target, *kinds, *argv)

    async def virsh(self, host: str, *words: str) -> setting.Process:
        """A command of virsh's, on a host."""
        return await setting.run(
            *self._inside(host, "virsh", "--connect", "qemu:///system", *words)
        )

    async def by_virsh(self, source: str, target: str) -> setting.Process:
        """The domain moves by virsh."""
        address = self.lab.host(target).migration_address
        options = ("--live", "--p2p", "--persistent", "--undefinesource", "--unsafe")
        there = (f"qemu+tcp://{address}/system", f"tcp://{address}")
        return await self.virsh(source, "migrate", *options, NAME, *there)

    async def by_vmckpt(self, source: str, target: str) -> setting.Process:
        """The domain or VM moves by vmckpt, from this machine."""
        del source  # vmckpt finds it
        return await setting.run(
            setting.VMCKPT, "migrate", NAME, target, "--tls", "off", "--method", "precopy"
        )

    async def run_guest(self, *, direct: bool) -> int:
        """The guest on the first host, booted and beating; its number."""
        host, disk = self.names[0], self.shared / f"{NAME}.qcow2"
        disk.unlink(missing_ok=True)
        await setting.run(
            *self._inside(host, "qemu-img", "create", "-q", "-f", "qcow2", str(disk), "256M")
        )
        spec = setting.guest_spec(NAME, NUMBER, memory=f"{MEMORY_MIB}M", load=LOAD)
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
                    memory=MEMORY_MIB,
                    number=NUMBER,
                    image=setting.image(),
                    cmdline=cmdline.split('"')[1],
                    disk=disk,
                )
            )
            await self.virsh(host, "define", str(path))
            await self.virsh(host, "start", NAME)
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
            state_dir, hosts=2, qemus=[setting.qemu()] * 2, look=Look(Path(packages))
        )
        yield Hosts(lab, lab.directory / "shared", find_host(lab.hosts[0].name))
    finally:
        await asyncio.shield(labs.down(state_dir))
        shutil.rmtree(state_dir)
