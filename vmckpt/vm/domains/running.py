"""A running domain as a `Vm`, for what works on any QEMU. Runs on the domain's host."""

from pathlib import Path

from vmckpt.errors import RefusedError, UsageError
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory.inventory import check_name
from vmckpt.hosts.processes.process import identify
from vmckpt.qemu import block, commands, device_state, inside
from vmckpt.qemu.monitor import CommandRefusedError, Monitor
from vmckpt.units import MIB
from vmckpt.vm.adopted.inspect import process_behind
from vmckpt.vm.domains.definition.parts import Parts
from vmckpt.vm.domains.inventory import Domain
from vmckpt.vm.inventory import Vm
from vmckpt.vm.paths import IN_MEMORY, VmDir, new_qemu_id
from vmckpt.vm.record import Platform, Qemu
from vmckpt.vm.spec.spec import Disk, Nic, Placement, Spec
from vmckpt.vm.spec.spec_text import written

_CPU = "-x86_64-cpu"
# The device's own block back end, below the device that has its id.
_BELOW = ("", "/virtio-backend")


def domain_dir(host: Host, uuid: str) -> VmDir:
    """What vmckpt keeps on a host about a domain."""
    return VmDir(host.state_dir / "libvirt" / uuid)


async def as_vm(domain: Domain, parts: Parts, monitor: Monitor) -> Vm:
    """The running domain. Raises RefusedError: its process, a disk's node or its memory is not
    found; and as `Monitor.ask` does.
    """
    host = domain.host
    pid = await process_behind(monitor, host)
    await _require_own(domain, pid)
    if (process := identify(pid)) is None:
        raise RefusedError(
            f"'{domain.name}' has no process on {host.name}",
            why="its QEMU has just ended",
            remedy="see `vmckpt vm list`",
        )
    machine = (await commands.qom_get(monitor, "/machine", "type", str)).removesuffix("-machine")
    cpus = await commands.query_cpus(monitor)
    cpu = (await commands.qom_get(monitor, cpus[0].qom_path, "type", str)).removesuffix(_CPU)
    nodes = await _nodes(domain, parts, monitor)
    spec = Spec(
        name=domain.name,
        memory_bytes=await inside.query_memory_bytes(monitor),
        vcpus=len(cpus),
        machine=machine,
        accel="kvm" if await commands.query_kvm(monitor) else "tcg",
        cpu=cpu,
        boot=None,
        firmware=None,
        disks=tuple(
            Disk(part.path, part.format, None, part.read_only, "none", nodes[part.alias])
            for part in parts.disks
        ),
        nics=tuple(Nic("bridge", mac) for mac in parts.macs),
        devices=(),
        passthrough=(),
        guest_agent=False,
        sandbox=True,
        ram_dir=IN_MEMORY,
        heartbeat_id=None,
        overcommit=False,
        autostart=False,
        placement=Placement(),
        adopted=None,
        text="",
    )
    directory = domain_dir(host, domain.uuid)
    qemu = Qemu(
        directory.qemu(new_qemu_id()),
        process,
        Platform(machine, spec.accel, cpu),
        tuple(nodes[part.alias] for part in parts.disks),
        is_foreign=True,
        ram_names=await _ram_names(monitor),
    )
    return Vm(spec._replace(text=written(spec)), host, directory, qemu)


async def _require_own(domain: Domain, pid: int) -> None:
    """A QEMU that was broken into may report another's threads, whose memory would be read.

    Raises RefusedError.
    """
    words = await domain.host.read_text(Path(f"/proc/{pid}/cmdline")) or ""
    if f"\0-uuid\0{domain.uuid}\0" not in words:
        raise RefusedError(
            f"process {pid} on {domain.host.name} is not the QEMU of '{domain.name}'",
            why=f"its command line does not name the domain's UUID ({domain.uuid})",
            remedy="see which processes the domain has: pgrep -af qemu",
        )


async def _ram_names(monitor: Monitor) -> tuple[str, ...]:
    """The blocks of its RAM, as QEMU lists them; (): it does not say."""
    try:
        blocks = await device_state.query_ram_blocks(monitor)
    except CommandRefusedError:
        return ()
    names = [block.component for block in blocks]
    back_ends = await inside.query_back_ends(monitor)
    return tuple(name for name in names if name in back_ends)


async def _nodes(domain: Domain, parts: Parts, monitor: Monitor) -> dict[str, str]:
    """The node of each disk's device, by the device's id. Raises RefusedError."""
    there = {drive.path: drive.node for drive in await block.query_drives(monitor)}
    found = dict[str, str]()
    for part in parts.disks:
        paths = [f"/machine/peripheral/{part.alias}{below}" for below in _BELOW]
        if (node := next(filter(None, map(there.get, paths)), None)) is None:
            raise RefusedError(
                f"disk {part.target} of '{domain.name}' is not found in its QEMU",
                why=f"QEMU has no device '{part.alias}' with an image in it",
                remedy="see on its host: virsh qemu-monitor-command DOMAIN --pretty "
                """'{"execute": "query-block"}'""",
            )
        found[part.alias] = node
    return found


def unfit_name(name: str, memory_bytes: int) -> str | None:
    """Why checkpoints of a domain of that name and size cannot be recorded. Pure."""
    try:
        check_name(name, "VM")
    except UsageError as exc:
        return exc.why
    return "its memory is not a whole number of MiB" if memory_bytes % MIB else None
