"""Find VMs: which exist, on which host, and in which state."""

import asyncio
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

from vmckpt.deadlines import poll
from vmckpt.errors import (
    BusyError,
    HostDownError,
    NotFoundError,
    OutcomeUnknownError,
    RefusedError,
    StorageError,
    UsageError,
)
from vmckpt.hosts.every import Answers, Arrival, Unread, ask_every
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory.inventory import all_hosts
from vmckpt.hosts.lock import JUST_BEGUN, Owner
from vmckpt.qemu import commands
from vmckpt.sequence.steps import both
from vmckpt.state.documents import EMPTY, damaged, is_empty
from vmckpt.vm.ended import ending
from vmckpt.vm.paths import VmDir, lock_path, vm_dir, vms_dir
from vmckpt.vm.record import RAM_NAME, Qemu, open_monitor
from vmckpt.vm.spec.spec import Spec, parse_spec

QUERY_TIMEOUT_S = 2.0
# What the holder of a VM's lock reports while it recovers an interrupted migration.
RECOVERY = "migrate --recover"


class Vm(NamedTuple):
    """A VM at home on a host. `qemu` is its last QEMU, which may have ended."""

    spec: Spec
    host: Host
    directory: VmDir
    qemu: Qemu

    @property
    def name(self) -> str:
        """The VM's name, the same on every host."""
        return self.spec.name

    @property
    def nodes(self) -> tuple[str, ...]:
        """The block nodes of its disks in the running QEMU."""
        return self.qemu.nodes or tuple(disk.node for disk in self.spec.disks)

    @property
    def ram_is_shared(self) -> bool:
        """Whether its memory is in a file of vmckpt's, from which it is captured from outside."""
        is_alone = self.qemu.is_foreign or self.qemu.private_ram
        return not is_alone and bool(self.ram_names)

    @property
    def ram_names(self) -> tuple[str, ...]:
        """What QEMU calls the blocks of the guest's RAM, in the order in which they are captured.

        (): an adopted VM has it in no file that vmckpt could replace.
        """
        if (adopted := self.spec.adopted) is None:
            return self.qemu.ram_names or (RAM_NAME,)
        from vmckpt.vm.adopted.holes import ram_names

        return ram_names(adopted.arguments)

    async def is_alive(self) -> bool:
        """Whether its QEMU process runs."""
        return await self.host.is_alive(self.qemu.process)


class VmStatus(NamedTuple):
    """A VM's state. `state` is QEMU's run state, or "stopped", or "unreachable".

    `migrating` is true while a migration journal exists here; `owner` holds the VM's lock. `ended`
    says how a stopped VM's QEMU ended if it was not asked to (`ended.py`).
    """

    vm: Vm
    state: str
    migrating: bool
    owner: Owner | None
    ended: str = ""


async def read_vm(host: Host, name: str) -> Vm | None:
    """The VM if it is at home on `host`. Raises StorageError, UsageError on damaged files."""
    directory = vm_dir(host.state_dir, name)
    return await _read(host, name, directory, directory.current)


async def read_home(host: Host, name: str) -> Vm | None:
    """As `read_vm`; or the libvirt domain that is replicated from `host`, or was taken over there,
    by vmckpt's own record: libvirt says what became of it since.
    """
    directory = vm_dir(host.state_dir, name)
    return await read_vm(host, name) or await _read(host, name, directory, directory.domain)


async def _read(host: Host, name: str, directory: VmDir, record: Path) -> Vm | None:
    current, text = await both(host.read_text(record), host.read_text(directory.spec))
    if current is None or text is None:
        return None
    if is_empty(text):
        remedy = "write the VM's spec into it again (docs/spec.md)"
        raise damaged(directory.spec, EMPTY, remedy, host.name)
    spec = parse_spec(text, str(directory.spec), directory.path)
    if spec.name != name:  # otherwise an operation would affect another VM
        raise StorageError(
            f"{directory.spec} on {host.name} is not the spec of '{name}'",
            why=f"it is of a VM '{spec.name}'",
            remedy=f'write name = "{name}" into it',
        )
    return Vm(spec, host, directory, Qemu.from_json(current, directory))


