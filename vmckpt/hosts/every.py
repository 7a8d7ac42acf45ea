"""Query many hosts concurrently; silent ones do not delay or hide the others' answers."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

from vmckpt.errors import VmckptError
from vmckpt.hosts.host import Host

T = TypeVar("T")


class Unread(NamedTuple):
    """A VM that cannot be read, on a host that answers."""

    host: str
    vm: str
    error: VmckptError


class Arrival(NamedTuple):
    """A VM that is not at home on a host, where a migration to it made something.

    If that was interrupted (no `operation` holds the VM there), its guest may run there.
    """

    host: str
    vm: str
    operation: str | None = None


class Answers(NamedTuple, Generic[T]):
    """The hosts' answers, in order, with the errors of silent hosts, and their names.

    For queries about VMs, `unread` lists those that could not be read; `silent` has their errors.
    """

    given: list[T]
    silent: list[VmckptError]
    unanswered: tuple[str, ...] = ()
    unread: tuple[Unread, ...] = ()
    arrivals: tuple[Arrival, ...] = ()


async def ask_every(hosts: Iterable[Host], question: Callable[[Host], Awaitable[T]]) -> Answers[T]:
    """Every host's answer; a VmckptError from one host counts for that host only."""

    async def ask(host: Host) -> T | VmckptError:
        try:
            return await question(host)
        except VmckptError as exc:
            return exc

    queried = list(hosts)
    found = await asyncio.gather(*map(ask, queried))
    return Answers(
        [one for one in found if not isinstance(one, VmckptError)],
        [one for one in found if isinstance(one, VmckptError)],
        tuple(
            host.name
            for host, one in zip(queried, found, strict=True)
            if isinstance(one, VmckptError)
        ),
    )
