"""One question to many hosts at once; those that give no answer do not keep the others' back."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

from vmckpt.errors import VmckptError
from vmckpt.hosts.host import Host

T = TypeVar("T")


class Unread(NamedTuple):
    """A VM of a host that answers, of which nothing can be said."""

    host: str
    vm: str
    error: VmckptError


class Answers(NamedTuple, Generic[T]):
    """What the hosts said, in their order, why the others said nothing, and which these are.

    Where VMs are asked about, `unread` are those that could not be read; `silent` has their errors.
    """

    given: list[T]
    silent: list[VmckptError]
    unheard: tuple[str, ...] = ()
    unread: tuple[Unread, ...] = ()


async def ask_every(hosts: Iterable[Host], question: Callable[[Host], Awaitable[T]]) -> Answers[T]:
    """Every host's answer; whatever error of ours one comes to is that host's alone."""

    async def ask(host: Host) -> T | VmckptError:
        try:
            return await question(host)
        except VmckptError as exc:
            return exc

    asked = list(hosts)
    found = await asyncio.gather(*map(ask, asked))
    return Answers(
        [one for one in found if not isinstance(one, VmckptError)],
        [one for one in found if isinstance(one, VmckptError)],
        tuple(
            host.name
            for host, one in zip(asked, found, strict=True)
            if isinstance(one, VmckptError)
        ),
    )
