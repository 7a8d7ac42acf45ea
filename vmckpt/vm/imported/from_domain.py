"""A stopped libvirt domain becomes a VM of vmckpt's own."""

from contextlib import AsyncExitStack
from shlex import quote
from typing import NamedTuple

from vmckpt.errors import RefusedError
from vmckpt.hosts.every import ask_every
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory.inventory import all_hosts, check_name
from vmckpt.sequence.steps import finish
from vmckpt.units import counted
from vmckpt.vm.adopted.rewrite import rewrite
from vmckpt.vm.adopted.spec_text import spec_text
from vmckpt.vm.create import create_vm, name_lock, new_name
from vmckpt.vm.domains.definition.description import Description, parse_domain
from vmckpt.vm.domains.faults import LibvirtRefusedError
from vmckpt.vm.domains.inventory import Domain, held_domain
from vmckpt.vm.domains.libvirtd import Libvirtd
from vmckpt.vm.domains.sessions import libvirtd
from vmckpt.vm.imported.besides import limits, protections
from vmckpt.vm.imported.domain_xml import with_holes
from vmckpt.vm.imported.native import native_argv, native_machine
from vmckpt.vm.inventory import Vm, read_vm
from vmckpt.vm.lifecycle import owner
from vmckpt.vm.paths import images_dir, lock_path, vm_dir
from vmckpt.vm.spec.spec import parse_spec
from vmckpt.vm.spec.spec_text import written

_ACTION = "vm import"
# Kinds of NIC that become taps on the host's bridge, and the kind that stays.
_TAPS, _USER = frozenset({"network", "bridge"}), "user"
_STOP = "stop it first: vmckpt vm stop {}"
_ONCE = "start and stop it: virsh start {0}; virsh shutdown {0}"


class Imported(NamedTuple):
    """The new VM, which is off, and notes for its owner."""

    vm: Vm
    notes: tuple[str, ...]


async def import_domain(domain: Domain, name: str) -> Imported:
    """Make a domain that is off a VM called `name`; libvirt no longer has it afterwards.

    Its disk images and variable store stay where they are. On an error nothing has changed; if the
    command is killed, or libvirtd falls silent, at the last step, both exist: the same call then
    removes the domain. Raises RefusedError, UsageError, BusyError.
    """
    check_name(name, "VM")
    host = domain.host
    async with AsyncExitStack() as locks:
        await locks.enter_async_context(name_lock(name, _ACTION))
        if name != domain.name:
            lock = host.lock(lock_path(host.state_dir, name), owner(_ACTION))
            await locks.enter_async_context(lock)
        now, session = await locks.enter_async_context(held_domain(domain, _ACTION))
        await _require_idle(now, session)
        await _require_nowhere(now.name, now.uuid, besides=host)
        vm, xml = await read_vm(host, name), await session.definition(now.uuid)
        autostart = await session.starts_with_host(now.uuid)
        is_new = vm is None or not _is_of(vm, xml)
        if vm is not None and not is_new:
            imported = Imported(vm, ())  # a call before this one did the rest
        else:
            imported = await _create(host, name, xml, session, autostart=autostart)
        try:
            await session.undefine(now.uuid)
            if await session.find(now.uuid) is not None:
                # It was started meanwhile, and is transient now: it gets its definition back.
                await session.define(xml)
                if autostart:
                    await session.start_with_host(now.uuid)
                raise _refusal(now.name, "it was started meanwhile", _STOP.format(quote(now.name)))
        except (LibvirtRefusedError, RefusedError):
            if is_new:
                await finish(host.remove(imported.vm.directory.path))
            raise
        return imported


async def import_xml(xml: str, host: Host, name: str | None) -> Imported:
    """Make a VM of a domain's XML, by the host's libvirtd; no libvirtd has that domain.

    `name` is the VM's (None: the domain's). On an error nothing has changed. Raises RefusedError,
    UsageError, BusyError, HostDownError.
    """
    description = parse_domain(xml)
    name = name or description.name
    check_name(name, "VM")
    if host.libvirt is None:
        raise RefusedError(
            f"{host.name} cannot read a domain's XML",
            why="libvirt translates it, and vmckpt knows no libvirtd there",
            remedy=f"name one: vmckpt host set {host.name} --libvirt SOCKET; or another --host",
        )
    async with new_name(name, host, _ACTION), libvirtd(host) as session:
        if description.uuid:
            await _require_nowhere(description.name, description.uuid)
        await _require_possible(host, description)
        return await _create(host, name, xml, session, autostart=False)


