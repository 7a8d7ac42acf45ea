"""How long a guest is silent during its migration, as heard from outside of it."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from vmckpt.errors import VmckptError
from vmckpt.hosts.host import Host
from vmckpt.migrate.steps.echo import Echo

if TYPE_CHECKING:
    from vmckpt.hosts.sockets.heartbeats import Silence

HEARTBEATS, ARP = "heartbeats", "arp"
T = TypeVar("T")


class Heard(NamedTuple):
    """A guest's longest silence, the sum of those over 20 ms, and how they were heard, if so.

    `too_short_ms`: by how much the longest one may be too short, if that is known.
    """

    downtime_ms: float | None = None
    silent_ms: float | None = None
    heartbeats_lost: int | None = None
    by: str | None = None
    too_short_ms: float | None = None


class GuestDowntime:
    """Listens to a guest's heartbeats at its destination; one without is probed by ARP."""

    def __init__(self, destination: Host, note: Callable[[str, str], None]) -> None:
        self._destination, self._note = destination, note
        self._guest: int | None = None
        self._echo: Echo | None = None
        self._hearing: asyncio.Task[Heard] | None = None

    async def begin(self, guest: int | None, probe: Coroutine[Any, Any, Echo | None]) -> None:
        """The guest, which runs, is about to be moved; `guest` is its heartbeats' id.

        One that is probed may be moved once it has answered: its silence has a beginning then.
        """
        if guest is not None and self._destination.heartbeats is not None:
            self._guest = guest
            probe.close()
        else:
            self._echo = await self._measured(_answered(probe))

    def conclude(self, began_s: float, ended_s: float) -> None:
        """It has been moved between these two times of this machine's monotonic clock."""
        self._hearing = asyncio.create_task(self._hear(began_s, ended_s))

    def cancel(self) -> None:
        """Stop listening. A probe ends by itself when the VM's lock is given up."""
        if self._hearing:
            self._hearing.cancel()

    async def result(self) -> Heard:
        """What was heard."""
        return await self._hearing if self._hearing else Heard()

    async def _hear(self, began_s: float, ended_s: float) -> Heard:
        if self._guest is not None:
            from vmckpt.hosts.sockets.guest_silence import guest_silence

            found = await guest_silence(
                self._destination, self._guest, began_s, ended_s, self._note
            )
            return _by(HEARTBEATS, found, found and found.lost)
        return _by(ARP, await self._measured(self._echo.end()) if self._echo else None)

    async def _measured(self, work: Coroutine[Any, Any, T | None]) -> T | None:
        """A failure only costs the figure."""
        try:
            return await work
        except (VmckptError, ValueError) as exc:
            self._note("echo", f"guest-visible downtime was not measured: {exc}")
            return None


async def _answered(probe: Coroutine[Any, Any, Echo | None]) -> Echo | None:
    echo = await probe
    return await echo.answered() if echo else None


def _by(how: str, found: "Silence | None", heartbeats_lost: int | None = None) -> Heard:
    if found is None:
        return Heard()
    return Heard(found.longest_gap_ms, found.silent_ms, heartbeats_lost, how, found.too_short_ms)
