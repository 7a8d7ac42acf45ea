"""Kinds of job that run on a VM's host: checkpoint, restore, fork and their recovery.

A restore reports its result as soon as the guest runs; its process ends when all memory is loaded.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vmckpt.checkpoint import take
from vmckpt.checkpoint.facts import FILE
from vmckpt.checkpoint.fork import fork
from vmckpt.checkpoint.group.member import ALONE, FAILED, Alone, Member, joined
from vmckpt.checkpoint.requests import TakenCheckpoint, TakeOptions
from vmckpt.checkpoint.restore import recover, restore, restore_disks
from vmckpt.checkpoint.restore.requests import CheckpointSource, Restored, RestoreOptions
from vmckpt.checkpoint.secret import forget, forget_old_secrets, taken_from
from vmckpt.checkpoint.whole import take_whole
from vmckpt.errors import VmckptError
from vmckpt.events.types import Note
from vmckpt.hosts.host import Host
from vmckpt.hosts.processes.scheduling import end_session_low_priority
from vmckpt.hosts.remote.values import pack_error
from vmckpt.jobs.kind import Job, JobKind, JobWorker
from vmckpt.sequence.steps import finish
from vmckpt.store.open import Access
from vmckpt.vm.inventory import read_vm, require_at_home
from vmckpt.vm.lifecycle import restore_is_cut_off

# How long a member of a group runs at low priority on a busy host.
MOST_LAST_S = 10.0
# How long a recovery waits for libvirt to save or load a domain's memory.
RECOVERY_S = 600.0
# The code of events that report a checkpoint's steps.
STEP = "step"


@dataclass(frozen=True, slots=True)
class StoreRequest:
    """The store that a job uses, as its host sees it, and what the operator knows of it.

    `key`: the file with an encrypted store's secret (`secret.py`). `store_id`, `may_be_made`: see
    `Access`.
    """

    path: str
    key: Path | None = None
    store_id: str | None = None
    may_be_made: bool = False

    def access(self) -> Access:
        """Read and remove the secret's file. Raises OperationFailedError."""
        return Access(taken_from(self.key), self.store_id, self.may_be_made)


@dataclass(frozen=True, slots=True)
class Take:
    """Take a checkpoint. `held_s`: as a member of a group, the longest hold of output (0: none).

    `domain`: the UUID, if the VM is a libvirt domain.
    """

    store: StoreRequest
    wish: TakeOptions
    held_s: float | None = None
    domain: str = ""


@dataclass(frozen=True, slots=True)
class Restore:
    """Restore a checkpoint. `known`, `is_foreign`: `CheckpointSource`; `held_s`: `Take`.

    `is_domain`: into libvirt.
    """

    store: StoreRequest
    wish: RestoreOptions
    checkpoint: str
    known: str = ""
    is_foreign: bool = True
    held_s: float | None = None
    is_domain: bool = False

    @property
    def source(self) -> CheckpointSource:
        """The checkpoint; reads and removes the secret's file. Raises OperationFailedError."""
        secret = taken_from(self.store.key)
        return CheckpointSource(
            self.store.path, self.checkpoint, secret, self.known, self.is_foreign
        )


@dataclass(frozen=True, slots=True)
class Fork:
    """Fork a checkpoint. `is_domain`: into libvirt."""

    store: StoreRequest
    wish: fork.ForkOptions
    is_domain: bool = False


@dataclass(frozen=True, slots=True)
class Recover:
    """Finish or undo an interrupted restore or save of the VM.

    `domain`: the UUID, if it is a libvirt domain.
    """

    domain: str = ""


@dataclass(frozen=True, slots=True)
class Forks:
    """The outcome of each fork."""

    forks: tuple[fork.Forked, ...]


async def _take(job: Job[Take, TakenCheckpoint]) -> TakenCheckpoint:
    _begin()
    request, access = job.request, job.request.store.access()

    def step(text: str) -> None:
        job.emit(Note(0.0, STEP, text))

    path, is_domain = request.store.path, bool(request.domain)
    if not is_domain:
        vm = await require_at_home(job.host, job.vm)
        if request.wish.kind == FILE:
            return await take_whole(vm, path, request.wish, step, access)
    async with _joined(job, request.held_s, stays_paused=is_domain) as member:
        if is_domain:
            from vmckpt.checkpoint.domains.take import take_domain

            source = path, access
            taken = await take_domain(
                job.host, request.domain, source, request.wish, tell=step, member=member
            )
        else:
            taken = await take.take(vm, path, request.wish, step, access, member=member)
        member.send("committed", result=taken.to_json())
    return taken


async def _restore(job: Job[Restore, Restored]) -> None:
    _begin()
    async with _joined(job, job.request.held_s) as member:

        def running(restored: Restored) -> None:
            job.tell(restored, is_final=restored.settled)
            if restored.settled:
                member.send("settled", result=asdict(restored))

        source = job.request.source
        if job.request.is_domain:
            from vmckpt.checkpoint.domains.restore import restore_domain

            await restore_domain(job.host, source, job.request.wish, running, member=member)
            return
        await restore.restore(job.host, source, job.request.wish, running, member=member)


async def _restore_disks(
    job: Job[Restore, restore_disks.DisksRestored],
) -> restore_disks.DisksRestored:
    _begin()
    return await restore_disks.restore_disks(job.host, job.request.source, job.request.wish)


