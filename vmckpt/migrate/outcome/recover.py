"""Finish or undo a migration whose command died, or whose outcome was unknown."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from vmckpt.devices.journey import Journey
from vmckpt.errors import (
    HostDownError,
    OutcomeUnknownError,
    VmckptError,
    VmLostError,
)
from vmckpt.forecast.measure.link_users import forget_killed
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory.inventory import all_hosts
from vmckpt.hosts.processes.process import ProcessId
from vmckpt.migrate.locks import remove_dead_locks, wait_for_locks
from vmckpt.migrate.outcome.ends import End, Pair, discard, kill
from vmckpt.migrate.outcome.journal import BEFORE_DEVICES, MigrationJournal, find_journal, newest
from vmckpt.migrate.outcome.left import (
    clear_destination,
    clear_source,
    forget,
    is_kept_at,
    keep_at,
    leave,
    undo_destination,
)
from vmckpt.migrate.outcome.machines import ForgottenError, destination_of, source_of
from vmckpt.migrate.outcome.ownership import MigrationEnd, OwnershipMove, OwnershipView, decide
from vmckpt.migrate.outcome.settle import settle, settle_alone
from vmckpt.migrate.steps.disk_files import hand_over_files, keep_files, remove_files
from vmckpt.migrate.steps.disks import drop_mirrors
from vmckpt.migrate.steps.encryption import disarm_if_possible
from vmckpt.migrate.steps.handover import find_qemu, release, settle_on_destination
from vmckpt.migrate.steps.settings import leave_plain
from vmckpt.state.durable import part_of
from vmckpt.vm.inventory import Vm, read_vm
from vmckpt.vm.paths import vm_dir
from vmckpt.vm.record import Qemu

# The outcomes of a recovery.
FINISHED, UNDONE = "finished: the VM is on the destination", "undone: the VM is on the source"


@dataclass(frozen=True, slots=True)
class Recovery:
    """What was found of an interrupted migration, and where the VM is now."""

    run: str
    vm: str
    host: str
    step: str
    outcome: str


async def recover(
    name: str, note: Callable[[str], None], hosts: Sequence[Host] | None = None
) -> Recovery | None:
    """End an interrupted migration of the VM between any of `hosts` (the inventory's).

    None if there is none. Afterwards exactly one host has the VM. If that host is certain and the
    other end is silent, a later call removes the remains there. Raises BusyError while a command
    still works on the migration, VmLostError, HostDownError, OutcomeUnknownError (nothing was
    changed; says which end is silent).
    """
    hosts = hosts or all_hosts()
    journal = await find_journal(name, hosts)
    if journal is None:
        await remove_dead_locks(name, hosts)
        return None
    try:
        source, destination = await source_of(journal, hosts), await destination_of(journal, hosts)
        locks = await wait_for_locks(journal.vm, journal.run, (source, destination))
    except (HostDownError, ForgottenError) as silence:
        return await _recover_alone(journal, hosts, silence, note)
    async with locks:
        # To know which one is more advanced, both must answer now.
        found = [await MigrationJournal.read(host, name) for host in (source, destination)]
        here, there = (one if one and one.is_same_run(journal) else None for one in found)
        last = newest(one for one in (here, there) if one)
        if last is None:
            return None
        stays = await is_kept_at(last, source)
        arrived = await is_kept_at(last, destination)
        if (here or not stays) and (there or not arrived):
            if here is None or there is None:
                ends = (source, destination) if here else (destination, source)
                outcome = UNDONE if here else FINISHED
                if ended := await _one_sided(last, *ends, outcome, note):
                    return ended
            # The destination alone could name any file.
            disks = () if here is None else here.disks
            last = replace(last, disks=tuple(disk for disk in last.disks if disk in disks))
            ended = await _recover(last, source, destination, note, stays=stays)
            await forget_killed((source, destination))
            return ended
        silent = destination if stays else source
        try:
            if stays:
                await clear_destination(last, source, destination)
            else:
                await clear_source(last, source, destination, note)
        except VmckptError as exc:
            note(f"{silent.name} keeps what run {last.run} left there: {exc}")
            return None
    note(f"what run {last.run} had left on {silent.name} is removed")
    return await recover(name, note, hosts)


async def _one_sided(
    journal: MigrationJournal, host: Host, other: Host, outcome: str, note: Callable[[str], None]
) -> Recovery | None:
    """How a run that only `host` knows of ended, if nothing may be done; `other` answers.

    Before anything is begun on an end, it gets the journal, in the directory that goes with it. So
    if `other` has that directory without a journal, it had no part in this run, or no longer has;
    otherwise a compromised host could have other hosts' VMs ended. Or the command was killed while
    it wrote the journal there: then the directory has nothing else.
    """
    directory = vm_dir(other.state_dir, journal.vm)
    if await other.exists(directory.path):
        await journal.remove((host,))
        await other.remove(part_of(directory.journal))
        if not await other.list_dir(directory.path):
            await other.remove(directory.path)
        note(f"run {journal.run} is known to {host.name} alone: it was not begun, or is done")
        return Recovery(journal.run, journal.vm, host.name, journal.step, outcome)
    return None


async def _recover_alone(
    journal: MigrationJournal,
    hosts: Sequence[Host],
    silence: HostDownError | ForgottenError,
    note: Callable[[str], None],
) -> Recovery | None:
    """The end that answers has the guest, if it alone can be certain; otherwise raises
    `silence`.
    """
    for end_of, go_on, outcome in (
        (source_of, _stay_alone, UNDONE),
        (destination_of, _arrive_alone, FINISHED),
    ):
        try:
            host = await end_of(journal, hosts)
            locks = await wait_for_locks(journal.vm, journal.run, (host,))
        except (HostDownError, ForgottenError):
            continue
        async with locks:
            found = await MigrationJournal.read(host, journal.vm)
            if found is None or found.run != journal.run:
                return None
            if not await go_on(found, host, note):
                break
            await leave(found, host)
        note(f"{silence.what}: its leftovers of run {found.run} are removed when it answers")
        return Recovery(found.run, found.vm, host.name, found.step, outcome)
    raise silence


async def _stay_alone(journal: MigrationJournal, source: Host, note: Callable[[str], None]) -> bool:
    """Whether the source has the guest; it then continues there without the migration."""
    home = await read_vm(source, journal.vm)
    if home is None or journal.past_commit:
        return False
    end = _source_end(journal, source)
    keep = partial(keep_at, journal, source)
    try:
        move = await settle_alone(
            end, keep, was_running=journal.was_running, stopped=journal.stopped
        )
        if move is not OwnershipMove.SOURCE_OWNS:
            return False
        await _free_source(end, journal, note)
        await _at_home_alone(end, home, journal, note)
    finally:
        await end.close()
    return True


async def _arrive_alone(
    journal: MigrationJournal, destination: Host, note: Callable[[str], None]
) -> bool:
    """Whether the destination has the guest and no longer needs its source; it is then at home
    there.
    """
    end = _destination_end(journal, destination)
    try:
        home = await read_vm(destination, journal.vm)
        if home is None and (home := await _make_home_alone(journal, end)) is None:
            return False
        if home.qemu.files.qemu_id != journal.target_qemu:
            return False
        await disarm_if_possible(end, note)
        await leave_plain(end, note)
        await keep_files(destination, journal.run, journal.disks)
        await _at_home_alone(end, home, journal, note)
    finally:
        await end.close()
    return True


async def _at_home_alone(
    end: End, home: Vm, journal: MigrationJournal, note: Callable[[str], None]
) -> None:
    """The VM is there: with its devices, or off as it was."""
    await _bring_devices_back(end, home, journal, note)
    if journal.offline:
        await discard(end, Path(journal.ram_dir))


async def _make_home_alone(journal: MigrationJournal, destination: End) -> Vm | None:
    """Make the VM at home at a destination whose QEMU reports that it runs; None: it does not."""
    source = MigrationEnd(alive=True, silent=True)
    view = OwnershipView(source, await destination.inspect(), journal.was_running)
    if journal.platform is None or decide(view) is not OwnershipMove.DESTINATION_OWNS:
        return None
    if (qemu := await find_qemu(destination, journal.platform)) is None:
        return None
    current = vm_dir(destination.host.state_dir, journal.vm).current
    await destination.host.write_text(current, qemu.to_json())
    return await read_vm(destination.host, journal.vm)


def _source_end(journal: MigrationJournal, source: Host) -> End:
    return End(source, vm_dir(source.state_dir, journal.vm).qemu(journal.source_qemu))


def _destination_end(journal: MigrationJournal, destination: Host) -> End:
    ran = journal.was_running and journal.past_commit
    files = vm_dir(destination.state_dir, journal.vm).qemu(journal.target_qemu)
    return End(destination, files, certainly_ran=ran)


async def _free_source(source: End, journal: MigrationJournal, note: Callable[[str], None]) -> None:
    """Its QEMU has the guest: remove all settings of the migration."""
    try:
        await drop_mirrors(source, journal.run)
    except VmckptError as exc:
        # The guest continues with its own disks, whatever a remaining mirror does.
        note(str(exc))
    await disarm_if_possible(source, note)
    await leave_plain(source, note)


async def _recover(
    journal: MigrationJournal,
    source: Host,
    destination: Host,
    note: Callable[[str], None],
    *,
    stays: bool,
) -> Recovery:
    pair = Pair(
        _source_end(journal, source),
        _destination_end(journal, destination),
        journal.was_running,
        Path(journal.ram_dir),
        journal.stopped,
        stays,
    )
    note(f"run {journal.run} was interrupted at step '{journal.step}': asking both ends")
    home = await read_vm(source, journal.vm)
    arrived = await read_vm(destination, journal.vm)
    if arrived is not None and arrived.qemu.files.qemu_id != journal.target_qemu:
        raise _another(journal, destination)
    try:
        if arrived is not None:
            # The handover was past the commit: only the source's cleanup is left.
            move = OwnershipMove.DESTINATION_OWNS
        else:
            move = await settle(pair, note, partial(keep_at, journal, source))
        match move:
            case OwnershipMove.DESTINATION_OWNS:
                await _finish(pair, home, arrived, journal, note)
                await disarm_if_possible(pair.destination, note)
                await leave_plain(pair.destination, note)
                await _bring_devices_back(pair.destination, home or arrived, journal, note)
                where, outcome = destination, FINISHED
            case OwnershipMove.SOURCE_OWNS:
                await _free_source(pair.source, journal, note)
                await undo_destination(pair)
                await remove_files(destination, journal.run, journal.disks)
                await _bring_devices_back(pair.source, home, journal, note)
                where, outcome = source, UNDONE
            case OwnershipMove.LOST:
                await settle_lost(pair, home, journal, note)
                if not journal.offline:
                    await forget(journal, source, destination)
                    raise await lost(pair)
                where, outcome = source, UNDONE  # it was off, and no QEMU of it has run
            case _:
                raise await unknown(pair)
        if journal.offline:
            await discard(pair.source if where is source else pair.destination, pair.ram_dir)
    finally:
        await pair.close()
    await forget(journal, source, destination)
    return Recovery(journal.run, journal.vm, where.name, journal.step, outcome)


def _another(journal: MigrationJournal, destination: Host) -> OutcomeUnknownError:
    path = vm_dir(destination.state_dir, journal.vm).journal
    return OutcomeUnknownError(
        f"'{journal.vm}' is at home on {destination.name}, but run {journal.run} did not bring it "
        "there",
        why="its QEMU there is another than that migration's",
        remedy=f"see on {journal.source} and {destination.name} where it runs, end the other "
        "QEMU, and "
        f"remove {path} and the same file on {journal.source}",
    )


async def _bring_devices_back(
    end: End, vm: Vm | None, journal: MigrationJournal, note: Callable[[str], None]
) -> None:
    """Plug in the VM's devices where it is, and resume their jobs."""
    if vm is None or not journal.was_running or journal.step in BEFORE_DEVICES:
        return
    journey = Journey(vm.spec.passthrough, journal.run, lambda _, text: note(text))
    if not journey.has_devices:
        return
    try:
        await (journey.abort(end) if journal.past_commit else journey.recover(end, journal.step))
    except VmckptError as exc:
        remedy = f"{exc.remedy}; then: vmckpt device recover {vm.name}"
        note(f"jobs that used its device were not resumed: {exc.what}: {exc.why} ({remedy})")


async def _finish(
    pair: Pair,
    home: Vm | None,
    arrived: Vm | None,
    journal: MigrationJournal,
    note: Callable[[str], None],
) -> None:
    if arrived is None and home is not None:
        found = await find_qemu(pair.destination, home.qemu.platform)
        # If its QEMU has ended meanwhile, it becomes a stopped VM there.
        qemu = found or Qemu(pair.destination.files, ProcessId(0, 0), home.qemu.platform)
        await settle_on_destination(pair.destination, qemu, pair.source.host)
    await hand_over_files(pair.source.host, pair.destination.host, journal.run, journal.disks, note)
    # Last: it also removes the source's journal, which names its disks.
    await release(pair.source, pair.ram_dir)


async def settle_lost(
    pair: Pair, home: Vm | None, journal: MigrationJournal, note: Callable[[str], None]
) -> None:
    """The guest's memory is lost: make the VM a stopped one where its QEMU ran last."""
    if not await pair.destination.ever_ran() or home is None:
        await kill(pair.source)
        await undo_destination(pair)
        await remove_files(pair.destination.host, journal.run, journal.disks)
        return
    await kill(pair.destination)
    ended = Qemu(pair.destination.files, ProcessId(0, 0), home.qemu.platform)
    await settle_on_destination(pair.destination, ended, pair.source.host)
    await hand_over_files(pair.source.host, pair.destination.host, journal.run, journal.disks, note)
    await release(pair.source, pair.ram_dir)


async def lost(pair: Pair) -> VmLostError:
    """The error for a guest that runs nowhere."""
    name = pair.source.files.vm_name
    last = pair.destination if await pair.destination.ever_ran() else pair.source
    return VmLostError(
        f"'{name}' runs nowhere: its memory is lost",
        why=f"it ran last on {last.host.name}, whose QEMU has ended",
        remedy=f"start it from its disks: vmckpt vm start {name}",
    )


async def unknown(pair: Pair) -> OutcomeUnknownError:
    """The error if an end does not answer, and only that end knows."""
    silent = [end for end in (pair.source, pair.destination) if await _may_live(end)]
    names = " and ".join(end.host.name for end in silent) or pair.source.host.name
    return OutcomeUnknownError(
        f"it is not known yet where '{pair.source.files.vm_name}' runs",
        why=f"{names} does not answer, or waits for the other end",
        remedy="the guest was not started twice; when the host answers again, run: "
        f"vmckpt migrate --recover {pair.source.files.vm_name}",
    )


async def _may_live(end: End) -> bool:
    try:
        return await end.alive()
    except HostDownError:
        return True
