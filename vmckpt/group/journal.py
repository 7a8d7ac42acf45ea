"""The record of a group's commit, written before it: a killed head leaves all or nothing.

`groups/ID.json` in the operator's state directory exists from before the first member commits until
all have, or none has. The stores are asked whether they have.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from vmckpt.checkpoint.catalogue.location import Key, StoreLocation, opened
from vmckpt.errors import (
    BusyError,
    HostDownError,
    NotFoundError,
    OutcomeUnknownError,
    VmckptError,
)
from vmckpt.group.services import END_S
from vmckpt.hosts.inventory.directories import state_dir
from vmckpt.hosts.inventory.inventory import find_host, local_host
from vmckpt.hosts.processes.process import ProcessId
from vmckpt.jobs.handle import ended
from vmckpt.sequence.in_thread import in_thread
from vmckpt.state.documents import Documents, Schema
from vmckpt.vm.lifecycle import owner


@dataclass(frozen=True, slots=True)
class Part:
    """One member: its checkpoint, the store for it, and the service that commits it, with its host.

    `committed`: it was seen in the store. It may be removed before all others have answered.
    """

    vm: str
    host: str
    process: ProcessId
    store_host: str | None
    store: str
    checkpoint: str
    committed: bool = False


@dataclass(frozen=True, slots=True)
class GroupJournal:
    """One group that may be partly committed."""

    id: str
    name: str
    parts: tuple[Part, ...]

    def write(self) -> None:
        """Write it durably: it outlives a reboot. Raises StorageError."""
        _journals().save(self.id, self)

    def forget(self) -> None:
        """Remove it: the commit is over."""
        _journals().remove(self.id)


_SCHEMA = Schema(
    GroupJournal,
    "`vmckpt checkpoint list` shows which checkpoints say that they are of that group; remove them "
    "or keep them, and remove the file",
)


def groups_dir() -> Path:
    """The directory in which groups are recorded while they are committed."""
    return state_dir() / "groups"


def _journals() -> Documents[GroupJournal]:
    return Documents(groups_dir(), _SCHEMA)


@asynccontextmanager
async def led(group_id: str) -> AsyncIterator[None]:
    """Lock the group for settling it. Raises BusyError."""
    path = groups_dir() / f"{group_id}.lock"
    async with local_host().lock(path, owner("checkpoint create --group")):
        yield


async def settle(journal: GroupJournal, key: Key = None) -> bool:
    """Make it all committed (True), or remove what was; then the record. Call only as its leader.

    Raises OutcomeUnknownError if a store or a host does not answer: try again later.
    """
    parts, silent = list[Part](), list[VmckptError]()
    for part in journal.parts:
        try:
            parts.append(part if part.committed else await _found_part(part, key))
        except VmckptError as exc:
            parts.append(part)
            silent.append(exc)
    is_whole = all(part.committed for part in parts)
    try:
        if silent:
            raise silent[0]
        for part in () if is_whole else parts:
            await _removed(part, key)
    except VmckptError as exc:
        if parts != list(journal.parts):
            replace(journal, parts=tuple(parts)).write()
        raise OutcomeUnknownError(
            f"it is not known yet whether group '{journal.name}' is complete",
            why=str(exc),
            remedy="try again when all its hosts and stores answer: vmckpt checkpoint list",
        ) from exc
    journal.forget()
    return is_whole


async def settle_left(key: Key = None) -> list[str]:
    """Settle what dead heads have left; returns the messages about it."""
    message = []
    for name in _journals().names():
        try:
            async with led(name):
                journal = _journals().load(name)
                if journal is None:
                    continue
                outcome = "is complete" if await settle(journal, key) else "was removed"
                message.append(f"group {journal.name} was interrupted in its commit: it {outcome}")
        except BusyError:
            continue
        except VmckptError as exc:
            message.append(f"{exc.what}: {exc.why}")
    return message


async def _require_ended(part: Part) -> None:
    host = find_host(part.host)
    if not await ended(host, part.process, END_S) and not await host.kill(part.process):
        raise HostDownError(
            f"'{part.vm}' may still be committed on {part.host}",
            why=f"process {part.process.pid} there does not end",
            remedy="check that host",
        )


async def _found_part(part: Part, key: Key) -> Part:
    await _require_ended(part)
    async with opened(_location(part), key) as store:
        is_there = part.checkpoint in await in_thread(store.ids)
    return replace(part, committed=is_there)


async def _removed(part: Part, key: Key) -> None:
    if part.committed:
        async with opened(_location(part), key) as store:
            with suppress(NotFoundError):  # another command has removed it
                await in_thread(partial(store.remove, [part.checkpoint]))


def _location(part: Part) -> StoreLocation:
    return StoreLocation(
        None if part.store_host is None else find_host(part.store_host), part.store
    )
