"""What runs on a VM's host for a checkpoint, a restore or forks: kinds of job.

A restore tells its result as soon as its guest runs; its process lives until all of the memory is
there.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vmckpt.checkpoint import fork, recover, restore, restore_disks, take
from vmckpt.checkpoint.facts import FILE
from vmckpt.checkpoint.group_member import FAILED, Member, joined
from vmckpt.checkpoint.secret import forget, forget_old_secrets, taken_from
from vmckpt.checkpoint.whole import take_whole
from vmckpt.errors import VmckptError
from vmckpt.events.types import Note
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.remote.values import pack_error
from vmckpt.hosts.scheduling import session_has_waited
from vmckpt.jobs.kind import Job, Kind, Worker
from vmckpt.sequence.steps import finish
from vmckpt.store.open import Access
from vmckpt.vm.inventory import read_vm, require_at_home
from vmckpt.vm.lifecycle import restore_is_cut_off

# One of a group comes last on a busy host for so long.
MOST_LAST_S = 10.0
# What the event of a step of a checkpoint is called.
STEP = "step"


@dataclass(frozen=True, slots=True)
class StoreAsked:
    """Which store a job uses: where it is for the host, and what the operator's process knows.

    `key`: where the secret of an encrypted store was left (`secret.py`). `store_id`,
    `may_be_made`: see `Access`.
    """

    path: str
    key: Path | None = None
    store_id: str | None = None
    may_be_made: bool = False

    def access(self) -> Access:
        """What opens it; the secret's file is gone then. Raises OperationFailedError."""
        return Access(taken_from(self.key), self.store_id, self.may_be_made)


@dataclass(frozen=True, slots=True)
class Take:
    """A checkpoint to take. `held_s`: with a group; its output may be held for so long (0: not)."""

    store: StoreAsked
    wish: take.Wish
    held_s: float | None = None


@dataclass(frozen=True, slots=True)
class Restore:
    """A checkpoint to restore. `known`, `is_foreign`: see `restore.Source`; `held_s`: `Take`."""

    store: StoreAsked
    wish: restore.Wish
    checkpoint: str
    known: str = ""
    is_foreign: bool = True
    held_s: float | None = None

    @property
    def source(self) -> restore.Source:
        """The checkpoint; its store's secret is taken. Raises OperationFailedError."""
        secret = taken_from(self.store.key)
        return restore.Source(self.store.path, self.checkpoint, secret, self.known, self.is_foreign)


@dataclass(frozen=True, slots=True)
class Fork:
    """Forks to make."""

    store: StoreAsked
    wish: fork.Wish


@dataclass(frozen=True, slots=True)
class Recover:
    """A restore or a saving of the VM that was cut off, to bring to an end."""


@dataclass(frozen=True, slots=True)
class Forks:
    """What came of each fork."""

    forks: tuple[fork.Forked, ...]


async def _take(job: Job[Take, take.Taken]) -> take.Taken:
    _begin()
    asked, access = job.request, job.request.store.access()
    vm = await require_at_home(job.host, job.vm)

    def step(text: str) -> None:
        job.emit(Note(0.0, STEP, text))

    if asked.wish.kind == FILE:
        return await take_whole(vm, asked.store.path, asked.wish, step, access)
    async with _joined(job, asked.held_s) as member:
        taken = await take.take(vm, asked.store.path, asked.wish, step, access, member=member)
        if member is not None:
            member.say("committed", result=taken.to_json())
    return taken


async def _restore(job: Job[Restore, restore.Restored]) -> None:
    _begin()
    async with _joined(job, job.request.held_s) as member:

        def running(restored: restore.Restored) -> None:
            job.tell(restored, is_final=restored.settled)
            if member is not None and restored.settled:
                member.say("settled", result=asdict(restored))

        source = job.request.source
        await restore.restore(job.host, source, job.request.wish, running, member=member)


async def _restore_disks(
    job: Job[Restore, restore_disks.DisksRestored],
) -> restore_disks.DisksRestored:
    _begin()
    return await restore_disks.restore_disks(job.host, job.request.source, job.request.wish)


