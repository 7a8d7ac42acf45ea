"""The VM's lock on every host of an operation: take it, wait for it, clean up after it."""

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from vmckpt.errors import BusyError
from vmckpt.hosts.every import ask_every
from vmckpt.hosts.host import Host
from vmckpt.sequence.steps import to_the_end
from vmckpt.vm.inventory import RECOVERY
from vmckpt.vm.lifecycle import owner
from vmckpt.vm.paths import lock_path

WAIT_S = 10.0


@asynccontextmanager
async def locked(name: str, hosts: Iterable[Host], action: str, run: str) -> AsyncIterator[None]:
    """Hold the VM's lock on every host for the block. Raises BusyError, naming the holder.

    A cancellation during the release comes too late: the block's work is done.
    """
    stack = AsyncExitStack()
    try:
        for host in sorted(hosts, key=lambda host: host.name):
            lock = host.lock(lock_path(host.state_dir, name), owner(action, run))
            await stack.enter_async_context(lock)
        yield
    finally:
        await to_the_end(stack.aclose())


async def wait_for_locks(vm: str, run: str, hosts: Collection[Host]) -> AsyncExitStack:
    """Wait for the locks: the dead command's switch may be recovering right now."""
    deadline = time.monotonic() + WAIT_S
    while True:
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(locked(vm, hosts, RECOVERY, run))
                return stack.pop_all()
            except BusyError as exc:
                # A lock that was just taken does not name its holder yet.
                passing = RECOVERY in exc.why or "another operation" in exc.why
                if not passing or time.monotonic() > deadline:
                    raise
        await asyncio.sleep(0.05)


async def remove_dead_locks(name: str, hosts: Iterable[Host]) -> None:
    """Remove a killed command's lock files by taking the locks, which are free."""

    async def remove(host: Host) -> None:
        path = lock_path(host.state_dir, name)
        if await host.exists(path):
            with suppress(BusyError):
                async with host.lock(path, owner(RECOVERY)):
                    pass

    await ask_every(hosts, remove)
