"""Every reason why a migration cannot work, found before anything is changed."""

import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from vmckpt.errors import RefusedError
from vmckpt.hosts.host import Host
from vmckpt.options.migration import MigrationOptions
from vmckpt.preflight import destination_host, vm_users
from vmckpt.preflight.adopted import adopted_changes
from vmckpt.preflight.blockers import device_checks
from vmckpt.preflight.finding import OK, REFUSE, WARN, Finding, ask, refusal, require
from vmckpt.preflight.migration import dirty_log
from vmckpt.preflight.migration.disks import DiskCopy, Owned, disk_checks, plan_disks
from vmckpt.preflight.migration.encryption import UNENCRYPTED, Encryption, Scheme, choose
from vmckpt.preflight.migration.method import (
    copy_checks,
    domain_checks,
    encryption_checks,
    postcopy_risk,
    resolve_method,
)
from vmckpt.qemu import commands
from vmckpt.qemu.abilities import (
    Abilities,
    Agreement,
    Refusal,
    WantedSettings,
    agree,
    learn,
    splits_well,
)
from vmckpt.qemu.block import DiskImage, query_disk_images
from vmckpt.qemu.monitor import session
from vmckpt.sequence.steps import both
from vmckpt.units import format_size
from vmckpt.vm.inventory import Vm
from vmckpt.vm.paths import lock_path
from vmckpt.vm.probe import abilities
from vmckpt.vm.users.users import user_of

# With CAP_IPC_LOCK (capabilities(7)) locked pages are not limited.
CAP_IPC_LOCK = 1 << 14


class Preflight(NamedTuple):
    """All checks. `options` are those requested, with "auto" replaced by its choice.

    Also the settings for both QEMUs if they agree, the disks to copy, and the encryption.
    """

    checks: tuple[Finding, ...]
    options: MigrationOptions
    agreement: Agreement | None = None
    copies: tuple[DiskCopy, ...] = ()
    encryption: Encryption = UNENCRYPTED

    @property
    def possible(self) -> bool:
        """Whether no check refuses."""
        return self.agreement is not None and all(c.verdict != REFUSE for c in self.checks)

    def require(self, vm_name: str, destination: str) -> Agreement:
        """The agreed settings. Raises RefusedError naming every refusal."""
        what = f"'{vm_name}' cannot migrate to {destination}"
        require(self.checks, what)
        if self.agreement is None:
            raise refusal(self.checks, what)
        return self.agreement


async def preflight(vm: Vm, destination: Host, options: MigrationOptions) -> Preflight:
    """Ask both hosts; changes nothing. Raises HostDownError if one cannot be asked."""
    both_here = vm.host.is_this_machine and destination.is_this_machine
    if vm.host.name == destination.name or (
        both_here and vm.host.state_dir == destination.state_dir
    ):
        reason = f"the VM is on {destination.name} already"
        return Preflight((Finding("same-host", REFUSE, reason, "name another host"),), options)
    found, network = await both(
        _checked(vm, destination, options), ask(destination_host.network(vm, destination))
    )
    return found._replace(checks=(*found.checks, *network))


