"""The journal of a domain's migration: enough to clean up after a command that died.

It is in the operator's state directory; libvirt carries out the migration itself and continues it.
Records of cleanup on a silent end are kept separately, so that the next migration does not
overwrite them.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Self

from vmckpt.errors import BusyError
from vmckpt.hosts.inventory.directories import state_dir
from vmckpt.hosts.inventory.inventory import local_host
from vmckpt.migrate.steps.disk_files import MovedDisk
from vmckpt.state.documents import Schema, load_from, save_to
from vmckpt.vm.paths import left_file, left_vm


@dataclass(frozen=True, slots=True)
class DomainJournal:
    """One migration of one domain. `disks` are files made on the destination for it.

    `may_postcopy`: the guest may run there before its memory has arrived. `known_to_target`: the
    destination had its definition before. `moved`: the destination has it; only the source is not
    cleaned up yet, and copied `disks` are still to be handed over. `stayed`: the source has it;
    only the destination is not cleaned up. `held_mib_per_s`: see hold.py; the guest's downtime may
    be `max_downtime_ms`. `offline`: the domain is off. `has_tpm`: a TPM whose state libvirt keeps,
    and would remove. `starts_with_host`: libvirtd starts it when it starts itself.
    """

    run: str
    vm: str
    uuid: str
    source: str
    target: str
    persistent: bool
    disks: tuple[MovedDisk, ...] = ()
    may_postcopy: bool = False
    known_to_target: bool = False
    moved: bool = False
    stayed: bool = False
    held_mib_per_s: int = 0
    max_downtime_ms: int = 0
    offline: bool = False
    has_tpm: bool = False
    starts_with_host: bool = False

    @property
    def has_ended(self) -> bool:
        """Whether it is settled who has the domain, and only the other end needs cleanup."""
        return self.moved or self.stayed

    @property
    def owner(self) -> str:
        """The host that has the domain after the migration."""
        return self.target if self.moved else self.source

    @property
    def untidy(self) -> str:
        """The host that still has remains of it after the migration."""
        return self.source if self.moved else self.target

    @property
    def path(self) -> Path:
        """The journal's file."""
        if self.has_ended:
            return _left_dir() / left_file(_file_name(self.vm), self.run)
        return _path(self.vm)

    def held_by(self, host: str) -> Self:
        """The same journal of an ended migration, after the domain moved to another host."""
        return replace(self, target=host) if self.moved else replace(self, source=host)

    async def write(self) -> None:
        """Write it; that of an ended migration makes room for the next one. Raises StorageError."""
        await local_host().make_dir(self.path.parent)
        await save_to(local_host(), self.path, _SCHEMA, self)
        if self.has_ended:
            await self._remove_begun()

    async def remove(self) -> None:
        """Remove it."""
        await local_host().remove(self.path)
        await self._remove_begun()

    async def _remove_begun(self) -> None:
        """Remove this run's journal from before its end, but not another run's."""
        begun = await self.read(self.vm)
        if begun is not None and begun.run == self.run:
            await local_host().remove(_path(self.vm))

    @staticmethod
    async def read(vm: str) -> "DomainJournal | None":
        """The journal of the domain of that name; None if there is none. Raises UsageError."""
        return await load_from(local_host(), _path(vm), _SCHEMA)

    @staticmethod
    async def all_of(vm: str) -> "list[DomainJournal]":
        """The journal of a running or interrupted migration, if any, and `all_left`."""
        begun, left = await DomainJournal.read(vm), await DomainJournal.all_left(vm)
        return left if begun is None or begun.has_ended else [begun, *left]

    @staticmethod
    async def all_left(vm: str) -> "list[DomainJournal]":
        """Those of ended migrations, oldest first. Raises UsageError."""
        names = await local_host().list_dir(_left_dir())
        paths = [_left_dir() / name for name in names if left_vm(name) == _file_name(vm)]
        # An earlier vmckpt did not keep these separately.
        found = list[DomainJournal]()
        for path in (*paths, _path(vm)):
            one = await load_from(local_host(), path, _SCHEMA)
            if one is not None and one.vm == vm and one.has_ended:
                found.append(one)
        return found


_SCHEMA = Schema(DomainJournal, "see where the domain runs (virsh list), and remove the file")


async def make_room(vm: str) -> None:
    """Under the domain's lock: keep the next migration's journal from overwriting another.

    Raises BusyError if another migration was interrupted meanwhile, StorageError.
    """
    begun = await DomainJournal.read(vm)
    if begun is None:
        return
    if not begun.has_ended:
        raise BusyError(
            f"a migration of '{vm}' was interrupted",
            why=f"run {begun.run}, from {begun.source} to {begun.target}, has not ended",
            remedy=f"vmckpt migrate --recover {quote(vm)}, then try again",
        )
    await begun.write()  # an earlier vmckpt did not keep it separately


def _path(vm: str) -> Path:
    return _dir() / f"{_file_name(vm)}.json"


def _left_dir() -> Path:
    return _dir() / "left"


def _dir() -> Path:
    return state_dir() / "domains"


def _file_name(vm: str) -> str:
    # A name that is not a file name (libvirt forbids "/") has no journal.
    return vm.replace("/", "_")