async def _fork(job: Job[Fork, Forks]) -> Forks:
    _begin()
    request = job.request
    secret = taken_from(request.store.key)
    if request.is_domain:
        from vmckpt.checkpoint.fork.domains import fork_domain

        wish, path = request.wish, request.store.path
        source = CheckpointSource(path, wish.checkpoint, secret, wish.known, wish.is_foreign)
        return Forks(tuple(await fork_domain(job.host, source, wish, run=job.run)))
    forks = await fork.fork(job.host, request.store.path, request.wish, secret, run=job.run)
    return Forks(tuple(forks))


def _begin() -> None:
    asyncio.get_running_loop().call_later(MOST_LAST_S, end_session_low_priority)
    forget_old_secrets(time.time())


@asynccontextmanager
async def _joined(
    job: Job[Any, Any], held_s: float | None, *, stays_paused: bool = False
) -> AsyncIterator[Member | Alone]:
    """Join the group, if any; report errors to its head. `stays_paused`: see `MemberHost`."""
    if held_s is None:
        yield ALONE
        return
    async with joined(job.files.control, held_s, stays_paused=stays_paused) as member:
        try:
            yield member
        except (VmckptError, OSError) as exc:
            member.send(FAILED, error=pack_error(exc, job.host.name))
            raise


async def _release_output(job: Job[Take, Any] | Job[Restore, Any]) -> None:
    """Recovery: release held output. `_released` does the rest."""
    vm = await read_vm(job.host, job.vm)
    if vm is not None and job.request.held_s:
        await recover.release_output(vm)


@asynccontextmanager
async def _released(
    job: Job[Any, Any], store: StoreRequest, names: Iterable[str]
) -> AsyncIterator[None]:
    """On exit remove the secret, and finish or undo interrupted work on the VMs.

    A failure here is left to the next command on the VM (`checkpoint/restore/making.py`).
    """
    try:
        yield
    finally:
        if store.key is not None:
            forget(store.key)
        with suppress(VmckptError):
            await finish(end_what_is_cut_off(job.host, names))


@asynccontextmanager
async def _takes(
    job: Job[Take, TakenCheckpoint],
) -> AsyncIterator[JobWorker[TakenCheckpoint]]:
    if job.request.domain:
        async with _released(job, job.request.store, ()):
            yield JobWorker(partial(_take, job), partial(_settle_domain, job))
        return
    async with _released(job, job.request.store, [job.vm]):
        yield JobWorker(partial(_take, job), partial(_release_output, job))


async def _settle_domain(job: Job[Take, Any]) -> None:
    """Recovery: nothing of the checkpoint stays in the domain's QEMU."""
    from vmckpt.checkpoint.domains.settle import settle_held

    await settle_held(job.host, job.request.domain)


@asynccontextmanager
async def _restores(
    job: Job[Restore, Restored],
) -> AsyncIterator[JobWorker[Restored]]:
    async def undo() -> None:
        await (_settle_domains(job.host) if job.request.is_domain else _release_output(job))

    async with _released(job, job.request.store, [job.vm]):
        yield JobWorker(partial(_restore, job), undo)


async def _settle_domains(host: Host) -> None:
    """Recovery: the restores of domains are finished or undone."""
    from vmckpt.checkpoint.domains.record import settle_all

    await settle_all(host, RECOVERY_S)


@asynccontextmanager
async def _restores_disks(
    job: Job[Restore, restore_disks.DisksRestored],
) -> AsyncIterator[JobWorker[restore_disks.DisksRestored]]:
    async with _released(job, job.request.store, [job.vm]):
        yield JobWorker(partial(_restore_disks, job), partial(_release_output, job))


@asynccontextmanager
async def _forks(job: Job[Fork, Forks]) -> AsyncIterator[JobWorker[Forks]]:
    async def recover_forks() -> None:
        fork.remove_parts(job.host, job.run)
        if job.request.is_domain:
            await _settle_domains(job.host)

    async with _released(job, job.request.store, job.request.wish.names):
        yield JobWorker(partial(_fork, job), recover_forks)


@asynccontextmanager
async def _recovers(job: Job[Recover, Recover]) -> AsyncIterator[JobWorker[Recover]]:
    async def end() -> Recover:
        await recover_here(job.host, job.vm, job.request)
        return Recover()

    yield JobWorker(end, end)


async def recover_here(host: Host, name: str, request: Recover) -> None:
    """Have this host do it. Raises as `recover.recover` and `record.settle_domain`."""
    if not request.domain:
        await end_what_is_cut_off(host, [name])
        return
    from vmckpt.checkpoint.domains.record import settle_domain

    await settle_domain(host, request.domain, RECOVERY_S)


async def end_what_is_cut_off(host: Host, names: Iterable[str]) -> None:
    """Finish or undo interrupted restores and saves. Raises as `recover.recover`."""
    for name in names:
        vm = await read_vm(host, name)
        if vm is None:
            await recover.undo(host, name)
        elif await restore_is_cut_off(vm):
            await recover.recover(vm)


CHECKPOINT = JobKind("checkpoint", "checkpoint", Take, TakenCheckpoint, _takes)
RESTORE = JobKind("restore", "restore", Restore, Restored, _restores)
RESTORE_DISKS = JobKind(
    "restore-disks", "restore of disks", Restore, restore_disks.DisksRestored, _restores_disks
)
FORK = JobKind("fork", "fork", Fork, Forks, _forks)
RECOVER = JobKind("recover", "recovery", Recover, Recover, _recovers)
KINDS = (CHECKPOINT, RESTORE, RESTORE_DISKS, FORK, RECOVER)