async def _checked(vm: Vm, destination: Host, options: MigrationOptions) -> Preflight:
    """All checks except the destination's network, which takes as long as the rest."""
    source = await _inspect_source(vm, options)
    rights = await ask(destination_host.permissions(vm, destination))
    if any(one.verdict == REFUSE for one in rights):
        return Preflight((*rights, *source.checks), options)
    ours, theirs = source.abilities, await abilities(destination)
    loss = dirty_log.loss(vm, ours.version)
    several = splits_well(ours, theirs)
    options = resolve_method(options, loses_pages=loss is not None, splits_well=several)
    disks = await plan_disks(
        Owned(vm.host, vm.name, vm.spec.disks, vm.nodes), destination, options.disks, source.images
    )
    encryption, encrypted = await _encryption(vm, destination, options)
    settings = options.settings(copies_disks=bool(disks.copies))
    checks = await ask(
        destination_host.name(vm, destination),
        destination_host.machine(vm, destination, theirs),
        destination_host.accel(vm, destination),
        rights,
        vm_users.checks(destination, vm.spec, vm.host if disks.shared else None),
        destination_host.room(vm, destination),
        disk_checks(disks),
        _pace(ours, disks.copies),
        destination_host.files(vm, destination, disks.shared),
        _variables(vm, destination) if options.offline else (),
        destination_host.forwards(vm, destination),
        destination_host.address(vm.host, destination),
        destination_host.ports(destination, needed=2 if disks.copies else 1),
        destination_host.clock(vm.host, destination),
        [encrypted],
        source.checks,
        _passthrough(vm, destination, options, is_running=source.is_running),
        postcopy_risk(options),
        encryption_checks(options, encryption),
        copy_checks(options, copies_disks=bool(disks.copies)),
        _locking(vm) if options.zero_copy else (),
        domain_checks(options),
        destination_host.userfaults(destination) if options.may_postcopy else (),
        dirty_log.checks(loss, options) if loss else (),
        _return_checks(vm, ours, theirs, settings),
    )
    agreed = agree(ours, theirs, settings)
    if isinstance(agreed, Agreement):
        checks.append(Finding("qemu-pair", OK, f"QEMU {ours.version} -> {theirs.version}"))
        return Preflight(tuple(checks), options, agreed, disks.copies, encryption)
    checks += [_option(refusal) for refusal in agreed]
    return Preflight(tuple(checks), options)


async def _variables(vm: Vm, destination: Host) -> AsyncIterator[Finding]:
    if vm.spec.firmware is not None:
        path = vm.spec.firmware.vars
        async for found in destination_host.variables(vm.host, destination, path, path):
            yield found


async def busy(vm: Vm) -> Finding | None:
    """Refuse while another operation holds the VM; None if it is free."""
    owner = await vm.host.lock_owner(lock_path(vm.host.state_dir, vm.name))
    if owner is None:
        return None
    reason = f"{owner.action} is under way (run {owner.run}, pid {owner.pid})"
    return Finding(
        "busy", REFUSE, reason, "wait for its end; it may be the cause of the other findings"
    )


async def _passthrough(
    vm: Vm, destination: Host, options: MigrationOptions, *, is_running: bool
) -> AsyncIterator[Finding]:
    """Few VMs have passed-through devices: the others do without these modules."""
    if vm.spec.passthrough:
        from vmckpt.preflight.passthrough import passthrough_checks

        may = options.may_postcopy
        async for found in passthrough_checks(
            vm, destination, may_postcopy=may, is_running=is_running
        ):
            yield found


async def _away(vm: Vm) -> frozenset[str]:
    """The host's functions that are unplugged before QEMU is asked to migrate."""
    if not vm.spec.passthrough:
        return frozenset()
    from vmckpt.preflight.passthrough import detached_addresses

    return await detached_addresses(vm)


def _return_checks(
    vm: Vm, ours: Abilities, theirs: Abilities, settings: WantedSettings
) -> Iterator[Finding]:
    """Whether the VM can migrate back the same way; never a refusal."""
    back = agree(theirs, ours, settings)
    if isinstance(back, list):
        reason = "; ".join(f"{refusal.option}: {refusal.reason}" for refusal in back)
        yield Finding("way-back", WARN, f"it cannot come back in the same way: {reason}")
    elif loss := dirty_log.loss(vm, theirs.version):
        remedy = "let it come back with --method stop"
        yield Finding("way-back", WARN, f"it cannot come back while it runs: {loss.reason}", remedy)
    else:
        yield Finding("way-back", OK, f"QEMU {theirs.version} -> {ours.version} can do the same")


async def _locking(vm: Vm) -> AsyncIterator[Finding]:
    process = Path(f"/proc/{vm.qemu.process.pid}")
    limits, status = await both(
        vm.host.read_text(process / "limits"), vm.host.read_text(process / "status")
    )
    for found in locking(limits or "", status or "", vm.spec.memory_bytes):
        yield found


