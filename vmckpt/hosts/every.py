"""One question to many hosts at once; those that give no answer do not keep the others' back."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

from vmckpt.errors import HostDownError
from vmckpt.hosts.host import Host

T = TypeVar("T")


class Answers(NamedTuple, Generic[T]):
    """What the hosts said, in their order, and why the others said nothing."""

    given: list[T]
    silent: list[HostDownError]


async def ask_every(hosts: Iterable[Host], question: Callable[[Host], Awaitable[T]]) -> Answers[T]:
    """Every host's answer. Raises what `question` raises but for HostDownError."""

    async def ask(host: Host) -> T | HostDownError:
        try:
            return await question(host)
        except HostDownError as exc:
            return exc

    found = await asyncio.gather(*(ask(host) for host in hosts))
    silent = [one for one in found if isinstance(one, HostDownError)]
    return Answers([one for one in found if not isinstance(one, HostDownError)], silent)
