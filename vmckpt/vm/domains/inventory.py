"""Find domains: those of every libvirtd in the inventory."""

from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from shlex import quote

from vmckpt.errors import BusyError, RefusedError, UsageError
from vmckpt.hosts.every import Answers, Unread, ask_every
from vmckpt.hosts.host import Host
from vmckpt.vm.domains.definition.description import Description, parse_domain
from vmckpt.vm.domains.flags import DomainState, PausedReason
from vmckpt.vm.domains.libvirtd import Libvirtd
from vmckpt.vm.domains.replies import DomainInfo
from vmckpt.vm.domains.sessions import libvirtd
from vmckpt.vm.lifecycle import owner
from vmckpt.vm.paths import lock_path

_OFF = frozenset({DomainState.NOSTATE, DomainState.SHUTOFF, DomainState.CRASHED})
_BY_MIGRATION = frozenset(PausedReason)
_NOT_YET = frozenset({PausedReason.MIGRATION, PausedReason.STARTING_UP})


@dataclass(frozen=True, slots=True)
class Domain:
    """A domain as its host's libvirtd described it."""

    host: Host
    seen: DomainInfo
    description: Description

    @property
    def name(self) -> str:
        """The domain's name."""
        return self.seen.name

    @property
    def uuid(self) -> str:
        """The domain's UUID, the same on every host."""
        return self.seen.uuid

    @property
    def is_active(self) -> bool:
        """Whether it has a running QEMU."""
        return self.seen.state not in _OFF

    @property
    def is_arriving(self) -> bool:
        """Whether it is here only as the destination of a migration, or as a leftover of one.

        Unknown while its QEMU is being started.
        """
        return self.seen.state is DomainState.PAUSED and self.seen.reason in _NOT_YET

    @property
    def is_paused_to_move(self) -> bool:
        """Whether a migration has paused it: another host's QEMU may have the guest, or get it."""
        return self.seen.state is DomainState.PAUSED and self.seen.reason in _BY_MIGRATION

    @property
    def runs(self) -> bool:
        """Whether its QEMU has the guest, paused or not: at most one host's has."""
        return self.is_active and not self.is_arriving

    @property
    def state(self) -> str:
        """The state in a word: stopped, running, paused, ..."""
        if self.is_arriving:
            return "starting" if self.seen.reason == PausedReason.STARTING_UP else "migrating"
        return "stopped" if self.seen.state is DomainState.SHUTOFF else self.seen.state.name.lower()


async def all_domains(hosts: Iterable[Host]) -> Answers[Domain]:
    """Every domain of `hosts`, queried concurrently. Hosts without a libvirtd have none.

    A domain with an unreadable description is listed among the silent, and hides no other.
    """
    unread = list[Unread]()

    async def ask(host: Host) -> list[Domain]:
        found = []
        async with libvirtd(host) as session:
            for seen in await session.domains():
                try:
                    found.append(as_domain(host, seen))
                except UsageError as exc:
                    what = f"'{seen.name}' on {host.name} is left out: {exc.what}"
                    error = UsageError(what, why=exc.why, remedy=exc.remedy)
                    unread.append(Unread(host.name, seen.name, error))
        return found

    answers = await ask_every((host for host in hosts if host.libvirt is not None), ask)
    given = [domain for found in answers.given for domain in found]
    silent = answers.silent + [one.error for one in unread]
    return Answers(given, silent, answers.unanswered, tuple(unread))


def as_domain(host: Host, seen: DomainInfo) -> Domain:
    """The domain that libvirtd described."""
    return Domain(host, seen, parse_domain(seen.xml))


async def find_domain(
    name: str, hosts: Iterable[Host], *, left: Collection[str] = ()
) -> Domain | None:
    """The domain of that name; None if no libvirtd that answers has it.

    If it is defined on several hosts, this is the one where it runs; if it is off, not one on hosts
    in `left`, which have leftovers of it. Raises UsageError if different domains have the name,
    HostDownError if only leftovers were found and a host does not answer.
    """
    found = await all_domains(hosts)
    chosen = choose([domain for domain in found.given if domain.name == name], left=left)
    if found.silent and (chosen is None or (chosen.host.name in left and not chosen.runs)):
        raise found.silent[0]
    return chosen


def choose(same_name: Sequence[Domain], *, left: Collection[str] = ()) -> Domain | None:
    """The domain that is meant. Pure. Raises UsageError if that is ambiguous."""
    if len({domain.uuid for domain in same_name}) > 1:
        found = ", ".join(f"{domain.uuid} on {domain.host.name}" for domain in same_name)
        raise UsageError(
            f"several domains are called '{same_name[0].name}'",
            why=found,
            remedy="rename all but one: virsh domrename",
        )
    by_worth = sorted(
        same_name,
        key=lambda domain: (not domain.runs, domain.host.name in left, not domain.is_active),
    )
    return by_worth[0] if by_worth else None


@asynccontextmanager
async def held_domain(domain: Domain, action: str) -> AsyncIterator[tuple[Domain, Libvirtd]]:
    """Lock the domain; yields its current state, and a session to control it.

    Raises BusyError if another vmckpt command holds the lock, or the domain has gone meanwhile.
    """
    lock = domain.host.lock(lock_path(domain.host.state_dir, domain.name), owner(action))
    async with lock, libvirtd(domain.host) as session:
        yield await seen_again(domain, session), session


async def seen_again(domain: Domain, session: Libvirtd) -> Domain:
    """The domain's current state. Raises BusyError if it has gone."""
    seen = await session.find(domain.uuid)
    if seen is None:
        raise BusyError(
            f"'{domain.name}' is no longer on {domain.host.name}",
            why="it was migrated or removed in the meantime",
            remedy="try again: vmckpt vm list",
        )
    return as_domain(domain.host, seen)


def require_active(domain: Domain) -> None:
    """Raises RefusedError if the domain does not run."""
    if not domain.is_active:
        raise RefusedError(
            f"'{domain.name}' is stopped",
            why=f"libvirt on {domain.host.name} says so",
            remedy=f"start it: vmckpt vm start {quote(domain.name)}",
        )
