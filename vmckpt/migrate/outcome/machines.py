"""Identify the hosts of a journal: operators may use two names for one machine, or vice versa."""

from collections.abc import Sequence
from contextlib import suppress

from vmckpt.errors import NotFoundError, OutcomeUnknownError, RefusedError
from vmckpt.hosts.every import ask_every
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory.identity import host_identity, read_host_identity
from vmckpt.hosts.inventory.inventory import find_host
from vmckpt.migrate.outcome.journal import MigrationJournal
from vmckpt.sequence.steps import both


class ForgottenError(OutcomeUnknownError):
    """An end of an interrupted migration is no longer in the inventory."""


async def ends(source: Host, destination: Host) -> tuple[str, str]:
    """The machine ids of both ends of a new migration.

    Raises RefusedError if the two cannot be distinguished, HostDownError, StorageError.
    """
    one, other = await both(host_identity(source), host_identity(destination))
    if one == other:
        raise RefusedError(
            f"{source.name} and {destination.name} say that they are the same host",
            why="one machine's state directory was copied to the other: a migration that was "
            "interrupted between them could not be recovered",
            remedy=f"on the copy, while no migration from or to it is under way: "
            f"rm {destination.state_dir / 'host-id'}",
        )
    return one, other


async def source_of(journal: MigrationJournal, hosts: Sequence[Host]) -> Host:
    """The source host. Raises ForgottenError, HostDownError."""
    return await _meant(journal.source, journal.source_id, hosts, journal)


async def destination_of(journal: MigrationJournal, hosts: Sequence[Host]) -> Host:
    """The destination host. Raises as `source_of`."""
    return await _meant(journal.target, journal.target_id, hosts, journal)


async def is_source(journal: MigrationJournal, host: Host) -> bool:
    """Whether `host`, which has the journal, is the source."""
    if journal.source_id in (None, journal.target_id):  # by an older vmckpt, or one host is a clone
        return host.name == journal.source
    return await read_host_identity(host) == journal.source_id


async def _meant(
    name: str, identity: str | None, hosts: Sequence[Host], journal: MigrationJournal
) -> Host:
    """The host that a journal means, among some hosts or the inventory, whatever its name there.

    Another machine of that name has nothing of the migration: the end that has the guest would seem
    dead. Raises ForgottenError, HostDownError.
    """
    named = next((host for host in hosts if host.name == name), None)
    if named is None:
        with suppress(NotFoundError):
            named = find_host(name)
    if named is not None and identity in (None, await read_host_identity(named)):
        return named
    if identity is not None:

        async def is_it(host: Host) -> Host | None:
            return host if await read_host_identity(host) == identity else None

        # A silent host may be the right one, while another falsely claims to be.
        found = await ask_every(hosts, is_it)
        those = [host for host in found.given if host is not None]
        if len(those) == 1 and not found.silent:
            return those[0]
    raise ForgottenError(
        f"it is unknown whether '{journal.vm}' is on {journal.source} or on {journal.target}",
        why=f"run {journal.run} between them was interrupted, and no host of the inventory "
        f"that answers is the '{name}' with which it was begun",
        remedy=f"add it again (vmckpt host add {name}; any other name will do), or recover the VM "
        "where the run was begun; if it is gone for good: see where the VM runs, and remove "
        f"vms/{journal.vm}/migration.json from that host's state directory",
    )
