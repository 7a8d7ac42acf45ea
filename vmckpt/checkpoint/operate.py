"""The operator's side: run checkpoint, restore and fork jobs on their hosts."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from vmckpt.checkpoint import take
from vmckpt.checkpoint.catalogue.catalogue import CatalogueEntry
from vmckpt.checkpoint.catalogue.location import (
    StoreLocation,
    access_to,
    own,
    parse_location,
    remember_made,
)
from vmckpt.checkpoint.catalogue.tree import OriginShown
from vmckpt.checkpoint.facts import FILE, USUAL_PAUSE_S, usable_facts
from vmckpt.checkpoint.fork import fork
from vmckpt.checkpoint.jobs import (
    CHECKPOINT,
    FORK,
    RECOVER,
    RESTORE,
    RESTORE_DISKS,
    STEP,
    Fork,
    Forks,
    Recover,
    Restore,
    StoreRequest,
    Take,
    recover_here,
)
from vmckpt.checkpoint.meant import require_meant_to_restore, require_meant_to_take
from vmckpt.checkpoint.origin import digest, is_own, run_key
from vmckpt.checkpoint.requests import TakenCheckpoint, TakeOptions
from vmckpt.checkpoint.restore.foreign import wanted
from vmckpt.checkpoint.restore.requests import Restored, RestoreOptions
from vmckpt.checkpoint.restore.restore_disks import DisksRestored
from vmckpt.checkpoint.secret import written_on
from vmckpt.checkpoint.whole import require_savable
from vmckpt.errors import (
    BusyError,
    HostDownError,
    OutcomeUnknownError,
    RefusedError,
    StorageError,
    VmckptError,
)
from vmckpt.events.types import Event, Note, ignore_event
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory.directories import state_dir
from vmckpt.hosts.inventory.inventory import all_hosts
from vmckpt.jobs.files import new_run
from vmckpt.jobs.handle import Handle, begin
from vmckpt.jobs.kind import JobKind
from vmckpt.sequence.in_thread import in_thread
from vmckpt.sequence.steps import both, finish
from vmckpt.store.files.checkpoint_file import CHECKPOINTS
from vmckpt.store.files.naming import IfTaken, dated
from vmckpt.store.open import Access
from vmckpt.store.sealing.keys import KeySource
from vmckpt.vm.disks.shared_storage import is_shared
from vmckpt.vm.inventory import Vm, read_vm, require_unused
from vmckpt.vm.lifecycle import restore_is_cut_off
from vmckpt.vm.paths import lock_path, vm_dir
from vmckpt.vm.spec.spec import parse_spec

Q = TypeVar("Q")
R = TypeVar("R")
Tell = Callable[[str], None]
# How soon it is seen that a job holds its VM's name.
POLL_S = 0.05


async def _nothing_more() -> None:
    """All has been checked."""


class StoreJob(NamedTuple, Generic[Q, R]):
    """A job to run on a host; `access` opens the store at `location`. `held_s`: see `jobs.Take`.

    `on_start` receives the run id before the job receives its request, so that every job that has
    done anything is recorded. `new`: the VMs that it makes; `check` raises what is against them.
    """

    kind: JobKind[Q, R]
    host: Host
    vm: str
    request: Callable[[StoreRequest, float | None], Q]
    location: StoreLocation
    access: Access
    held_s: float | None = None
    on_start: Callable[[str], None] = lambda _: None
    new: tuple[str, ...] = ()
    check: Callable[[], Awaitable[None]] = _nothing_more


async def create(
    vm: Vm, given: str | None, options: TakeOptions, tell: Tell, key: KeySource | None = None
) -> TakenCheckpoint:
    """Take a checkpoint of the VM, on its host. Raises as `take.take`."""
    return await have_done(await taking(vm, given, options, key), tell)


def to_fork(name: str) -> TakeOptions:
    """A checkpoint of a running VM that forks are made of."""
    number = IfTaken.NUMBER.value
    return TakeOptions(dated(name, "fork"), {}, "fork", USUAL_PAUSE_S, if_taken=number)


async def taking(
    vm: Vm, given: str | None, options: TakeOptions, key: KeySource | None = None
) -> StoreJob[Take, TakenCheckpoint]:
    """The job that takes a checkpoint. Raises RefusedError, NotFoundError, HostDownError."""
    location = store_of(vm.name, vm.host, given)
    await (require_savable(vm) if options.kind == FILE else take.require_capturable(vm))
    access = await access_to(location, key, to_write=True, named=given is not None)
    if access.secret is not None:
        await require_meant_to_take(vm, location, key)
    site_key = await in_thread(partial(run_key, state_dir(), vm.name))
    options = replace(options, site_key=site_key)

    def request(store: StoreRequest, held_s: float | None) -> Take:
        return Take(store, options, held_s)

    return StoreJob(CHECKPOINT, vm.host, vm.name, request, location, access)


def store_of(name: str, host: Host, given: str | None) -> StoreLocation:
    """The store for a checkpoint of a VM on `host`. Raises RefusedError: it does not see it."""
    location = parse_location(given, host) if given else own(host)
    if location.host is not None and not _same_machine(location.host, host):
        raise RefusedError(
            f"{host.name} does not see the store {location.label}",
            why=f"it is a directory of {location.host.name}, and '{name}' is on {host.name}",
            remedy="take the checkpoint into a store there, then copy it: "
            f"vmckpt store copy {location.label}",
        )
    return location


async def restore_to(
    host: Host,
    entry: CatalogueEntry,
    options: RestoreOptions,
    tell: Tell,
    key: KeySource | None = None,
    *,
    on_start: Callable[[str], None] = lambda _: None,
) -> Restored:
    """Restore a checkpoint on the host; returns as soon as the guest runs.

    `on_start`: see `StoreJob`.
    """
    work = await _restoring(RESTORE, host, entry, options, key)
    return await have_done(work._replace(on_start=on_start), tell)


async def restore_disks_to(
    host: Host, entry: CatalogueEntry, options: RestoreOptions, key: KeySource | None = None
) -> DisksRestored:
    """Restore only the disks of a checkpoint on the host; the VM stays off."""
    work = await _restoring(RESTORE_DISKS, host, entry, options, key)
    return await have_done(work, lambda _: None)


async def restoring(
    host: Host, entry: CatalogueEntry, options: RestoreOptions, key: KeySource | None = None
) -> StoreJob[Restore, Restored]:
    """The job that restores a checkpoint there. Raises RefusedError."""
    return await _restoring(RESTORE, host, entry, options, key)


async def _restoring(
    kind: JobKind[Restore, R],
    host: Host,
    entry: CatalogueEntry,
    options: RestoreOptions,
    key: KeySource | None,
) -> StoreJob[Restore, R]:
    name = options.name or entry.manifest.vm
    if is_domain := entry.facts is not None and entry.facts.domain is not None:
        await _require_domain_restorable(kind, host, entry, options)
    if options.in_place:
        await require_meant_to_restore(entry.manifest, host)
        await _end_what_is_cut_off(host, name)
    else:
        await require_unused([name], host, all_hosts())
    location = await _seen_from(host, entry)
    access = await access_to(location, key)
    known, is_foreign = await _standing(entry, trust=options.trust)

    def request(store: StoreRequest, held_s: float | None) -> Restore:
        return Restore(store, options, entry.id, known, is_foreign, held_s, is_domain)

    if options.in_place:
        return StoreJob(kind, host, name, request, location, access)
    check = partial(_require_not_elsewhere, entry, host, options)
    return StoreJob(kind, host, name, request, location, access, new=(name,), check=check)


async def _require_domain_restorable(
    kind: JobKind[Restore, Any], host: Host, entry: CatalogueEntry, options: RestoreOptions
) -> None:
    """Raises RefusedError, OutcomeUnknownError."""
    if kind.name == RESTORE_DISKS.name:
        raise RefusedError(
            f"the disks of '{entry.name}' cannot be restored alone",
            why="it is of a libvirt domain, whose definition libvirt has",
            remedy="write them to images: vmckpt checkpoint export-disk",
        )
    await _require_not_elsewhere(entry, host, options)


async def _require_not_elsewhere(
    entry: CatalogueEntry, host: Host, options: RestoreOptions
) -> None:
    """For a libvirt domain, whichever host has it now. Raises RefusedError, OutcomeUnknownError."""
    if entry.facts is None or entry.facts.domain is None:
        return
    from vmckpt.checkpoint.domains.elsewhere import require_not_elsewhere

    if options.name is None:
        await require_not_elsewhere(entry.manifest.vm, entry.facts.domain.uuid, host)
    if not options.in_place:
        await _require_no_namesake(entry, host, [options.name or entry.manifest.vm])


async def _require_no_namesake(entry: CatalogueEntry, host: Host, names: Collection[str]) -> None:
    """For new libvirt domains. Raises RefusedError."""
    if entry.facts is not None and entry.facts.domain is not None:
        from vmckpt.checkpoint.domains.elsewhere import require_no_namesake

        await require_no_namesake(names, host)


async def fork_on(
    host: Host,
    entry: CatalogueEntry,
    options: fork.ForkOptions,
    tell: Tell,
    key: KeySource | None = None,
) -> Forks:
    """Fork a checkpoint on the host; returns the outcome of each fork."""
    check = partial(_require_no_namesake, entry, host, options.names)
    await require_unused(options.names, host, all_hosts())
    await check()
    location = await _seen_from(host, entry)
    access = await access_to(location, key)
    known, is_foreign = await _standing(entry, trust=options.trust)
    options = replace(options, known=known, is_foreign=is_foreign)
    is_domain = entry.facts is not None and entry.facts.domain is not None

    def request(store: StoreRequest, _held_s: float | None) -> Fork:
        return Fork(store, options, is_domain)

    new = tuple(options.names)
    work = StoreJob(FORK, host, options.name, request, location, access, new=new, check=check)
    return await have_done(work, tell)


async def standing(entry: CatalogueEntry) -> OriginShown:
    """Whether this site took it and, if not, what restoring it would open. Raises StorageError."""
    if await in_thread(partial(is_own, state_dir(), entry.manifest)) or entry.facts is None:
        return OriginShown(entry.facts is None, ())
    try:
        spec = parse_spec(usable_facts(entry.manifest).spec, "the checkpoint's spec", Path("/"))
    except RefusedError as exc:
        return OriginShown(True, (f"nothing: {exc.why}",))
    return OriginShown(True, tuple(wanted(spec, None, plugged=False)))


async def _standing(entry: CatalogueEntry, *, trust: bool) -> tuple[str, bool]:
    """The checkpoint's digest if it is trusted (otherwise ""), and whether it is foreign."""
    is_foreign = not await in_thread(partial(is_own, state_dir(), entry.manifest))
    return (digest(entry.manifest) if trust or not is_foreign else ""), is_foreign


