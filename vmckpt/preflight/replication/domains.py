"""Whether a libvirt domain can be replicated to a host; reasons against it, with fixes."""

from collections.abc import AsyncIterator, Iterator, Mapping
from shlex import quote

from vmckpt.epoch.senders import require_holdable, senders
from vmckpt.errors import RefusedError
from vmckpt.hosts.host import Host
from vmckpt.options.replication import SHARED, ReplicationOptions
from vmckpt.preflight import destination_host
from vmckpt.preflight.domains import capture
from vmckpt.preflight.finding import OK, REFUSE, WARN, Finding, ask
from vmckpt.preflight.replication import memory
from vmckpt.preflight.replication.arbiter import arbiter_check
from vmckpt.preflight.replication.checks import runs, second_path
from vmckpt.preflight.replication.disks import disk_checks
from vmckpt.qemu.block import DiskImage
from vmckpt.qemu.monitor import Monitor
from vmckpt.vm.domains.definition.parts import Parts
from vmckpt.vm.domains.inventory import Domain
from vmckpt.vm.domains.libvirtd import Libvirtd
from vmckpt.vm.domains.sessions import libvirtd
from vmckpt.vm.inventory import Vm


async def checks_here(
    vm: Vm,
    domain: Domain,
    parts: Parts,
    session: Libvirtd,
    monitor: Monitor,
    *,
    holds_output: bool,
) -> list[Finding]:
    """What its own host finds, where its monitor is; changes nothing. Raises HostDownError."""
    found = await ask(
        runs(vm, monitor),
        capture.described(domain.name, vm.spec.memory_bytes, parts),
        _unfit(domain, parts),
        _snapshots(domain, session),
        capture.memory(vm, monitor),
        memory.blocks(vm),
        capture.devices(vm, monitor),
        capture.disks(vm, monitor),
        capture.unused(vm, monitor),
        _output(vm, monitor, holds_output=holds_output),
    )
    return [one._replace(remedy=one.remedy and _otherwise(one, domain.name)) for one in found]


def _otherwise(found: Finding, name: str) -> str:
    """A remedy that is about a checkpoint does not fit here."""
    if "--kind internal" not in found.remedy:
        return found.remedy
    return (
        f"leave out what is named (virsh edit {quote(name)}, while it is off), or schedule "
        f"checkpoints: vmckpt schedule add {quote(name)} --every 15m"
    )


def _unfit(domain: Domain, parts: Parts) -> Iterator[Finding]:
    """What a standby could not have of it. Pure."""
    what, edit = domain.description, f"virsh edit {quote(domain.name)}, while it is off"
    if parts.variables is not None:
        reason = (
            f"its firmware keeps variables in {parts.variables.path}, which the guest can write "
            "to: they do not reach the standby"
        )
        remedy = "vmckpt replicates domains that boot without UEFI, for now"
        yield Finding("firmware-variables", REFUSE, reason, remedy)
    if what.has_tpm:
        reason = "its TPM keeps its state on its host: it does not reach the standby"
        yield Finding("tpm", REFUSE, reason, f"leave it out: {edit}")
    if not what.private_memory:
        reason = "its XML says where its memory is (memoryBacking)"
        yield Finding("memory-backing", REFUSE, reason, f"leave that out: {edit}")
    if what.reports_free_pages:
        reason = "its balloon reports free pages (freePageReporting): on the standby they would "
        reason += "not read as zeroes"
        yield Finding("free-pages", REFUSE, reason, f"leave that out: {edit}")


async def _snapshots(domain: Domain, session: Libvirtd) -> AsyncIterator[Finding]:
    """Libvirt keeps them with the definition, which it gives up for as long as it is protected."""
    if snapshots := await session.snapshots(domain.uuid):
        names = ", ".join(one.name for one in snapshots)
        remedy = f"remove them: virsh snapshot-delete {quote(domain.name)} NAME"
        yield Finding("snapshots", REFUSE, f"libvirt has snapshots of it: {names}", remedy)


