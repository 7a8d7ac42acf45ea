"""Hold QEMU back from stopping the guest while the destination is still busy.

QEMU stops the guest when the rest fits `downtime-limit` at the speed of its last 0.1 s. A page of
zeroes is nine bytes in the sockets and a page fault on the destination, so at the end of the first
pass the destination may have a second of work left, during which the guest would be stopped. QEMU
>= 8.2 accepts another value for the speed: `avail-switchover-bandwidth`.

That does not hold QEMU if it finds nothing dirty at all. Over several channels, whose threads do
the sending, its rounds take less than a millisecond, and a guest that writes little has often
written nothing within one. So there the source is also kept from sending while the destination has
much to catch up with: it sleeps, and queries dirty pages ten times a second.
"""

import asyncio
import time
from collections import deque
from typing import NamedTuple

from vmckpt.errors import HostDownError
from vmckpt.forecast.model.switchover import SentSample, behind_s, switchover_bytes_per_s
from vmckpt.hosts.host import Host
from vmckpt.hosts.processes.process import ProcessId
from vmckpt.options.migration import MigrationOptions
from vmckpt.qemu import commands
from vmckpt.qemu.abilities import HELD_BYTES_PER_S, SENDING_SPEED, SWITCHOVER_SPEED, Agreement
from vmckpt.qemu.monitor import Monitor
from vmckpt.qemu.replies import MigrationStatus
from vmckpt.sequence.steps import both

# How often to poll the destination once it is the only thing to wait for.
WAIT_S = 0.01
# A host that takes longer to answer is queried in the background.
ANSWER_S = 0.2
KEPT_EVERY_S = 0.05
KEPT_SAMPLES = 100
# In the second pass all memory has been sent once.
WHOLE_SENT_PASS = 2
# A smaller relative change of the speed does not justify a command.
SAME_WITHIN = 0.2
# A source that may send again first sleeps until its 0.1 s are over: hold it while the destination
# is further behind than the first value, and release it before the destination runs out of work.
FAR_BEHIND_S, NEARLY_THERE_S = 0.1, 0.05
# A page in 0.1 s, even for lower values; 0 would mean no limit.
STILL_BYTES_PER_S = 1000


class Socketed(NamedTuple):
    """A QEMU with observable sockets: its process, and its host."""

    host: Host
    process: ProcessId


def switchover(
    monitor: Monitor,
    ends: tuple[Socketed, Socketed],
    port: int,
    options: MigrationOptions,
    set_to: Agreement,
) -> "Switchover | None":
    """The object that holds back a source set so; None for one that uses its own measurement.

    `ends` are the source, to which `monitor` belongs, and the destination.
    """
    if not set_to.source_parameters.get(SWITCHOVER_SPEED):
        return None
    return Switchover(
        monitor,
        source=ends[0],
        destination=ends[1],
        port=port,
        max_downtime_s=options.max_downtime_ms / 1e3,
        limit_bytes_per_s=set_to.source_parameters[SENDING_SPEED],
        quick_rounds=options.requested_channels is not None,
    )


