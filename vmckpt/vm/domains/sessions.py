"""Sessions with hosts' libvirtds: opened on demand and reused."""

import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple

from vmckpt.errors import RefusedError
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory.directories import state_dir
from vmckpt.installing import Need, advice_here
from vmckpt.sequence.steps import all_of
from vmckpt.vm.domains.connection import is_installed
from vmckpt.vm.domains.forward import forwarded
from vmckpt.vm.domains.libvirtd import Libvirtd


class _OpenSession(NamedTuple):
    session: Libvirtd
    ending: AsyncExitStack


# Open and unused, by host; None: each session is closed when its block ends.
_idle: dict[Host, list[_OpenSession]] | None = None


@asynccontextmanager
async def libvirtd(host: Host) -> AsyncIterator[Libvirtd]:
    """An exclusive session with the host's libvirtd, for the block.

    Raises RefusedError: the inventory names none, or libvirt-python is missing; HostDownError: it
    does not answer, or this user may not use it.
    """
    one = _take(host) or await _open(host)
    try:
        yield one.session
    finally:
        if _idle is not None and one.session.is_sound:
            _idle.setdefault(host, []).append(one)
        else:
            await one.ending.aclose()


@asynccontextmanager
async def libvirtds(*hosts: Host) -> AsyncIterator[list[Libvirtd]]:
    """Sessions with all of them, opened concurrently; see `libvirtd`."""
    async with AsyncExitStack() as stack:
        yield await all_of([stack.enter_async_context(libvirtd(host)) for host in hosts])


def keep_sessions() -> None:
    """Keep sessions open after their blocks, for reuse, until `close_sessions`."""
    global _idle  # noqa: PLW0603 - one for the process, as the connections to hosts are
    if _idle is None:
        _idle = {}


async def close_sessions() -> None:
    """Close idle sessions, and keep no more."""
    global _idle
    kept, _idle = _idle or {}, None
    await all_of([one.ending.aclose() for ones in kept.values() for one in ones])


def _take(host: Host) -> _OpenSession | None:
    ones = [] if _idle is None else _idle.get(host, [])
    for one in ones:
        if one.session.is_sound:
            ones.remove(one)
            return one
    return None


async def _open(host: Host) -> _OpenSession:
    if host.libvirt is None:
        raise RefusedError(
            f"{host.name} has no libvirtd",
            why="its inventory entry names no socket of one",
            remedy=f"vmckpt host set {host.name} --libvirt /run/libvirt/libvirt-sock",
        )
    if not is_installed():
        raise RefusedError(
            f"libvirtd on {host.name} cannot be asked",
            why="this vmckpt has no libvirt-python",
            remedy=f"{advice_here(Need.LIBVIRT_SOURCES)} && "
            f"{sys.executable} -m pip install libvirt-python",
        )
    async with AsyncExitStack() as stack:
        near = await stack.enter_async_context(forwarded(host, host.libvirt, state_dir()))
        mode = "session" if host.libvirt.is_relative_to("/run/user") else "system"
        session = Libvirtd(f"qemu+unix:///{mode}?socket={near}", host)
        await session.open()
        stack.push_async_callback(session.close)
        return _OpenSession(session, stack.pop_all())