async def _end_what_is_cut_off(host: Host, name: str) -> None:
    """Recover an interrupted restore first: its record lists the disks, and the next restore
    replaces that record.
    """
    vm = await read_vm(host, name)
    if vm is not None and await restore_is_cut_off(vm):
        await recover_there(host, name)


async def recover_there(host: Host, name: str, domain: str = "") -> None:
    """Have the host end an interrupted restore or save of the VM, which may not be at home there.

    `domain`: its UUID, if it is a libvirt domain. Raises BusyError, VmLostError;
    OperationFailedError if it did not end.
    """
    request = Recover(domain)
    if host.is_this_machine:
        await recover_here(host, name, request)
        return
    job = await begin(RECOVER, host, new_run())
    try:
        await job.give(name, request)
        await job.outcome(ignore_event)
    finally:
        await finish(job.remove())


async def undo_there(host: Host, name: str, home: Vm | None) -> None:
    """Have a host without the VM remove what an interrupted restore made there.

    Raises RefusedError if that may be disks of the VM by now, which is at `home` on another host;
    and as `recover_there`.
    """
    if home is not None:
        await _require_none_of_its_disks(host, home)
    await recover_there(host, name)


async def _require_none_of_its_disks(host: Host, home: Vm) -> None:
    directory = vm_dir(host.state_dir, home.name)
    record = await host.read_text(directory.restoring) or ""
    for disk in home.spec.disks:
        here, there = disk.on(home.host.state_dir), disk.on(host.state_dir)
        if str(there) in record and (await is_shared(home.host, host, here, there))[0] is not False:
            raise RefusedError(
                f"{there} may be a disk of '{home.name}' by now",
                why=f"a restore of it on {host.name} was interrupted, and {home.host.name}, where "
                "the VM is, reaches the same file, or that is not known",
                remedy=f"if it is the VM's, remove {directory.restoring} on {host.name}; if not, "
                f"{directory.path}",
            )