class Switchover:
    """Lets the source of a pre-copy stop its guest once the destination keeps up.

    `port` is the migration's incoming port, `limit_bytes_per_s` the bandwidth limit of memory (0:
    none). `quick_rounds`: it uses several channels.
    """

    def __init__(
        self,
        monitor: Monitor,
        *,
        source: Socketed,
        destination: Socketed,
        port: int,
        max_downtime_s: float,
        limit_bytes_per_s: int = 0,
        quick_rounds: bool = False,
    ) -> None:
        self._monitor, self._max_downtime_s = monitor, max_downtime_s
        self._limit_bytes_per_s, self._quick_rounds = limit_bytes_per_s, quick_rounds
        self._source, self._destination, self._port = source, destination, port
        self._samples: deque[SentSample] = deque(maxlen=KEPT_SAMPLES)
        self._first_pass_bytes: int | None = None
        self._given_bytes_per_s = float(HELD_BYTES_PER_S)
        self._over = self._still = False
        self._asking: asyncio.Task[int] | None = None

    async def consider(self, status: MigrationStatus) -> None:
        """Examine the sockets, and give QEMU a speed once the destination is ready for the
        switchover.
        """
        if self._over or status.status != "active":
            return
        if self._first_pass_bytes is None and status.round >= WHOLE_SENT_PASS:
            self._first_pass_bytes = status.transferred_bytes
            if self._quick_rounds and behind_s(self._samples) > FAR_BEHIND_S:
                self._still = True
                await self._send_at(STILL_BYTES_PER_S)
        if self._samples and time.monotonic() < self._samples[-1].at_s + WAIT_S:
            return
        queued = await self._queued()
        if queued is None:
            return
        now = SentSample(time.monotonic(), status.transferred_bytes, queued)
        samples = (*self._samples, now)
        if not self._samples or now.at_s >= self._samples[-1].at_s + KEPT_EVERY_S:
            self._samples.append(now)
        if self._first_pass_bytes is None:
            return
        if self._still and behind_s(samples) < NEARLY_THERE_S:
            await self._go_on()
        speed = switchover_bytes_per_s(
            samples, self._first_pass_bytes, self._max_downtime_s, self._limit_bytes_per_s
        )
        if speed and abs(speed / self._given_bytes_per_s - 1) > SAME_WITHIN:
            await self._give(speed)

    @property
    def all_sent_once(self) -> bool:
        """Whether rounds are short from now on: only pages dirtied since the last one."""
        return self._first_pass_bytes is not None

    @property
    def waits(self) -> bool:
        """Whether all has been sent once, and only the destination's reading of it is waited
        for.
        """
        return self.all_sent_once and self.held

    @property
    def held(self) -> bool:
        """Whether the source is still held back."""
        return not self._over and self._given_bytes_per_s == HELD_BYTES_PER_S

    @property
    def fitting_bytes(self) -> float:
        """How much may be left when the guest is stopped."""
        return 0.0 if self.held else self._given_bytes_per_s * self._max_downtime_s

    def allow(self, max_downtime_s: float) -> None:
        """Allow this downtime from now on."""
        self._max_downtime_s = max_downtime_s

    async def hold_to(self, limit_bytes_per_s: int) -> None:
        """Limit the bandwidth of memory from now on; 0: no limit."""
        self._limit_bytes_per_s = limit_bytes_per_s
        if not self._still:
            await self._send_at(limit_bytes_per_s)

    async def now(self) -> None:
        """From now on let QEMU stop the guest by its own measurement."""
        self._over = True
        await self._give(0)
        if self._still:
            await self._go_on()

    async def _go_on(self) -> None:
        self._still = False
        await self._send_at(self._limit_bytes_per_s)

    async def _send_at(self, bytes_per_s: int) -> None:
        await commands.migrate_set_parameters(self._monitor, {SENDING_SPEED: bytes_per_s})

    async def _give(self, bytes_per_s: float) -> None:
        self._given_bytes_per_s = bytes_per_s
        await commands.migrate_set_parameters(self._monitor, {SWITCHOVER_SPEED: int(bytes_per_s)})

    async def close(self) -> None:
        """Stop watching."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    async def _queued(self) -> int | None:
        """The bytes queued in the sockets; None while a host answers slowly, or not at all.

        The transfer has other work meanwhile.
        """
        if self._asking is None:
            self._asking = asyncio.create_task(self._queued_bytes())
        done, _ = await asyncio.wait({self._asking}, timeout=ANSWER_S)
        if not done:
            return None
        options, self._asking = self._asking, None
        # A silent host is reported where its answer is needed.
        return None if isinstance(options.exception(), HostDownError) else options.result()

    async def _queued_bytes(self) -> int:
        sent, read = await both(
            self._source.host.socket_queues(self._source.process, self._port),
            self._destination.host.socket_queues(self._destination.process, self._port),
        )
        return sent.unsent_bytes + read.unread_bytes