async def require_at_home(host: Host, name: str) -> Vm:
    """The VM, which was at home on `host` when you named it. Raises NotFoundError, and as above."""
    vm = await read_vm(host, name)
    if vm is None:
        raise NotFoundError(
            f"'{name}' is no longer on {host.name}",
            why="it was moved or removed meanwhile",
            remedy="see `vmckpt vm list`",
        )
    return vm


async def homes(
    name: str, hosts: Iterable[Host] | None = None, *, silent_are_off: bool = False
) -> list[Vm]:
    """Every host where the VM is at home: one, none, or two during a migration's handover.

    Raises HostDownError if one of them does not answer, unless `silent_are_off`.
    """

    async def read(host: Host) -> Vm | None:
        try:
            return await read_vm(host, name)
        except HostDownError:
            if silent_are_off:
                return None
            raise

    found = await asyncio.gather(*map(read, hosts or all_hosts()))
    return [vm for vm in found if vm is not None]


async def require_unused(names: Collection[str], host: Host, hosts: Iterable[Host]) -> None:
    """Check that no other of `hosts` that answers has a VM of these names, or will soon.

    `host` checks for itself. Call it as the holder of the name's lock on `host`: of two that make a
    VM of one name, at least one then sees the other. Raises RefusedError, BusyError.
    """

    async def inspect(other: Host) -> list[tuple[Host, str, Owner | None, Vm | None, bool]]:
        if other.name == host.name:
            return []
        # In this order: a lock is given back when the VM is there.
        locked = await other.list_dir(other.state_dir / "locks")
        there = await other.list_dir(vms_dir(other.state_dir))
        return [
            (
                other,
                name,
                await other.lock_owner(lock_path(other.state_dir, name)),
                await read_vm(other, name),
                await other.exists(vm_dir(other.state_dir, name).journal),
            )
            for name in dict.fromkeys([*there, *locked])
            if name in names
        ]

    found = await ask_every(hosts, inspect)
    for other, name, owner, vm, is_cut_off in (one for those in found.given for one in those):
        if vm is not None:
            raise RefusedError(
                f"there is a VM '{name}' already",
                why=f"on host {other.name}",
                remedy="choose another name; to restore that VM: --in-place",
            )
        if owner is not None:
            raise BusyError(
                f"there may soon be a VM '{name}' on {other.name}",
                why=f"its name is held there by {owner.action} (pid {owner.pid})",
                remedy="wait until that has ended, or choose another name",
            )
        if is_cut_off:
            raise BusyError(
                f"{other.name} has remains of an interrupted migration of '{name}'",
                why="the guest may run there",
                remedy=f"recover it first: vmckpt migrate --recover {name}; or choose another name",
            )


async def find_vm(name: str) -> Vm:
    """Find the VM on any host.

    Raises NotFoundError; OutcomeUnknownError if two hosts have it, HostDownError if only a host
    that does not answer may have it.
    """
    answers = await ask_every(all_hosts(), lambda host: read_vm(host, name))
    found = [vm for vm in answers.given if vm is not None]
    if not found and answers.silent:
        raise HostDownError(
            f"'{name}' is on none of the hosts that answer",
            why="; ".join(f"{error.what}: {error.why}" for error in answers.silent),
            remedy="; ".join(error.remedy for error in answers.silent),
        )
    if not found:
        raise NotFoundError(
            f"there is no VM '{name}'",
            why="no host of the inventory has it",
            remedy="see `vmckpt vm list`",
        )
    if len(found) > 1:
        raise OutcomeUnknownError(
            f"'{name}' is at home on {' and '.join(vm.host.name for vm in found)}",
            why="a migration between them was interrupted",
            remedy=f"run `vmckpt migrate --recover {name}`",
        )
    return found[0]