async def _output(vm: Vm, monitor: Monitor, *, holds_output: bool) -> AsyncIterator[Finding]:
    if not holds_output:
        reason = "the guest's output is not held: after a failover it may contradict itself"
        yield Finding("output", WARN, reason, "leave out --unsafe-no-output-commit")
        return
    opened = await vm.host.run(
        ["find", f"/proc/{vm.qemu.process.pid}/fd", "-lname", capture.VHOST_NET, "-printf", "x"]
    )
    if opened.stdout:
        reason = "the host's kernel serves its NICs (vhost-net), so QEMU cannot hold their output"
        remedy = (
            "give each <interface> of it <driver name='qemu'/>, and start it again (virsh edit, "
            "while it is off); or: --unsafe-no-output-commit"
        )
        yield Finding("output", REFUSE, reason, remedy)
        return
    try:
        await require_holdable(vm, monitor, await senders(vm, monitor))
    except RefusedError as exc:
        remedy = "give each <interface> of it a tap (network or bridge) and <driver name='qemu'/>"
        yield Finding("output", REFUSE, f"{exc.what}: {exc.why}", remedy)
        return
    yield Finding("output", OK, f"the output of {len(vm.spec.nics)} NICs is held until safe")


async def checks_there(
    vm: Vm, standby: Host, options: ReplicationOptions, images: Mapping[str, DiskImage]
) -> list[Finding]:
    """What its standby's host has; changes nothing. Raises HostDownError."""
    disks = list(zip(vm.spec.disks, vm.nodes, strict=True))
    sizes = [(one, images[node].virtual_size_bytes) for one, node in disks if not one.read_only]
    copied, qcow2 = [size for _, size in sizes], [n for one, n in sizes if one.format != "raw"]
    read_only = [disk.on(standby.state_dir) for disk in vm.spec.disks if disk.read_only]
    return await ask(
        _shared(options),
        _knows_domains(standby),
        _libvirt(vm, standby),
        disk_checks(vm, standby, images),
        destination_host.name(vm, standby),
        destination_host.permissions(vm, standby),
        destination_host.room(vm, standby),
        memory.checks(vm, standby, copied_bytes=sum(copied), qcow2_bytes=sum(qcow2)),
        destination_host.files(vm, standby, read_only),
        destination_host.address(vm.host, standby),
        destination_host.ports(standby, needed=1),
        arbiter_check(vm.host, standby, options),
        second_path(vm.host, standby),
    )


def _shared(options: ReplicationOptions) -> Iterator[Finding]:
    if options.disks == SHARED:
        reason = "a domain's disks are replicated as copies only: libvirt has its block nodes"
        remedy = "have its images on each host's own storage, and leave out --disks shared"
        yield Finding("disk-shared", REFUSE, reason, remedy)


async def _knows_domains(standby: Host) -> AsyncIterator[Finding]:
    """An older vmckpt would wait with a QEMU of its own, which could not load the domain."""
    done = await standby.run([*await standby.own_command(), "replica-domain", "--help"])
    if done.returncode:
        await standby.require_up()
        reason = f"the vmckpt of {standby.name} does not replicate domains"
        yield Finding("vmckpt", REFUSE, reason, "install the same vmckpt on both hosts")


async def _libvirt(vm: Vm, standby: Host) -> AsyncIterator[Finding]:
    """Whether the standby's libvirt can get it, and has no domain of that name."""
    if standby.libvirt is None:
        remedy = f"vmckpt host set {standby.name} --libvirt /run/libvirt/libvirt-sock"
        reason = f"the inventory names no libvirtd of {standby.name}"
        yield Finding("libvirt", REFUSE, reason, remedy)
        return
    async with libvirtd(standby) as session:
        names = await session.names()
    if any(vm.qemu.domain == one.uuid or vm.name == one.name for one in names):
        reason = f"the libvirtd of {standby.name} has a domain '{vm.name}', or of its UUID, already"
        name = quote(vm.name)
        remedy = (
            f"if an interrupted replication left it: vmckpt replicate stop {name}; "
            f"if it is an old one: on {standby.name}, virsh undefine {name}"
        )
        yield Finding("domain-there", REFUSE, reason, remedy)
        return
    yield Finding("libvirt", OK, f"the libvirtd of {standby.name} has no domain of that name")