def _same_machine(one: Host, other: Host) -> bool:
    return one.name == other.name or (one.is_this_machine and other.is_this_machine)


async def _seen_from(host: Host, entry: CatalogueEntry) -> StoreLocation:
    """The store with the checkpoint that the host can access, preferably its own.

    Raises RefusedError.
    """
    remote = [location for location in entry.locations if location.host is None]
    paths = dict.fromkeys(
        [own(host).path, *(p.path for p in entry.locations if p.host is not None)]
    )
    for path in paths:
        # Recognize a directory that hosts share by its content.
        if await host.exists(Path(path) / CHECKPOINTS / entry.id):
            return StoreLocation(host, path)
        if host.is_this_machine and Path(path).is_file():
            return StoreLocation(host, path)  # an exported file, which the operator named
    if remote:
        return remote[0]
    raise RefusedError(
        f"{host.name} cannot read checkpoint '{entry.name}'",
        why=f"it is in {' and '.join(location.label for location in entry.locations)}",
        remedy="copy it there first: "
        f"vmckpt store copy {host.name}: {entry.id[:12]} --store {entry.location.label}",
    )


async def have_done(work: StoreJob[Any, R], tell: Tell) -> R:
    """Run the job; its result. Raises the job's error, OutcomeUnknownError."""
    async with begun(work) as job:
        return await _done(work, job, tell)


