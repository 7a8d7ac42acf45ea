"""A running domain, for its replication: its own host finds out what it is."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass

from vmckpt.codec import convert
from vmckpt.epoch.devices import ram_blocks
from vmckpt.errors import (
    HostDownError,
    NotFoundError,
    OperationFailedError,
    OutcomeUnknownError,
    RefusedError,
)
from vmckpt.foreign import parse
from vmckpt.hosts.host import Host
from vmckpt.hosts.local import LocalHost
from vmckpt.preflight.finding import Finding, ask, require
from vmckpt.preflight.replication.checks import runs
from vmckpt.preflight.replication.domains import checks_here
from vmckpt.qemu.block import DiskImage, query_disk_images
from vmckpt.qemu.device_state import query_machine_type
from vmckpt.qemu.monitor import Monitor
from vmckpt.replicate.disks.copies import CopiedDisk
from vmckpt.replicate.domains.facts import ReplicatedDomain
from vmckpt.vm.domains.definition.description import ImageFile, parse_xml
from vmckpt.vm.domains.definition.parts import parts_of
from vmckpt.vm.domains.definition.rewritten import with_images
from vmckpt.vm.domains.faults import LibvirtRefusedError
from vmckpt.vm.domains.inventory import Domain, as_domain
from vmckpt.vm.domains.libvirtd import Libvirtd
from vmckpt.vm.domains.monitor import domain_monitor
from vmckpt.vm.domains.running import as_vm, domain_dir
from vmckpt.vm.domains.sessions import libvirtd
from vmckpt.vm.inventory import Vm, read_home
from vmckpt.vm.paths import vm_dir

# How often its devices are compared.
_WATCH_S = 1.0


@dataclass(frozen=True, slots=True)
class DescribedDomain:
    """The answer of its host: the findings about it, the VM, and its writable disks."""

    findings: tuple[Finding, ...]
    spec: str = ""
    vm_json: str = ""
    disks: tuple[CopiedDisk, ...] = ()
    images: tuple[DiskImage, ...] = ()
    domain: ReplicatedDomain | None = None


async def found_domain(host: Host, uuid: str, session: Libvirtd) -> Domain:
    """Raises NotFoundError, RefusedError: it is off."""
    seen = await session.find(uuid)
    if seen is None:
        raise NotFoundError(
            f"the domain is no longer on {host.name}",
            why=f"its libvirtd knows no domain {uuid}",
            remedy="see `vmckpt vm list`",
        )
    domain = as_domain(host, seen)
    if not domain.is_active:
        raise RefusedError(
            f"'{domain.name}' is {domain.state}",
            why="only a guest that runs is replicated",
            remedy=f"start it: vmckpt vm start {domain.name}",
        )
    return domain


async def vm_of(domain: Domain, monitor: Monitor) -> Vm:
    """The domain as a VM whose files are among those of vmckpt's VMs. Raises as `as_vm`.

    One that is recorded already (it was taken over here, say) is the recorded one.
    """
    vm = await as_vm(domain, parts_of(domain.seen.xml), monitor)
    known = await read_home(domain.host, domain.name)
    directory = vm_dir(domain.host.state_dir, domain.name)
    files, replaces = directory.qemu(vm.qemu.files.qemu_id), None
    if known is not None and known.qemu.process == vm.qemu.process:
        files, replaces = known.qemu.files, known.qemu.replaces
    qemu = vm.qemu._replace(files=files, replaces=replaces, domain=domain.uuid)
    return vm._replace(directory=directory, qemu=qemu)


@dataclass(frozen=True, slots=True)
class DomainQuestion:
    """What is asked of its host. `holds_output`: whether its output is to be held."""

    uuid: str
    host: LocalHost
    holds_output: bool


async def describe(question: str) -> DescribedDomain:
    """The domain for its replication, on its host; a `DomainQuestion`, JSON.

    Raises MalformedError, NotFoundError, RefusedError, HostDownError.
    """
    asked = convert(DomainQuestion, parse(question))
    host, uuid = asked.host, asked.uuid
    async with libvirtd(host) as session:
        domain = await found_domain(host, uuid, session)
        mark = domain_dir(host, uuid)
        await host.make_dir(mark.path)
        label = f"{domain.name} on {host.name}"
        async with domain_monitor(host, uuid, label, mark.saving) as monitor:
            return await _described(domain, session, monitor, holds_output=asked.holds_output)


async def domain_of(host: Host, facts: ReplicatedDomain, qemu_id: str) -> Vm:
    """The domain whose protection begins, still run by the QEMU that was described.

    Raises NotFoundError, RefusedError, HostDownError.
    """
    async with libvirtd(host) as session:
        domain = await found_domain(host, facts.uuid, session)
    label, directory = f"{domain.name} on {host.name}", domain_dir(host, facts.uuid)
    await host.make_dir(directory.path)
    async with domain_monitor(host, facts.uuid, label, directory.saving) as monitor:
        vm = await vm_of(domain, monitor)
        require(await ask(runs(vm, monitor)), f"'{vm.name}' cannot be protected")
    if vm.qemu.process != facts.process:
        raise RefusedError(
            f"'{vm.name}' has another QEMU now",
            why="it was restarted while its protection began",
            remedy="start again: vmckpt replicate start",
        )
    return vm._replace(qemu=vm.qemu._replace(files=vm.directory.qemu(qemu_id)))


async def _described(
    domain: Domain, session: Libvirtd, monitor: Monitor, *, holds_output: bool
) -> DescribedDomain:
    parts = parts_of(domain.seen.xml)
    vm = await vm_of(domain, monitor)
    found = await checks_here(vm, domain, parts, session, monitor, holds_output=holds_output)
    images = await query_disk_images(monitor)
    disks = tuple(
        CopiedDisk(number, images[node].virtual_size_bytes)
        for number, (disk, node) in enumerate(zip(vm.spec.disks, vm.nodes, strict=True))
        if not disk.read_only
    )
    is_kept = domain.seen.persistent
    blocks = [(block.name, block.used_bytes) for block in await ram_blocks(monitor)]
    facts = ReplicatedDomain(
        domain.uuid,
        await session.migratable(domain.uuid),
        await session.definition(domain.uuid) if is_kept else "",
        is_kept and await session.starts_with_host(domain.uuid),
        await query_machine_type(monitor),
        tuple(blocks),
        vm.ram_names,
        vm.qemu.process,
        devices_of(domain.seen.xml),
    )
    return DescribedDomain(
        tuple(found), vm.spec.text, vm.qemu.to_json(), disks, tuple(images.values()), facts
    )


def devices_of(xml: str) -> tuple[str, ...]:
    """What changes when a device or vCPU is plugged in or out, or a disk gets a new image. Pure."""
    parts, root = parts_of(xml), parse_xml(xml, "a domain's XML")
    images = (f"{disk.target}: {disk.path}" for disk in parts.disks)
    vcpus = (f"{one.get('current', one.text)} vCPUs" for one in root.iterfind("vcpu"))
    which = (f"vCPU {one.get('id')}" for one in root.iterfind("vcpus/vcpu[@enabled='yes']"))
    return (*parts.aliases, *images, *vcpus, *which)


async def until_changed(host: Host, domain: ReplicatedDomain) -> None:
    """Watch a domain whose standby has only the devices that it had at the start.

    Raises OperationFailedError: it has others; or a user defined the domain again, which could then
    be started here once its standby has taken over. A libvirtd that does not answer says nothing.
    """
    while True:
        await asyncio.sleep(_WATCH_S)
        with suppress(HostDownError, OutcomeUnknownError, LibvirtRefusedError):
            async with libvirtd(host) as session:
                while (seen := await session.find(domain.uuid)) is not None:
                    if seen.persistent:
                        raise _defined()
                    if (now := devices_of(seen.xml)) != domain.devices:
                        raise _changed(set(now) ^ set(domain.devices))
                    await asyncio.sleep(_WATCH_S)


def _changed(which: set[str]) -> OperationFailedError:
    return OperationFailedError(
        "the domain's devices were changed",
        why=f"its standby does not have them so: {', '.join(sorted(which))}",
        remedy="protect it again: vmckpt replicate start",
    )


def _defined() -> OperationFailedError:
    return OperationFailedError(
        "the domain was defined again",
        why="libvirt could start an old state of it once its standby has taken over",
        remedy="protect it again, with that definition: vmckpt replicate start",
    )


def standalone(xml: str) -> str:
    """The XML as its standby has it: its images are copies, which are based on no others."""
    disks = [disk for disk in parts_of(xml).disks if not disk.read_only]
    return with_images(xml, {disk.target: ImageFile(disk.path, disk.format) for disk in disks})


def described_from(answer: object) -> DescribedDomain:
    """What `describe` printed on the domain's host. Raises MalformedError."""
    return convert(DescribedDomain, answer)