async def inspect(vm: Vm) -> VmStatus:
    """The VM's state, without disturbing its operation; takes at most about 2 s."""
    migrating = await vm.host.exists(vm.directory.journal)
    owner = await vm.host.lock_owner(lock_path(vm.host.state_dir, vm.name))
    if not await vm.is_alive():
        ended = await ending(vm.host, vm.spec, vm.qemu.files)
        return VmStatus(vm, "stopped", migrating, owner, ended)
    try:
        monitor = await open_monitor(vm.host, vm.qemu, vm.qemu.files.onlooker, QUERY_TIMEOUT_S)
        try:
            state = (await commands.query_status(monitor, QUERY_TIMEOUT_S)).status
        finally:
            await monitor.close()
    except HostDownError:
        state = "unreachable" if await vm.host.is_alive(vm.qemu.process) else "stopped"
    return VmStatus(vm, state, migrating, owner)


async def inspect_all(hosts: Iterable[Host]) -> Answers[VmStatus]:
    """The state of every VM of `hosts`, queried concurrently, and the hosts that do not answer.

    A VM with damaged files is listed among the silent, and hides no other. One that a migration
    brings to a host, or that may have arrived by one that was interrupted, is among the arrivals.
    """
    unread, arrivals = list[Unread](), list[Arrival]()

    async def inspect_one(host: Host, name: str) -> VmStatus | None:
        try:
            if (vm := await read_vm(host, name)) is not None:
                return await inspect(vm)
            arrivals.extend(await _arriving(host, name))
            return None
        except (UsageError, StorageError) as exc:
            unread.append(Unread(host.name, name, exc))
            return None

    async def inspect_on(host: Host) -> list[VmStatus | None]:
        names = await host.list_dir(vms_dir(host.state_dir))
        return await asyncio.gather(*(inspect_one(host, name) for name in names))

    answers = await ask_every(hosts, inspect_on)
    given = [inspect for statuses in answers.given for inspect in statuses if inspect is not None]
    silent = answers.silent + [one.error for one in unread]
    return Answers(given, silent, answers.unanswered, tuple(unread), tuple(arrivals))


async def _arriving(host: Host, name: str) -> list[Arrival]:
    """A VM that is not at home on a host, and of whose migration something is there."""
    mine, lock = vm_dir(host.state_dir, name), lock_path(host.state_dir, name)
    if not await host.exists(mine.journal):
        return []
    owner = await host.lock_owner(lock)
    # It may have ended before its lock was seen free.
    if not await host.exists(mine.journal) or await host.exists(mine.current):
        return []
    return [Arrival(host.name, name, owner.action if owner else None)]


async def is_worked_on(name: str) -> bool:
    """Whether an operation other than a recovery holds the VM's lock on any host now.

    Unknown for a silent host, where operations on the VM would fail anyway.
    """

    async def actions() -> set[str]:
        owners = await ask_every(
            all_hosts(), lambda host: host.lock_owner(lock_path(host.state_dir, name))
        )
        return {owner.action for owner in owners.given if owner}

    # An operation that has just begun will soon identify itself.
    found = await poll(
        actions, lambda them: JUST_BEGUN not in them, every_s=0.002, within_s=QUERY_TIMEOUT_S
    )
    return bool(found - {RECOVERY})


async def running_operations() -> set[str]:
    """The ids of the runs that hold a VM's lock now, on hosts that answer."""

    async def inspect_on(host: Host) -> list[Owner | None]:
        names = await host.list_dir(host.state_dir / "locks")
        paths = [lock_path(host.state_dir, name) for name in names]
        return await asyncio.gather(*(host.lock_owner(path) for path in paths))

    answers = await ask_every(all_hosts(), inspect_on)
    return {owner.run for owners in answers.given for owner in owners if owner}


async def require_console(vm: Vm) -> None:
    """Raises RefusedError if the VM is off, or its console cannot be read."""
    await require_alive(vm)
    if not await vm.host.exists(vm.qemu.files.console):
        raise RefusedError(
            f"the console of '{vm.name}' cannot be reached",
            why="its QEMU was started without a serial port on a socket",
            remedy="look at it where it was put, or move the VM first: then it has one",
        )


async def require_alive(vm: Vm) -> None:
    """Raises RefusedError if the VM's QEMU does not run."""
    if not await vm.is_alive():
        raise RefusedError(
            f"'{vm.name}' is stopped",
            why=f"its QEMU on {vm.host.name} does not run",
            remedy=f"start it: vmckpt vm start {vm.name}",
        )
