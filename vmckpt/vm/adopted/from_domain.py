"""A stopped libvirt domain becomes a VM of vmckpt's own."""

from contextlib import AsyncExitStack
from shlex import quote
from typing import NamedTuple

from vmckpt.errors import RefusedError
from vmckpt.hosts.inventory.inventory import check_name
from vmckpt.sequence.steps import finish
from vmckpt.vm.adopted.domain_xml import with_holes
from vmckpt.vm.adopted.native import native_argv, native_machine
from vmckpt.vm.adopted.rewrite import rewrite
from vmckpt.vm.adopted.spec_text import spec_text
from vmckpt.vm.create import create_vm, name_lock
from vmckpt.vm.domains.description import Description, parse_domain
from vmckpt.vm.domains.faults import LibvirtRefusedError
from vmckpt.vm.domains.inventory import Domain, held_domain
from vmckpt.vm.domains.libvirtd import Libvirtd
from vmckpt.vm.inventory import Vm, read_vm
from vmckpt.vm.lifecycle import owner
from vmckpt.vm.paths import images_dir, lock_path, vm_dir
from vmckpt.vm.spec.spec import Spec, parse_spec
from vmckpt.vm.spec.spec_text import written

_ACTION = "vm import"
# Kinds of NIC that become taps on the host's bridge, and the kind that stays.
_TAPS, _USER = frozenset({"network", "bridge"}), "user"


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
            await locks.enter_async_context(
                host.lock(lock_path(host.state_dir, name), owner(_ACTION))
            )
        now, session = await locks.enter_async_context(held_domain(domain, _ACTION))
        await _require_idle(now, session)
        vm, notes = await read_vm(host, name), tuple[str, ...]()
        if vm is None or _domain_of(vm.spec) != now.uuid:
            spec, notes = await _spec(now, name, session)
            vm = await create_vm(spec, host, starts=False)
        try:
            await session.undefine(now.uuid)
        except LibvirtRefusedError:
            await finish(host.remove(vm.directory.path))
            raise
        return Imported(vm, notes)


async def _require_idle(domain: Domain, session: Libvirtd) -> None:
    """Raises RefusedError if anything but its disks would be lost."""
    name = quote(domain.name)
    if domain.is_active:
        raise _refusal(domain, "it runs", f"stop it first: vmckpt vm stop {name}")
    if await session.has_saved_memory(domain.uuid):
        why = "libvirt has saved its memory, from which it continues at its next start"
        raise _refusal(domain, why, f"start and stop it: virsh start {name}; virsh shutdown {name}")
    if snapshots := await session.snapshots(domain.uuid):
        why = f"libvirt knows {len(snapshots)} of its snapshots, and would forget them"
        raise _refusal(domain, why, f"delete them: virsh snapshot-delete {name} NAME")
    if kinds := {one.kind for one in domain.description.interfaces} - _TAPS - {_USER}:
        why = f"vmckpt connects NICs to bridges, and it has NICs of type {', '.join(sorted(kinds))}"
        raise _refusal(domain, why, f"change them: virsh edit {name}")
    variables = domain.description.variables
    if variables is not None and not await domain.host.exists(variables):
        why = f"its variable store {variables} does not exist yet"
        raise _refusal(domain, why, f"start and stop it: virsh start {name}; virsh shutdown {name}")


def _refusal(domain: Domain, why: str, remedy: str) -> RefusedError:
    what = f"the domain '{domain.name}' cannot become a VM of vmckpt's own"
    return RefusedError(what, why=why, remedy=remedy)


async def _spec(domain: Domain, name: str, session: Libvirtd) -> tuple[Spec, tuple[str, ...]]:
    """The VM's spec, and what differs from the domain."""
    host, directory = domain.host, vm_dir(domain.host.state_dir, name)
    xml = await session.definition(domain.uuid)
    argv = native_argv(await session.command_line(xml))
    machine = native_machine(domain.name, argv, images_dir(host.state_dir))
    made = rewrite(name, machine.facts)
    spec = parse_spec(spec_text(name, machine.facts, made), str(directory.spec), directory.path)
    spec = spec._replace(
        autostart=await session.starts_with_host(domain.uuid),
        adopted=spec.adopted and spec.adopted._replace(domain=with_holes(xml, spec.disks)),
    )
    spec = parse_spec(written(spec), str(directory.spec), directory.path)
    return spec, (*machine.notes, *made.notes, *_on_networks(domain.description, host.bridge))


def _on_networks(description: Description, bridge: str | None) -> list[str]:
    """What becomes of NICs on virtual networks."""
    return [
        f"a NIC on libvirt's network '{one.source}' is on the host's bridge now"
        f"{f' ({bridge})' if bridge else ''}"
        for one in description.interfaces
        if one.kind == "network"
    ]


def _domain_of(spec: Spec) -> str | None:
    """The UUID of the domain that a VM was."""
    xml = spec.adopted.domain if spec.adopted else ""
    return parse_domain(xml).uuid if xml else None
