"""Output commit: a guest's output is held until its epoch is reported safe.

Three of QEMU's filters per network back end, in a row. The guest's output waits in the first, a
filter-buffer; at an epoch's end it moves into the second, another buffer; when the epoch is safe
the second releases it through the third, a gate. A buffer that is switched off and on again passes
all it holds to the next filter.

A buffer also does so by a timer of QEMU's, at most 71 minutes after it was last emptied, whatever
else is dead or frozen by then. Hence the gate: a filter-redirector into a null character device,
which is switched off only while a safe epoch leaves. What a timer releases ends there: lost as on
any network, but never seen before it is safe.

The filter next to the wire is made first: a back end's filters are in the order of creation,
and packets from the guest pass the last one first. A buffer silently drops packets beyond 10,000:
`is_filling` warns before that, from the number of packets that the NIC has sent.
"""

import asyncio
import os
import re
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any

from vmckpt.lease.clock import boottime_s
from vmckpt.qemu import commands
from vmckpt.qemu.monitor import CommandRefusedError, Monitor, MonitorLostError

# A buffer empties itself this long after it was last switched on, by the guest's clock, which is
# never faster than ours: QEMU's maximum.
_INTERVAL_US = (1 << 32) - 1
# Of the 10,000 in a buffer, the rest being for what is sent before an epoch can be ended.
_FILLING_PACKETS = 5_000
# After this a timer may have moved output that is not safe into the outer buffer.
_TRUSTED_S = 0.9 * _INTERVAL_US / 1e6
_INNER, _OUTER, _GATE = "vmckpt-inner-", "vmckpt-outer-", "vmckpt-gate-"
_BRIEF, _TRIAL = "vmckpt-brief-", "vmckpt-trial-"
_OF_GUEST = "rx"  # what the back end receives, which is what the guest sends


class HeldOutput:
    """The held output of a VM's network back ends, if it has any."""

    def __init__(self, monitor: Monitor, netdevs: Sequence[str]) -> None:
        self._monitor, self._netdevs = monitor, tuple(netdevs)
        self._emptied_s = boottime_s()
        # The virtio NICs; None: QEMU was not asked yet.
        self._nics: list[str] | None = None
        # By NIC: its last counter, and how many packets it has sent since.
        self._seen, self._sent = dict[str, int](), dict[str, int]()

    async def hold(self) -> None:
        """From here on nothing leaves. Raises CommandRefusedError; then nothing is held."""
        self._begin_epoch()
        buffer = {"queue": _OF_GUEST, "interval": _INTERVAL_US}
        try:
            for netdev in self._netdevs:
                gate = _named(_GATE, netdev)
                with suppress(CommandRefusedError):  # a holder that was killed here left none
                    await commands.chardev_remove(self._monitor, gate)
                await commands.chardev_add(self._monitor, "null", gate)
                sink = {"netdev": netdev, "queue": _OF_GUEST, "outdev": gate}
                await commands.object_add(self._monitor, "filter-redirector", gate, sink)
                for name in (_named(_OUTER, netdev), _named(_INNER, netdev)):
                    values = {"netdev": netdev, **buffer}
                    await commands.object_add(self._monitor, "filter-buffer", name, values)
        except CommandRefusedError:
            await self.release_all()
            raise

    def end_epoch(self) -> list[Coroutine[Any, Any, None]]:
        """Commands, in order, that move what was sent so far to the outer buffer.

        For the pause, or just before it; the outer buffer is empty. What is sent between these and
        the stop is held for the next epoch.
        """
        self._begin_epoch()
        return [step for netdev in self._netdevs for step in self._emptied(_named(_INNER, netdev))]

    def _begin_epoch(self) -> None:
        self._emptied_s = boottime_s()
        self._seen.clear()
        self._sent.clear()

    async def is_filling(self) -> bool:
        """Whether an inner buffer may soon be full. Counts from the first call of an epoch.

        False for a NIC that is not a virtio device, and if QEMU does not answer.
        """
        with suppress(CommandRefusedError, MonitorLostError):
            if self._nics is None:
                self._nics = (
                    await commands.query_virtio_nics(self._monitor) if self._netdevs else []
                )
        for nic in self._nics or ():
            with suppress(CommandRefusedError, MonitorLostError):
                now = await commands.query_sent_packets(self._monitor, nic)
                sent = (now - self._seen.get(nic, now)) % commands.SENT_PACKETS_WRAP
                self._seen[nic] = now
                self._sent[nic] = self._sent.get(nic, 0) + sent
        return any(sent >= _FILLING_PACKETS for sent in self._sent.values())

    async def release(self) -> None:
        """Release the content of the outer buffer: the epoch is safe.

        If the epoch ended too long ago (this host was suspended, this process frozen), nothing
        leaves before the next one is safe: the inner buffer may have emptied itself meanwhile.
        """
        if boottime_s() - self._emptied_s > _TRUSTED_S:
            return
        steps = [
            step
            for netdev in self._netdevs
            for step in (
                self._switched(_named(_GATE, netdev), "off"),
                *self._emptied(_named(_OUTER, netdev)),
                self._switched(_named(_GATE, netdev), "on"),
            )
        ]
        await asyncio.gather(*steps)

    async def release_all(self) -> None:
        """Stop holding: everything that waits leaves, in order."""
        names = await commands.query_objects(self._monitor)
        for netdev in self._netdevs:
            gate = _named(_GATE, netdev)
            for name in (gate, _named(_OUTER, netdev), _named(_INNER, netdev)):
                if name in names:
                    await commands.object_del(self._monitor, name)
            with suppress(CommandRefusedError):  # there is none
                await commands.chardev_remove(self._monitor, gate)

    def _emptied(self, name: str) -> Iterable[Coroutine[Any, Any, None]]:
        for status in ("off", "on"):
            yield self._switched(name, status)

    def _switched(self, name: str, status: str) -> Coroutine[Any, Any, None]:
        return commands.qom_set(self._monitor, f"/objects/{name}", "status", status)


