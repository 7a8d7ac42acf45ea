"""Finishing or undoing a migration whose command died, or whose outcome was unknown."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vmckpt.devices.journey import Journey
from vmckpt.errors import (
    HostDownError,
    OutcomeUnknownError,
    VmckptError,
    VmLostError,
)
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory import all_hosts, find_host
from vmckpt.hosts.process import ProcessId
from vmckpt.migrate.disk_files import hand_over_files, remove_files
from vmckpt.migrate.disks import drop_mirrors
from vmckpt.migrate.encryption import disarm_if_possible
from vmckpt.migrate.ends import End, Pair, discard, kill
from vmckpt.migrate.handover import find_qemu, release, settle_on_target
from vmckpt.migrate.journal import BEFORE_DEVICES, Journal, find_journal, newest
from vmckpt.migrate.locks import remove_dead_locks, wait_for_locks
from vmckpt.migrate.ownership import Move
from vmckpt.migrate.settings import leave_plain
from vmckpt.migrate.settle import settle
from vmckpt.vm.inventory import Vm, read_vm
from vmckpt.vm.paths import vm_dir
from vmckpt.vm.start import Qemu

# How a recovery ended.
FINISHED, UNDONE = "finished: the VM is on the target", "undone: the VM is on the source"


@dataclass(frozen=True, slots=True)
class Recovery:
    """What was found of a cut-off migration, and where the VM is now."""

    run: str
    vm: str
    host: str
    step: str
    outcome: str


async def recover(
    name: str, note: Callable[[str], None], hosts: Sequence[Host] | None = None
) -> Recovery | None:
    """End a cut-off migration of the VM between any of `hosts` (the inventory's) for good.

    None when there is none. Afterwards the VM is in exactly one place. Raises BusyError while the
    migration is still being worked on, VmLostError, OutcomeUnknownError (nothing was changed; says
    which end is silent).
    """
    hosts = hosts or all_hosts()
    journal = await find_journal(name, hosts)
    if journal is None:
        await remove_dead_locks(name, hosts)
        return None
    source, target = _named(journal.source, hosts), _named(journal.target, hosts)
    async with await wait_for_locks(journal.vm, journal.run, (source, target)):
        # Which got further is to be known: both have to answer now.
        journals = [await Journal.read(host, name) for host in (source, target)]
        journal = newest(journal for journal in journals if journal)
        if journal is None:
            return None
        return await _recover(journal, source, target, note)


def _named(name: str, hosts: Iterable[Host]) -> Host:
    """Of some hosts, else of the inventory. Raises NotFoundError."""
    return next((host for host in hosts if host.name == name), None) or find_host(name)


async def _recover(
    journal: Journal, source: Host, target: Host, note: Callable[[str], None]
) -> Recovery:
    pair = Pair(
        End(source, vm_dir(source.state_dir, journal.vm).qemu(journal.source_qemu)),
        End(
            target,
            vm_dir(target.state_dir, journal.vm).qemu(journal.target_qemu),
            certainly_ran=journal.was_running and journal.past_commit,
        ),
        journal.was_running,
        Path(journal.ram_dir),
    )
    note(f"run {journal.run} was cut off at step '{journal.step}': asking both ends")
    home = await read_vm(source, journal.vm)
    arrived = await read_vm(target, journal.vm)
    try:
        if arrived is not None:
            # The handover was past the commit: what is left is the source's clean-up.
            move = Move.TARGET_OWNS
        else:
            move = await settle(pair, note)
        match move:
            case Move.TARGET_OWNS:
                await _finish(pair, home, arrived)
                await disarm_if_possible(pair.target, note)
                await leave_plain(pair.target, note)
                await hand_over_files(source, target, journal.run, journal.disks, note)
                await _bring_devices_back(pair.target, home or arrived, journal, note)
                where, outcome = target, FINISHED
            case Move.SOURCE_OWNS:
                try:
                    await drop_mirrors(pair.source, journal.run)
                except VmckptError as exc:
                    # The guest goes on with its own disks, whatever a mirror of them still does.
                    note(str(exc))
                await disarm_if_possible(pair.source, note)
                await leave_plain(pair.source, note)
                await undo_target(pair)
                await remove_files(target, journal.run, journal.disks)
                await _bring_devices_back(pair.source, home, journal, note)
                where, outcome = source, UNDONE
            case Move.LOST:
                await bury(pair, home, journal, note)
                if not journal.offline:
                    await journal.remove((source, target))
                    raise await lost(pair)
                where, outcome = source, UNDONE  # it was off, and no QEMU of it has run
            case _:
                raise await unknown(pair)
        if journal.offline:
            await discard(pair.source if where is source else pair.target, pair.ram_dir)
    finally:
        await pair.close()
    await journal.remove((source, target))
    return Recovery(journal.run, journal.vm, where.name, journal.step, outcome)


async def _bring_devices_back(
    end: End, vm: Vm | None, journal: Journal, note: Callable[[str], None]
) -> None:
    """The VM's devices are plugged in where it is, and what used them goes on."""
    if vm is None or not journal.was_running or journal.step in BEFORE_DEVICES:
        return
    journey = Journey(vm.spec.passthrough, journal.run, lambda _, text: note(text))
    if not journey.has_devices:
        return
    try:
        await (journey.abort(end) if journal.past_commit else journey.recover(end, journal.step))
    except VmckptError as exc:
        remedy = f"{exc.remedy}; then: vmckpt device recover {vm.name}"
        note(f"what used its device does not go on: {exc.what}: {exc.why} ({remedy})")


async def _finish(pair: Pair, home: Vm | None, arrived: Vm | None) -> None:
    if arrived is None and home is not None:
        found = await find_qemu(pair.target, home.qemu.platform)
        # One that has ended meanwhile makes it a stopped VM, there.
        qemu = found or Qemu(pair.target.files, ProcessId(0, 0), home.qemu.platform)
        await settle_on_target(pair.target, qemu, pair.source.host)
    await release(pair.source, pair.ram_dir)


async def undo_target(pair: Pair) -> None:
    """The source has the guest: nothing of the migration stays on the target."""
    await discard(pair.target, pair.ram_dir)
    await pair.target.host.remove(
        vm_dir(pair.target.host.state_dir, pair.target.files.vm_name).path
    )


async def bury(pair: Pair, home: Vm | None, journal: Journal, note: Callable[[str], None]) -> None:
    """The guest's memory is gone: the VM becomes a stopped one where its QEMU ran last."""
    if not await pair.target.ever_ran() or home is None:
        await kill(pair.source)
        await undo_target(pair)
        await remove_files(pair.target.host, journal.run, journal.disks)
        return
    await kill(pair.target)
    ended = Qemu(pair.target.files, ProcessId(0, 0), home.qemu.platform)
    await settle_on_target(pair.target, ended, pair.source.host)
    await release(pair.source, pair.ram_dir)
    await hand_over_files(pair.source.host, pair.target.host, journal.run, journal.disks, note)


async def lost(pair: Pair) -> VmLostError:
    """The guest runs nowhere."""
    name = pair.source.files.vm_name
    last = pair.target if await pair.target.ever_ran() else pair.source
    return VmLostError(
        f"'{name}' runs nowhere: its memory is lost",
        why=f"it ran last on {last.host.name}, whose QEMU has ended",
        remedy=f"start it from its disks: vmckpt vm start {name}",
    )


async def unknown(pair: Pair) -> OutcomeUnknownError:
    """An end does not answer, and only it knows."""
    silent = [end for end in (pair.source, pair.target) if await _may_live(end)]
    names = " and ".join(end.host.name for end in silent) or pair.source.host.name
    return OutcomeUnknownError(
        f"nobody knows yet where '{pair.source.files.vm_name}' runs",
        why=f"{names} gives no answer, or waits for the other end",
        remedy=f"nothing was started twice; when it answers again: vmckpt migrate --recover "
        f"{pair.source.files.vm_name}",
    )


async def _may_live(end: End) -> bool:
    try:
        return await end.alive()
    except HostDownError:
        return True