def locking(limits: str, status: str, memory_bytes: int) -> Iterator[Finding]:
    """Whether QEMU may lock pages for zero-copy sending, according to its /proc/PID. Pure."""
    allowed = re.search(r"^Max locked memory +([0-9]{1,19}|unlimited)\s", limits, re.MULTILINE)
    rights = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
    exempt = rights is not None and bool(int(rights[1], 16) & CAP_IPC_LOCK)
    if exempt or allowed is None or allowed[1] == "unlimited" or int(allowed[1]) >= memory_bytes:
        return
    reason = (
        f"--zerocopy: its QEMU may lock {format_size(int(allowed[1]))}; where more is on "
        "its way at once the move fails, and is undone"
    )
    remedy = "start it by a user that may lock as much as its memory (ulimit -l)"
    yield Finding("zerocopy", WARN, reason, remedy)


def _option(refusal: Refusal) -> Finding:
    return Finding(
        "qemu-option", REFUSE, f"{refusal.option}: {refusal.reason}", f"leave out {refusal.option}"
    )


async def _encryption(
    vm: Vm, destination: Host, options: MigrationOptions
) -> tuple[Encryption, Finding]:
    own_users = bool(
        vm.host.vm_uids or destination.vm_uids or await user_of(vm.host, vm.qemu.files)
    )
    try:
        name = options.tls_name
        found = await choose(options.tls, vm.host, destination, name=name, own_users=own_users)
    except RefusedError as exc:
        return UNENCRYPTED, Finding("tls", REFUSE, exc.why, exc.remedy)
    one_machine = vm.host.is_this_machine and destination.is_this_machine
    if found.scheme is Scheme.UNENCRYPTED and not one_machine:
        remedy = (
            "leave out --tls off: everyone with access to the network can read the guest's memory"
        )
        return found, Finding("tls", WARN, found.reason, remedy)
    return found, Finding("tls", OK, found.reason)


class _MigrationSource(NamedTuple):
    checks: tuple[Finding, ...]
    abilities: Abilities
    images: Mapping[str, DiskImage] = {}
    is_running: bool = False


async def _inspect_source(vm: Vm, options: MigrationOptions) -> _MigrationSource:
    # An adopted QEMU may be another build than the host's own, or the only one.
    installed = None if vm.qemu.is_foreign else await abilities(vm.host)
    if not await vm.is_alive():
        reason = f"'{vm.name}' is stopped"
        remedy = f"migrate it with --offline, or start it: vmckpt vm start {vm.name}"
        checks = (Finding("running", REFUSE, reason, remedy),)
        return _MigrationSource(checks, installed or await abilities(vm.host))
    async with session(await vm.host.connect(vm.qemu.files.onlooker), vm.name) as monitor:
        # The VM's QEMU binary may have been replaced on disk since it was started.
        (run, migration), (images, version) = await both(
            both(commands.query_status(monitor), commands.query_migrate(monitor)),
            both(query_disk_images(monitor), commands.query_version(monitor)),
        )
        away = await _away(vm)
        blockers = [
            blocker
            for blocker in migration.blockers
            if not any(address in blocker for address in away)
        ]
        pci_ids = await commands.query_pci_ids(monitor) if blockers else {}
        changed = await adopted_changes(vm, monitor)
        ours = installed if installed and installed.version == version else await learn(monitor)
    if run.status not in ("running", "paused", "prelaunch"):
        reason = f"its state is '{run.status}'"
        remedy = "a VM in that state cannot be moved; see `vmckpt vm show`"
        return _MigrationSource((Finding("running", REFUSE, reason, remedy),), ours)
    state = "off" if options.offline else run.status
    running = Finding("running", OK, f"the VM is {state}")
    if changed:
        return _MigrationSource(tuple(changed), ours, images)
    found = (running, *device_checks(blockers, pci_ids))
    return _MigrationSource(found, ours, images, run.status == "running")


def _pace(ours: Abilities, copies: Sequence[DiskCopy]) -> Iterator[Finding]:
    if any(not copy.read_only for copy in copies) and "block-job-change" not in ours.commands:
        reason = (
            f"QEMU {ours.version} cannot hold a guest to the pace of the copy: one that writes as "
            "fast as its disk is copied is not moved"
        )
        yield Finding("disk-pace", WARN, reason, "let it write less meanwhile, or use a newer QEMU")
