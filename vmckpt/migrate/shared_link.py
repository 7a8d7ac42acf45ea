"""Share a host's link among its concurrent migrations, outgoing and incoming.

Each has a file on both hosts, `links/out/RUN.LIMIT` on its source and `links/in/RUN.LIMIT` on its
destination, locked by its process: the lock dies with it. All read them once a second; none decides
for the others.

Migrations that go `in_turn` do not share among themselves: one at a time sends from a host, or to
one, while it holds `links/turn/out` there, or `links/turn/in`; only then does it count.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import NamedTuple

from vmckpt.deadlines import retry
from vmckpt.errors import BusyError, HostDownError, VmckptError
from vmckpt.events.record import SHARED_LINK
from vmckpt.forecast.measure.link_users import IN, OUT, TURN, directory_of, limits
from vmckpt.hosts.host import Host
from vmckpt.hosts.lock import Owner
from vmckpt.sequence.steps import both, to_the_end
from vmckpt.units import format_rate

CHECK_S = 1.0
# How soon a waiting migration notices that the link is free.
TURN_POLL_S = 0.05
# Moves take time, and a frozen one keeps the link: then report which one others wait for.
WAITS_S = 120.0


class Share(NamedTuple):
    """The number of other migrations on the link, and the share of this one (0: no limit)."""

    others: int
    bytes_per_s: int


class SharedLink:
    """One migration's share of the link between two hosts. `limit` 0: it has no limit."""

    def __init__(
        self,
        source: Host,
        destination: Host,
        run: str,
        limit_bytes_per_s: int,
        note: Callable[[str, str], None],
    ) -> None:
        self._source, self._destination = source, destination
        self._run, self._limit = run, limit_bytes_per_s
        self._note, self._noted = note, Share(0, limit_bytes_per_s)
        self._there = AsyncExitStack()

    async def current(self) -> Share:
        """The present share. Raises HostDownError."""
        out, in_ = await both(
            limits(self._source, OUT, self._run), limits(self._destination, IN, self._run)
        )
        others = len(out.keys() | in_.keys())
        if not self._limit:
            return Share(others, 0)
        # An unlimited migration takes what it gets, whatever the others do.
        shares = [
            fair_share(self._limit, [limit for limit in found.values() if limit])
            for found in (out, in_)
        ]
        return Share(others, min(shares))

    async def come(self) -> None:
        """Join: from here on it counts on both hosts."""
        name = f"{self._run}.{self._limit}"
        # A process that cleans up after killed ones may hold a new file that is not locked yet.
        await self._hold([(self._source, OUT, name), (self._destination, IN, name)])

    async def my_turn(self) -> None:
        """Return, counted, when no other in-turn migration sends from the source or to the
        destination.

        Raises HostDownError, StorageError.
        """
        await self._hold([(self._source, TURN, OUT), (self._destination, TURN, IN)])
        await self.come()

    async def _hold(self, files: Sequence[tuple[Host, str, str]]) -> None:
        """Lock all of these until `leave`, waiting for other holders."""

        async def hold() -> None:
            async with AsyncExitStack() as stack:
                for host, directory, name in files:
                    path = directory_of(host, directory) / name
                    await stack.enter_async_context(host.lock(path, self._owner))
                self._there.push_async_exit(stack.pop_all())

        while True:
            try:
                return await retry(hold, BusyError, every_s=TURN_POLL_S, within_s=WAITS_S)
            except BusyError as exc:
                text = f"still waiting for the link, {exc.why}: if that makes no progress, end it"
                self._note(TURN, text)

    async def leave(self) -> None:
        """Leave: it no longer sends."""
        with suppress(HostDownError):  # what it held there goes with the connection
            await self._there.aclose()

    @property
    def _owner(self) -> Owner:
        return Owner(self._run, "migrate", os.getpid(), time.time())

    @asynccontextmanager
    async def kept(self, hold_to: Callable[[int], Awaitable[None]]) -> AsyncIterator[None]:
        """During the block, call `hold_to` with each new share."""
        task = asyncio.create_task(self._keep(hold_to))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled():
                task.result()

    async def _keep(self, hold_to: Callable[[int], Awaitable[None]]) -> None:
        given = self._limit
        while True:
            # A silent end is reported elsewhere; the share stays.
            with suppress(VmckptError):
                share = await self.current()
                if share.bytes_per_s != given:
                    await hold_to(share.bytes_per_s)
                    given = share.bytes_per_s
                self._tell(share)
            await asyncio.sleep(CHECK_S)

    def _tell(self, share: Share) -> None:
        if share == self._noted:
            return
        self._noted = share
        words = f"{share.others} other migrations use the link" if share.others else "alone again"
        if share.others == 1:
            words = "another migration uses the link"
        speed = f", at {format_rate(share.bytes_per_s)}" if self._limit else ""
        self._note(SHARED_LINK, f"{words}: continuing{speed}")


@asynccontextmanager
async def on_the_link(
    source: Host,
    destination: Host,
    run: str,
    limit_bytes_per_s: int,
    note: Callable[[str, str], None],
    *,
    in_turn: bool = False,
) -> AsyncIterator[SharedLink]:
    """For the block this migration counts on both hosts; one `in_turn` from `my_turn` on.

    A cancellation during `leave` comes too late: the block's outcome stands.
    """
    link = SharedLink(source, destination, run, limit_bytes_per_s, note)
    try:
        if not in_turn:
            await link.come()
        yield link
    finally:
        await to_the_end(link.leave())


def fair_share(mine_bytes_per_s: int, others_bytes_per_s: Sequence[int]) -> int:
    """The share of a migration with limit `mine` beside others with their limits.

    Together they get the largest limit, divided evenly; what one may not use goes to the others
    (max-min fairness). Each gets at most its limit, and at least 1.
    """
    limits = sorted([mine_bytes_per_s, *others_bytes_per_s])
    rest, level = limits[-1], 0
    for number, limit in enumerate(limits):
        level = max(level, rest // (len(limits) - number))
        rest -= min(limit, level)
    return max(1, min(mine_bytes_per_s, level))
