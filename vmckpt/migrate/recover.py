"""Finishing or undoing a migration whose command died, or whose outcome was unknown."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from vmckpt.devices.journey import Journey
from vmckpt.errors import (
    HostDownError,
    NotFoundError,
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
from vmckpt.migrate.left import (
    clear,
    forget,
    is_kept_at_source,
    keep_at_source,
    leave,
    undo_target,
)
from vmckpt.migrate.locks import remove_dead_locks, wait_for_locks
from vmckpt.migrate.ownership import Move
from vmckpt.migrate.settings import leave_plain
from vmckpt.migrate.settle import settle, settle_alone
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

    None when there is none. Afterwards the VM is in exactly one place; if the target is silent and
    that is the source, what the target has of it is left, and removed by a later call. Raises
    BusyError while the migration is still being worked on, VmLostError, HostDownError,
    OutcomeUnknownError (nothing was changed; says which end is silent).
    """
    hosts = hosts or all_hosts()
    journal = await find_journal(name, hosts)
    if journal is None:
        await remove_dead_locks(name, hosts)
        return None
    source = _named(journal.source, hosts, journal)
    try:
        target = _named(journal.target, hosts, journal)
        locks = await wait_for_locks(journal.vm, journal.run, (source, target))
    except (HostDownError, _ForgottenError) as silence:
        return await _recover_alone(journal, source, silence, note)
    async with locks:
        # Which got further is to be known: both have to answer now.
        found = [await Journal.read(host, name) for host in (source, target)]
        of_run = [one if one and one.run == journal.run else None for one in found]
        last = newest(one for one in of_run if one)
        if last is None:
            return None
        stays = await is_kept_at_source(last, source)
        if of_run[0] or not stays:
            return await _recover(last, source, target, note, stays=stays)
        try:
            await clear(last, source, target)
        except VmckptError as exc:
            note(f"{target.name} keeps what run {last.run} left there: {exc}")
            return None
    note(f"what run {last.run} had left on {target.name} is removed")
    return await recover(name, note, hosts)


class _ForgottenError(OutcomeUnknownError):
    """An end of a migration that was cut off is not in the inventory any more."""


def _named(name: str, hosts: Iterable[Host], journal: Journal) -> Host:
    """Of some hosts, else of the inventory. Raises _ForgottenError."""
    if named := next((host for host in hosts if host.name == name), None):
        return named
    try:
        return find_host(name)
    except NotFoundError as exc:
        raise _ForgottenError(
            f"nobody knows whether '{journal.vm}' is on {journal.source} or on {journal.target}",
            why=f"run {journal.run} between them was cut off, and the inventory has no '{name}'",
            remedy=f"add it again (vmckpt host add {name}); if it is gone for good: see where the "
            f"VM runs, and remove vms/{journal.vm}/migration.json from that host's state directory",
        ) from exc


async def _recover_alone(
    journal: Journal, source: Host, silence: VmckptError, note: Callable[[str], None]
) -> Recovery | None:
    """The source goes on if it can without its target's word. Raises `silence` if not."""
    async with await wait_for_locks(journal.vm, journal.run, (source,)):
        found, home = await Journal.read(source, journal.vm), await read_vm(source, journal.vm)
        if found is None or found.run != journal.run:
            return None
        if home is None or found.past_commit:
            raise silence
        end = _source_end(found, source)
        try:
            move = await settle_alone(
                end,
                partial(keep_at_source, found, source),
                was_running=found.was_running,
                stopped=found.stopped,
            )
            if move is not Move.SOURCE_OWNS:
                raise silence
            note(f"run {found.run} was cut off at step '{found.step}', and {silence.what}")
            await _free_source(end, found, note)
            await _bring_devices_back(end, home, found, note)
            await leave(found, source)
            if found.offline:
                await discard(end, Path(found.ram_dir))
        finally:
            await end.close()
        note(f"what {found.target} has of it is removed when it answers")
        return Recovery(found.run, found.vm, source.name, found.step, UNDONE)


def _source_end(journal: Journal, source: Host) -> End:
    return End(source, vm_dir(source.state_dir, journal.vm).qemu(journal.source_qemu))


async def _free_source(source: End, journal: Journal, note: Callable[[str], None]) -> None:
    """Its QEMU has the guest, and nothing of the migration any more."""
    try:
        await drop_mirrors(source, journal.run)
    except VmckptError as exc:
        # The guest goes on with its own disks, whatever a mirror of them still does.
        note(str(exc))
    await disarm_if_possible(source, note)
    await leave_plain(source, note)


async def _recover(
    journal: Journal, source: Host, target: Host, note: Callable[[str], None], *, stays: bool
) -> Recovery:
    pair = Pair(
        _source_end(journal, source),
        End(
            target,
            vm_dir(target.state_dir, journal.vm).qemu(journal.target_qemu),
            certainly_ran=journal.was_running and journal.past_commit,
        ),
        journal.was_running,
        Path(journal.ram_dir),
        journal.stopped,
        stays,
    )
    note(f"run {journal.run} was cut off at step '{journal.step}': asking both ends")
    home = await read_vm(source, journal.vm)
    arrived = await read_vm(target, journal.vm)
    try:
        if arrived is not None:
            # The handover was past the commit: what is left is the source's clean-up.
            move = Move.TARGET_OWNS
        else:
            move = await settle(pair, note, partial(keep_at_source, journal, source))
        match move:
            case Move.TARGET_OWNS:
                await _finish(pair, home, arrived)
                await disarm_if_possible(pair.target, note)
                await leave_plain(pair.target, note)
                await hand_over_files(source, target, journal.run, journal.disks, note)
                await _bring_devices_back(pair.target, home or arrived, journal, note)
                where, outcome = target, FINISHED
            case Move.SOURCE_OWNS:
                await _free_source(pair.source, journal, note)
                await undo_target(pair)
                await remove_files(target, journal.run, journal.disks)
                await _bring_devices_back(pair.source, home, journal, note)
                where, outcome = source, UNDONE
            case Move.LOST:
                await bury(pair, home, journal, note)
                if not journal.offline:
                    await forget(journal, source, target)
                    raise await lost(pair)
                where, outcome = source, UNDONE  # it was off, and no QEMU of it has run
            case _:
                raise await unknown(pair)
        if journal.offline:
            await discard(pair.source if where is source else pair.target, pair.ram_dir)
    finally:
        await pair.close()
    await forget(journal, source, target)
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
