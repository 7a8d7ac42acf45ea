"""How a primary's protection ends; of a libvirt domain's, what libvirt has to do with it."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from typing import Any

from vmckpt.errors import VmckptError
from vmckpt.qemu import commands
from vmckpt.qemu.monitor import Events, Monitor
from vmckpt.replicate.primary.keeper import RETRY_S
from vmckpt.replicate.primary.stream import StandbyLostError

# How long a libvirtd that ended is waited for, before the standby gets the guest; and its QEMU's
# time to answer then.
LIBVIRTD_S, ANSWER_S = 20.0, 1.0


class ProtectionEnding(Enum):
    """Why the protection ended, and where the guest is."""

    # In words; whether the arbiter has recorded that no replica may take over.
    STOPPED = "stopped: on request; the guest runs here, unprotected", True
    ALONE = "alone: the standby is lost; the guest runs here, unprotected", True
    GUEST_OFF = "off: the guest has powered off", True
    LOST = "lost: its QEMU died before the standby had the guest", True
    YOURS = "handed over: the guest continues on the standby", False
    REPLACED = "replaced: the standby has taken over; this QEMU was ended", False

    def __init__(self, text: str, is_settled: bool) -> None:
        self.text, self.is_settled = text, is_settled


async def libvirtd_is_back(exc: Exception, monitor: Monitor, lives: Callable[[], bool]) -> bool:
    """Whether only the libvirtd ended that has the guest's monitor, and is back: the guest is
    well. One that is not back in time leaves a guest that nothing here can control.

    `exc`: what was noticed; `lives`: whether its QEMU does.
    """
    if not monitor.is_lent or isinstance(exc, OSError) or monitor.is_open:
        return False
    until_s = time.monotonic() + LIBVIRTD_S
    while lives() and time.monotonic() < until_s:
        with suppress(VmckptError):
            await monitor.reopen()
            await commands.query_status(monitor, ANSWER_S)
            return lives()
        await asyncio.sleep(RETRY_S)
    return False


class LibvirtMoves:
    """What libvirt's own migrations of a domain have reported; `events`: None of other VMs."""

    def __init__(self, events: Events | None) -> None:
        self._events, self._phases = events, set[str]()

    def require_none(self) -> None:
        """Raises StandbyLostError if libvirt begins to send the guest elsewhere."""
        if self._seen() - {"none", "failed", "cancelled"}:
            raise StandbyLostError("libvirt saves or migrates the domain")

    def has_moved(self) -> bool:
        """Whether libvirt has sent the guest elsewhere: to a file, or to another host."""
        return "completed" in self._seen()

    def _seen(self) -> set[str]:
        if self._events is not None:
            data: list[Any] = [event["data"] for event in self._events.drain()]
            self._phases |= {one["status"] for one in data}
        return self._phases


@contextmanager
def libvirt_moves(monitor: Monitor) -> Iterator[LibvirtMoves]:
    """Listen for them, for the block."""
    if not monitor.is_lent:
        yield LibvirtMoves(None)
        return
    with monitor.events("MIGRATION") as events:
        yield LibvirtMoves(events)


def require_at_work(background: list["asyncio.Task[None]"]) -> None:
    """Raises StandbyLostError when one of the tasks beside the protection has ended."""
    for task in background:
        if task.done():
            raise StandbyLostError(_reason(task))


def _reason(task: "asyncio.Task[None]") -> str:
    error = None if task.cancelled() else task.exception()
    return str(error) if error else "the standby is lost"
