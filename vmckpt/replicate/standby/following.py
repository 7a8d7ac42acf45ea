"""What the standby receives from its primary: epochs, which it applies and acknowledges, and its
end.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from vmckpt.epoch.migrated import MOST_STATE_BYTES
from vmckpt.errors import HostDownError, StorageError, VmckptError
from vmckpt.lease.clock import boottime_s
from vmckpt.preflight.replication.memory import epoch_room_bytes
from vmckpt.replicate.channel import ALONE, Channel
from vmckpt.replicate.paths import SecondPath
from vmckpt.replicate.standby.replica import Replica, ram_pages
from vmckpt.replicate.wire.epoch import Assembler, ReceivedEpoch
from vmckpt.replicate.wire.errors import protocol_violation
from vmckpt.replicate.wire.frames import FrameHead, FrameKind
from vmckpt.replicate.wire.messages import (
    Failure,
    Hello,
    Welcome,
    decode_failure,
    decode_hello,
    encode_digests,
)
from vmckpt.replicate.wire.sections import Packer
from vmckpt.sequence.steps import finish

# Raises if this standby could not take over from a primary that has a term.
Try = Callable[[Hello, int], Coroutine[Any, Any, None]]
# The connection ended without a last word.
LOST = "lost"
# How often to check the progress on an epoch, and for how long work without progress (a write that
# hangs) still counts as work.
CHECK_S, WORK_S = 0.25, 10.0


class Following:
    """One primary, heard over `channel`. `why` says how it ended, `is_lost`: without a last word.

    `epoch_s`: when its last epoch was applied, by `clock.boottime_s`.
    """

    def __init__(self, name: str, replica: Replica, try_means: Try, second: SecondPath) -> None:
        self._name, self._replica, self._try_means = name, replica, try_means
        self.second = second
        self._assembler: Assembler | None = None
        self._channel: Channel | None = None
        self._began_s = boottime_s()
        self.hello: Hello | None = None
        self.epoch_s = self._began_s
        self.term = 0
        self.why = ""
        self.is_lost = False
        self._telling: asyncio.Task[None] | None = None
        # How often work was seen in progress.
        self._seen_working = 0

    @property
    def heard_s(self) -> float:
        """When anything last arrived over the connection, by `clock.boottime_s`."""
        return self._channel.heard_s if self._channel else self._began_s

    def heard_by_path_s(self) -> tuple[float, ...]:
        """Like `heard_s`, for each path over which anything has arrived."""
        second_s = self.second.heard_s
        return (self.heard_s,) if second_s is None else (self.heard_s, second_s)

    @property
    def received_bytes(self) -> int:
        """All bytes received."""
        return self._channel.received_bytes if self._channel else 0

    def _written_bytes(self) -> int:
        return self._replica.written_bytes + self._replica.disks.applied_bytes

    def _progress(self) -> int:
        return self._written_bytes() + self._seen_working

    async def receive(self, channel: Channel) -> str:
        """Receive epochs until the connection ends; the last word (see `channel`), or LOST."""
        self._channel, channel.progress = channel, self._progress
        beating = asyncio.ensure_future(channel.beat())
        try:
            return await self._receive(channel)
        finally:
            others = [beating, *([self._telling] if self._telling else [])]
            for other in others:
                other.cancel()
            await asyncio.gather(*others, return_exceptions=True)

    async def _receive(self, channel: Channel) -> str:
        try:
            while True:
                head, payload = await channel.receive()
                self.term = channel.inbound.highest_term = channel.outbound.term = head.term
                if head.kind is FrameKind.FAILURE:
                    failure = decode_failure(payload)
                    self.why = f"{failure.what}: {failure.why}"
                    return failure.kind
                await self._take(channel, head, payload)
        except HostDownError as exc:
            self.why, self.is_lost = exc.why, True
            return LOST
        except VmckptError as exc:
            # What arrived, or the replica, cannot be trusted: tell the primary, which continues
            # alone. This standby no longer takes over.
            self.why = f"{exc.what}: {exc.why}"
            with suppress(HostDownError):
                await channel.fail(Failure(exc.kind, exc.what, exc.why, exc.remedy))
            return ALONE

    async def _work(self, channel: Channel, work: Coroutine[Any, Any, None]) -> None:
        """Do `work`; meanwhile neither this side nor the primary, which waits for it, counts as
        silent.

        Raises what `work` does.
        """
        working = asyncio.ensure_future(work)
        written_bytes, written_s = self._written_bytes(), boottime_s()
        try:
            while not working.done():
                if self._written_bytes() > written_bytes:
                    written_bytes, written_s = self._written_bytes(), boottime_s()
                if boottime_s() - written_s < WORK_S:
                    self._seen_working += 1
                    channel.heard_s = boottime_s()
                await asyncio.wait({working}, timeout=CHECK_S)
            working.result()
        finally:
            working.cancel()
            await finish(asyncio.wait({working}))

    async def _tell(self, channel: Channel) -> None:
        """Report what the copies of the disks hold, while heartbeats continue."""
        packer = Packer()
        with suppress(HostDownError):  # the receiver raises it too
            try:
                async for digests in self._replica.disks.digests():
                    payload = encode_digests(digests, packer)
                    await channel.send(channel.outbound.frame(FrameKind.DIGESTS, 0, payload))
            except StorageError as exc:
                await channel.fail(Failure(exc.kind, exc.what, exc.why, exc.remedy))

    async def _safe(self, epoch: ReceivedEpoch) -> None:
        """Make the epoch the one from which a guest would continue.

        Raises StorageError, DamagedError.
        """
        disks = self._replica.disks
        if not (disks.is_idle and disks.is_sound) or epoch.writes:
            await disks.ready_for(epoch.writes)
        await self._replica.apply(epoch)

    async def _take(self, channel: Channel, head: FrameHead, payload: memoryview) -> None:
        if head.kind is FrameKind.HELLO:
            if self.hello is not None:
                raise protocol_violation(f"{head} comes twice", "a primary identifies itself once")
            self.hello = decode_hello(payload)
            self.second.begin(self.hello.heartbeat_port)
            await self._work(channel, self._try_means(self.hello, self.term))
            pages = ram_pages(self.hello.ram_bytes)
            self._replica.require_same(self.hello.ram_bytes)
            self._replica.disks.require_same(self.hello.disks)
            self._assembler = Assembler(
                pages,
                self.hello.disks,
                last=self._replica.epoch,
                most_bytes=epoch_room_bytes(self.hello.ram_bytes, has_disks=bool(self.hello.disks)),
                most_state_bytes=MOST_STATE_BYTES,
            )
            welcome = Welcome(self._name, self._replica.epoch or None, self.second.port)
            await channel.send(channel.outbound.frame(FrameKind.WELCOME, 0, welcome.encode()))
            self._telling = asyncio.ensure_future(self._tell(channel))
        elif head.kind is not FrameKind.HEARTBEAT and self._assembler is not None:
            epoch = self._assembler.take(head, payload)
            if epoch is not None:
                await self._work(channel, self._safe(epoch))
                self.epoch_s = boottime_s()
                # A primary that reads nothing is lost before answers to it fill the memory.
                await channel.send(channel.outbound.frame(FrameKind.ACK, epoch.number, []))