class BriefHold:
    """Hold the output of a VM's network back ends briefly, with one buffer each.

    QEMU itself releases it every `most_s`, also if the holder has died: after `most_s`, output may
    have left.
    """

    pauses_guest = False

    def __init__(self, monitor: Monitor, netdevs: Sequence[str], most_s: float) -> None:
        self._monitor, self._interval_us = monitor, int(most_s * 1e6)
        self._buffers = dict(zip(brief_holds(netdevs), netdevs, strict=True))

    def begin(self) -> list[Coroutine[Any, Any, None]]:
        """Commands after which nothing leaves; after a refused one call `release_all` too."""
        values = {"queue": _OF_GUEST, "interval": self._interval_us}
        return [
            commands.object_add(self._monitor, "filter-buffer", name, {"netdev": netdev, **values})
            for name, netdev in self._buffers.items()
        ]

    async def release(self) -> None:
        """Release held output in order, without querying it. Raises CommandRefusedError: it was
        released by another.
        """
        await asyncio.gather(*(commands.object_del(self._monitor, name) for name in self._buffers))

    async def release_all(self) -> None:
        """Release all output, also if another process held it."""
        names = await commands.query_objects(self._monitor)
        mine = [name for name in names if name.startswith((_BRIEF, _TRIAL))]
        await asyncio.gather(*(commands.object_del(self._monitor, name) for name in mine))


class StaysPaused:
    """In place of a hold: the guest stays paused until its output may leave.

    Where QEMU's filters cannot be used: a domain's back ends are libvirt's, and may be vhost's.
    """

    pauses_guest = True

    def begin(self) -> list[Coroutine[Any, Any, None]]:
        """There is nothing to hold."""
        return []

    async def release(self) -> None:
        """The guest is resumed by who paused it."""

    async def release_all(self) -> None:
        """The guest is resumed by who paused it."""


async def try_hold(monitor: Monitor, netdevs: Sequence[str]) -> None:
    """Make buffers that hold nothing, and remove them, beside any that do.

    Raises CommandRefusedError: QEMU does not filter such a back end, e.g. because the kernel serves
    it (vhost).
    """
    values = {"queue": _OF_GUEST, "interval": _INTERVAL_US, "status": "off"}
    for number, netdev in enumerate(netdevs):
        name = f"{_TRIAL}{os.getpid()}-{number}"
        await commands.object_add(monitor, "filter-buffer", name, {"netdev": netdev, **values})
        await commands.object_del(monitor, name)


def brief_holds(netdevs: Sequence[str]) -> list[str]:
    """The names of a brief hold's buffers."""
    return [_named(_BRIEF, netdev) for netdev in netdevs]


def _named(prefix: str, netdev: str) -> str:
    """An object's name. QEMU's own names of back ends ("#net1") have characters that it refuses."""
    return prefix + re.sub(r"[^A-Za-z0-9._-]", "", netdev)


async def holds_output(monitor: Monitor) -> list[str]:
    """The network back ends whose output a protection holds, or held when it died, as they are
    named in its objects.
    """
    names = await commands.query_objects(monitor)
    # A process that died while it made or removed them has left some of the three.
    held = [
        name.removeprefix(prefix)
        for prefix in (_GATE, _OUTER, _INNER)
        for name in names
        if name.startswith(prefix)
    ]
    return [*dict.fromkeys(held)]