async def _fork(job: Job[Fork, Forks]) -> Forks:
    _begin()
    asked = job.request
    secret = taken_from(asked.store.key)
    forks = await fork.fork(job.host, asked.store.path, asked.wish, secret, run=job.run)
    return Forks(tuple(forks))


def _begin() -> None:
    asyncio.get_running_loop().call_later(MOST_LAST_S, session_has_waited)
    forget_old_secrets(time.time())


@asynccontextmanager
async def _joined(job: Job[Any, Any], held_s: float | None) -> AsyncIterator[Member | None]:
    """Its part in a group, if it is in one; the head hears what it fails of."""
    if held_s is None:
        yield None
        return
    async with joined(job.files.control, held_s) as member:
        try:
            yield member
        except (VmckptError, OSError) as exc:
            member.say(FAILED, error=pack_error(exc, job.host.name))
            raise


async def _let_output_go(job: Job[Take, Any] | Job[Restore, Any]) -> None:
    """After the death of its process. The rest is done at the end of `_released`."""
    vm = await read_vm(job.host, job.vm)
    if vm is not None and job.request.held_s:
        await recover.let_output_go(vm)


@asynccontextmanager
async def _released(
    job: Job[Any, Any], store: StoreAsked, names: Iterable[str]
) -> AsyncIterator[None]:
    """At the end its secret goes; what it was making of VMs is finished, or nothing of it stays.

    What cannot be ended here is for the next command on the VM (`making.py`).
    """
    try:
        yield
    finally:
        if store.key is not None:
            forget(store.key)
        with suppress(VmckptError):
            await finish(end_what_is_cut_off(job.host, names))


@asynccontextmanager
async def _takes(job: Job[Take, take.Taken]) -> AsyncIterator[Worker[take.Taken]]:
    async with _released(job, job.request.store, [job.vm]):
        yield Worker(partial(_take, job), partial(_let_output_go, job))


@asynccontextmanager
async def _restores(job: Job[Restore, restore.Restored]) -> AsyncIterator[Worker[restore.Restored]]:
    async with _released(job, job.request.store, [job.vm]):
        yield Worker(partial(_restore, job), partial(_let_output_go, job))


@asynccontextmanager
async def _restores_disks(
    job: Job[Restore, restore_disks.DisksRestored],
) -> AsyncIterator[Worker[restore_disks.DisksRestored]]:
    async with _released(job, job.request.store, [job.vm]):
        yield Worker(partial(_restore_disks, job), partial(_let_output_go, job))


@asynccontextmanager
async def _forks(job: Job[Fork, Forks]) -> AsyncIterator[Worker[Forks]]:
    async def recover_forks() -> None:
        fork.remove_parts(job.host, job.run)

    async with _released(job, job.request.store, job.request.wish.names):
        yield Worker(partial(_fork, job), recover_forks)


@asynccontextmanager
async def _recovers(job: Job[Recover, Recover]) -> AsyncIterator[Worker[Recover]]:
    async def end() -> Recover:
        await end_what_is_cut_off(job.host, [job.vm])
        return Recover()

    yield Worker(end, end)


async def end_what_is_cut_off(host: LocalHost, names: Iterable[str]) -> None:
    """End restores and savings of these VMs that were cut off. Raises as `recover.recover`."""
    for name in names:
        vm = await read_vm(host, name)
        if vm is None:
            await recover.undo(host, name)
        elif await restore_is_cut_off(vm):
            await recover.recover(vm)


CHECKPOINT = Kind("checkpoint", "checkpoint", Take, take.Taken, _takes)
RESTORE = Kind("restore", "restore", Restore, restore.Restored, _restores)
RESTORE_DISKS = Kind(
    "restore-disks", "restore of disks", Restore, restore_disks.DisksRestored, _restores_disks
)
FORK = Kind("fork", "fork", Fork, Forks, _forks)
RECOVER = Kind("recover", "recovery", Recover, Recover, _recovers)
KINDS = (CHECKPOINT, RESTORE, RESTORE_DISKS, FORK, RECOVER)
