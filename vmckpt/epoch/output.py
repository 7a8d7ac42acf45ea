"""Output commit: what a guest sends is held until somebody says that its epoch is safe.

Two of QEMU's filter-buffers per network back end, one behind the other. What the guest sends waits
in the first; at an epoch's end it moves into the second; when the epoch is safe the second lets it
go. A buffer that is switched off and on again gives all it holds to the next.

The one on the wire's side is made first: filters of a back end stand in the order of their making,
and packets from the guest pass the last one first. A buffer drops what comes beyond 10,000
packets, silently: who holds back so much has held it for too long anyway.
"""

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

from vmckpt.qemu import commands
from vmckpt.qemu.monitor import CommandRefusedError, Monitor

# A buffer empties itself after this long, by the guest's clock: 71 minutes. Each switch begins it
# anew, and no epoch is left unanswered for so long.
_INTERVAL_US = (1 << 32) - 1
_INNER, _OUTER = "vmckpt-inner-", "vmckpt-outer-"
_BRIEF = "vmckpt-brief-"
_OF_GUEST = "rx"  # what the back end receives: from the guest


class HeldOutput:
    """The output of a VM's network back ends; of none when it has none."""

    def __init__(self, monitor: Monitor, netdevs: Sequence[str]) -> None:
        self._monitor, self._netdevs = monitor, tuple(netdevs)

    async def hold(self) -> None:
        """From here on nothing leaves. Raises CommandRefusedError; then nothing is held."""
        try:
            for netdev in self._netdevs:
                for prefix in (_OUTER, _INNER):
                    values = {"netdev": netdev, "queue": _OF_GUEST, "interval": _INTERVAL_US}
                    await commands.object_add(
                        self._monitor, "filter-buffer", prefix + netdev, values
                    )
        except CommandRefusedError:
            await self.let_go()
            raise

    def end_epoch(self) -> list[Coroutine[Any, Any, None]]:
        """Commands, in order, that give what was sent so far to the outer buffer.

        For the pause, or just before it; the outer buffer is empty. What is sent between these and
        the stop is held for the next epoch.
        """
        return [step for netdev in self._netdevs for step in self._emptied(_INNER + netdev)]

    async def release(self) -> None:
        """Let go what the outer buffer holds: the epoch is safe."""
        steps = [step for netdev in self._netdevs for step in self._emptied(_OUTER + netdev)]
        await asyncio.gather(*steps)

    async def let_go(self) -> None:
        """Hold nothing any more: all that waits leaves, in order."""
        names = await commands.query_objects(self._monitor)
        for netdev in self._netdevs:
            for name in (_OUTER + netdev, _INNER + netdev):
                if name in names:
                    await commands.object_del(self._monitor, name)

    def _emptied(self, name: str) -> Iterable[Coroutine[Any, Any, None]]:
        for status in ("off", "on"):
            yield commands.qom_set(self._monitor, f"/objects/{name}", "status", status)


class BriefHold:
    """The output of a VM's network back ends, held for a moment, by one buffer each.

    Every `most_s` QEMU lets go what waits, whatever has become of who holds it: so it is never held
    for longer, and nobody who held it for longer may believe that nothing left.
    """

    def __init__(self, monitor: Monitor, netdevs: Sequence[str], most_s: float) -> None:
        self._monitor, self._most_s = monitor, most_s
        self._buffers = dict(zip(brief_holds(netdevs), netdevs, strict=True))

    def begin(self) -> list[Coroutine[Any, Any, None]]:
        """Commands after which nothing leaves. If one is refused `let_go` is still to be done."""
        values = {"queue": _OF_GUEST, "interval": int(self._most_s * 1e6)}
        return [
            commands.object_add(self._monitor, "filter-buffer", name, {"netdev": netdev, **values})
            for name, netdev in self._buffers.items()
        ]

    async def release(self) -> None:
        """Let go what is held, in order, without asking what that is. Raises CommandRefusedError:
        somebody else has let it go.
        """
        await asyncio.gather(*(commands.object_del(self._monitor, name) for name in self._buffers))

    async def let_go(self) -> None:
        """Hold nothing any more, whoever held it."""
        names = await commands.query_objects(self._monitor)
        mine = [name for name in names if name.startswith(_BRIEF)]
        await asyncio.gather(*(commands.object_del(self._monitor, name) for name in mine))


def brief_holds(netdevs: Sequence[str]) -> list[str]:
    """What the buffers of a brief hold are called."""
    return [_BRIEF + netdev for netdev in netdevs]


async def holds_output(monitor: Monitor) -> list[str]:
    """The network back ends whose output a protection holds, or held when it died."""
    names = await commands.query_objects(monitor)
    # Who died while it made them, or let them go, has left one of the two.
    held = [
        name.removeprefix(prefix)
        for prefix in (_OUTER, _INNER)
        for name in names
        if name.startswith(prefix)
    ]
    return [*dict.fromkeys(held)]