@asynccontextmanager
async def begun(work: StoreJob[Q, R]) -> AsyncIterator[Handle[Q, R]]:
    """Start the job for the block; its process has received its request by then."""
    host, run = work.host, new_run()
    # Members of a group run at low priority beside guests that must stay responsive.
    last = work.kind.name == CHECKPOINT.name and work.held_s is not None
    async with written_on(host, run, work.access.secret) as key_path:
        job = await begin(work.kind, host, run, last=last)
        try:
            found = work.access
            store = StoreRequest(work.location.path, key_path, found.store_id, found.may_be_made)
            work.on_start(run)
            await job.give(work.vm, work.request(store, work.held_s))
        except BaseException:
            await finish(job.withdraw(_what(work)))
            raise
        yield job
    if work.access.may_be_made:
        with suppress(HostDownError, StorageError):  # the next command that uses it remembers it
            await remember_made(work.location)


async def _done(work: StoreJob[Any, R], job: Handle[Any, R], tell: Tell) -> R:
    def heard(event: Event) -> None:
        if isinstance(event, Note) and event.code == STEP:
            tell(event.text)

    stays = work.kind.name == RESTORE.name  # its process still loads memory
    try:
        found, _ = await both(job.outcome(heard), _require_still_unused(work, job))
        return found
    except _NameTakenError as taken:
        raise await finish(_given_up(work, job, taken.error)) from None
    except asyncio.CancelledError:
        # A job that does not end still needs its files, and so does its recovery.
        stays = True
        await finish(job.cancel(_what(work)))
        stays = work.kind.name == RESTORE.name
        raise
    finally:
        if not stays:
            await finish(job.remove())


class _NameTakenError(Exception):
    """Another operator has taken the VM's name since it was asked for."""

    def __init__(self, error: VmckptError) -> None:
        super().__init__(str(error))
        self.error = error


async def require_new_names(work: StoreJob[Any, Any]) -> None:
    """Check the names of the VMs that it makes. Raises RefusedError, BusyError,
    OutcomeUnknownError.
    """
    if work.new:
        await require_unused(work.new, work.host, all_hosts())
        await work.check()


async def _require_still_unused(work: StoreJob[Any, Any], job: Handle[Any, Any]) -> None:
    """Check the names of new VMs again once the job holds them. Raises _NameTakenError."""
    for name in work.new:
        lock = lock_path(work.host.state_dir, name)
        while await work.host.lock_owner(lock) is None:
            if await job.outcome_so_far() is not None:
                return
            await asyncio.sleep(POLL_S)
    try:
        await require_new_names(work)
    except (RefusedError, BusyError, OutcomeUnknownError) as exc:
        raise _NameTakenError(exc) from exc


async def _given_up(
    work: StoreJob[Any, Any], job: Handle[Any, Any], taken: VmckptError
) -> VmckptError:
    """End the job, which has made no VM yet; returns the command's error. Raises BusyError."""
    if not await _has_made_it(job):
        await job.cancel(_what(work))
    if not await _has_made_it(job):
        return taken
    return OutcomeUnknownError(
        f"{_what(work)} is done on {work.host.name}, and {taken.what}",
        why=f"both were begun at the same moment; the other: {taken.why}",
        remedy="see where it is to run (vmckpt vm list), and end the other",
    )


async def _has_made_it(job: Handle[Any, Any]) -> bool:
    outcome = await job.outcome_so_far()
    return outcome is not None and outcome.result is not None


def _what(work: StoreJob[Any, Any]) -> str:
    return f"the {work.kind.what} of '{work.vm}'"