async def _require_nowhere(name: str, uuid: str, *, besides: Host | None = None) -> None:
    """Raises RefusedError if a libvirtd has the domain: it could run twice; HostDownError."""

    async def has_it(host: Host) -> Host | None:
        async with libvirtd(host) as session:
            return host if await session.find(uuid) else None

    at_home = None if besides is None else besides.name
    asked = [host for host in all_hosts() if host.libvirt and host.name != at_home]
    answers = await ask_every(asked, has_it)
    for host in filter(None, answers.given):
        remedy = f"vmckpt vm import {quote(name)}"
        if besides is not None:
            undefine = f"virsh undefine {quote(name)}"
            remedy = f"see what it is there; if it is outdated: {undefine} on {host.name}"
        raise _refusal(name, f"libvirt on {host.name} has it", remedy)
    if answers.silent:
        raise answers.silent[0]


async def _require_idle(domain: Domain, session: Libvirtd) -> None:
    """Raises RefusedError if anything but its disks would be lost."""
    name = quote(domain.name)
    if domain.is_active:
        raise _refusal(domain.name, "it runs", _STOP.format(name))
    if await session.has_saved_memory(domain.uuid):
        why = "libvirt has saved its memory, from which it continues at its next start"
        raise _refusal(domain.name, why, _ONCE.format(name))
    if snapshots := await session.snapshots(domain.uuid):
        why = f"libvirt would forget its {counted(len(snapshots), 'snapshot')}"
        raise _refusal(domain.name, why, f"delete them: virsh snapshot-delete {name} NAME")
    await _require_possible(domain.host, domain.description)


async def _require_possible(host: Host, description: Description) -> None:
    name = quote(description.name)
    if kinds := {one.kind for one in description.interfaces} - _TAPS - {_USER}:
        why = f"vmckpt connects NICs to bridges, and it has NICs of type {', '.join(sorted(kinds))}"
        raise _refusal(description.name, why, f"change them: virsh edit {name}")
    variables = description.variables
    if variables is not None and not await host.exists(variables):
        why = f"its variable store {variables} does not exist yet"
        raise _refusal(description.name, why, _ONCE.format(name))


def _refusal(name: str, why: str, remedy: str) -> RefusedError:
    what = f"the domain '{name}' cannot become a VM of vmckpt's own"
    return RefusedError(what, why=why, remedy=remedy)


async def _create(
    host: Host, name: str, xml: str, session: Libvirtd, *, autostart: bool
) -> Imported:
    """The VM, and what differs from the domain."""
    if lost := protections(xml):
        what = parse_domain(xml).name
        why = "vmckpt's VMs have no such things: " + "; ".join(lost)
        raise _refusal(what, why, f"change it (virsh edit {quote(what)}), or leave it to libvirt")
    description, directory = parse_domain(xml), vm_dir(host.state_dir, name)
    argv = native_argv(await session.command_line(xml))
    machine = native_machine(description.name, argv, images_dir(host.state_dir))
    made = rewrite(name, machine.facts)
    spec = parse_spec(spec_text(name, machine.facts, made), str(directory.spec), directory.path)
    spec = spec._replace(
        autostart=autostart,
        adopted=spec.adopted
        and spec.adopted._replace(domain=with_holes(xml, spec.disks, host.state_dir)),
    )
    spec = parse_spec(written(spec), str(directory.spec), directory.path)
    notes = (*machine.notes, *made.notes, *_on_networks(description, host.bridge))
    if limited := limits(xml):
        notes = (*notes, f"libvirt's limits on it are left out: {', '.join(limited)}")
    return Imported(await create_vm(spec, host, starts=False), notes)


def _on_networks(description: Description, bridge: str | None) -> list[str]:
    """What becomes of NICs on virtual networks, and on other bridges than the host's."""
    where = {"network": "libvirt's network", "bridge": "the bridge"}
    return [
        f"a NIC on {where[one.kind]} '{one.source}' is on the host's bridge now"
        f"{f' ({bridge})' if bridge else ''}"
        for one in description.interfaces
        if one.kind in where and one.source != bridge
    ]


def _is_of(vm: Vm, xml: str) -> bool:
    """Whether a VM was made of a domain as it is defined now."""
    adopted, disks = vm.spec.adopted, vm.spec.disks
    return adopted is not None and adopted.domain == with_holes(xml, disks, vm.host.state_dir)
