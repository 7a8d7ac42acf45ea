"""The primary's end of the connection: epochs out, acknowledgements in."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import numpy as np

from vmckpt.epoch.epoch import Pages
from vmckpt.errors import HostDownError, VmckptError
from vmckpt.lease.clock import boottime_s
from vmckpt.memory.ram_file import PAGE_BYTES, Span
from vmckpt.replicate.channel import PATIENCE_S, TAKEN, Channel, Frame
from vmckpt.replicate.primary.keeper import TermKeeper
from vmckpt.replicate.wire.epoch import Composer
from vmckpt.replicate.wire.errors import protocol_violation
from vmckpt.replicate.wire.frames import FrameHead, FrameKind
from vmckpt.replicate.wire.messages import (
    Begin,
    DiskWrite,
    Failure,
    Heartbeat,
    decode_failure,
    decode_heartbeat,
)
from vmckpt.replicate.wire.pages import Encoder, Numbers, Shadow, as_words

POLL_S = 0.1
TELLING_BYTES, _WEIGHT = 256 << 10, 0.2


class StandbyLostError(Exception):
    """The standby has gone, is silent, or has reported why it cannot continue."""


class LinkSpeed:
    """How fast epochs become safe: packing pays only if it is faster. Initially it does not pay."""

    def __init__(self) -> None:
        self.bytes_per_s = 0.0

    def took(self, sent_bytes: int, seconds: float) -> None:
        """An epoch of so many bytes was acknowledged after this time; small ones do not count."""
        if sent_bytes >= TELLING_BYTES and seconds > 0:
            self.bytes_per_s += _WEIGHT * (sent_bytes / seconds - self.bytes_per_s)


class EpochStream:
    """Epochs on their way to the standby, one at a time.

    `wake` is called when it is lost, `tell` with what it reports about its disks. `is_taken`: it
    has reported that the guest runs there. `why`: how it was lost; `is_reported`: in its own words.
    """

    def __init__(
        self,
        channel: Channel,
        keeper: TermKeeper,
        ram_bytes: int,
        wake: Callable[[], None],
        tell: Callable[[memoryview], None] | None = None,
    ) -> None:
        self._channel, self._keeper, self._wake = channel, keeper, wake
        self._composer = Composer(channel.outbound, Encoder(Shadow(ram_bytes // PAGE_BYTES)))
        self._tell = tell
        self._number = self._acknowledged = 0
        self._is_begun = False
        self._epoch_began_s, self._epoch_began_bytes, self._link = 0.0, 0, LinkSpeed()
        self._answered = asyncio.Condition()
        self.why = ""
        self.is_taken = self.is_reported = self._is_left = False

    @property
    def sent_bytes(self) -> int:
        """All bytes that were sent, as they were sent."""
        return self._channel.outbound.sent_bytes

    @property
    def is_lost(self) -> bool:
        """Whether the connection has ended without a last word from either side."""
        return bool(self.why) and not (self.is_reported or self._is_left)

    @property
    def heard_s(self) -> float:
        """When anything last arrived, by `clock.boottime_s`."""
        return self._channel.heard_s

    @property
    def next_number(self) -> int:
        """The number of the epoch that has begun, or of the next one."""
        return self._number if self._is_begun else self._number + 1

    async def pages(self, pages: Pages) -> None:
        """Send pages of the next epoch before its end; of a page sent twice the later counts."""
        await self._send(self._pages(pages))

    async def disks(self, writes: Sequence[DiskWrite]) -> None:
        """Send disk writes of the next epoch before its end."""
        if writes:
            await self._send(self._disks(writes))

    async def commit(
        self,
        pages: Pages,
        devices: tuple[bytes, bytes] | None = None,
        writes: Sequence[DiskWrite] = (),
    ) -> int:
        """Send the rest of the epoch and its end; its number. `devices`: their base and state."""
        await self._send(self._rest(pages, devices, writes))
        return self._number

    async def _send(self, frames: Iterator[Frame]) -> None:
        if self._keeper.unanswered_since_s is None:
            self._keeper.unanswered_since_s = boottime_s()
        await self._channel.send_all(frames)

    def _begin(self) -> Iterator[Frame]:
        if not self._is_begun:
            before, self._number, self._is_begun = self._number, self._number + 1, True
            self._epoch_began_s, self._epoch_began_bytes = boottime_s(), self.sent_bytes
            yield self._composer.begin(self._number, Begin(before, 0, 0))

    def _disks(self, writes: Sequence[DiskWrite]) -> Iterator[Frame]:
        yield from self._begin()
        yield from self._composer.disk(writes)

    def _pages(self, pages: Pages) -> Iterator[Frame]:
        yield from self._begin()
        if pages.spans:
            yield from self._composer.pages(numbers_of(pages.spans), as_words(pages.data))

    def _rest(
        self, pages: Pages, devices: tuple[bytes, bytes] | None, writes: Sequence[DiskWrite]
    ) -> Iterator[Frame]:
        yield from self._disks(writes)
        yield from self._pages(pages)
        if devices is not None:
            base, state = devices
            yield from self._composer.base(base)
            yield from self._composer.device(state)
        self._is_begun = False
        yield self._composer.commit()

    async def acknowledged(self, number: int) -> None:
        """Return when the standby has epoch `number`. Raises StandbyLostError."""
        async with self._answered:
            while self._acknowledged < number:
                if self.why:
                    raise StandbyLostError(self.why)
                if self._keeper.is_silent():
                    raise StandbyLostError("the standby is silent")
                with suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S):  # wait_for may lose a cancellation
                        await self._answered.wait()

    async def receive(self) -> None:
        """Process acknowledgements until the standby has gone; then raises StandbyLostError."""
        try:
            while True:
                head, payload = await self._channel.receive()
                if head.kind is FrameKind.FAILURE:
                    failure = decode_failure(payload)
                    self.is_reported, self.is_taken = True, failure.kind == TAKEN
                    raise StandbyLostError(f"{failure.what}: {failure.why}")
                if head.kind is FrameKind.ACK:
                    await self._note(head)
                elif head.kind is FrameKind.DIGESTS:
                    if self._tell is None:
                        raise protocol_violation(f"{head} comes unasked", "no disk is replicated")
                    self._tell(payload)
                elif head.kind is FrameKind.HEARTBEAT:
                    self._progress(decode_heartbeat(payload))
        except (VmckptError, StandbyLostError) as exc:
            async with self._answered:
                self.why = f"{exc.what}: {exc.why}" if isinstance(exc, VmckptError) else str(exc)
                self._answered.notify_all()
            self._wake()
            raise StandbyLostError(self.why) from exc

    async def _note(self, head: FrameHead) -> None:
        keeper, sent = self._keeper, self._number - self._is_begun
        if not self._acknowledged < head.epoch <= sent:
            raise protocol_violation(f"{head} comes unasked", f"epochs up to {sent} were sent")
        async with self._answered:
            self._acknowledged = keeper.acknowledged = head.epoch
            is_all = head.epoch == self._number and not self._is_begun
            if is_all:
                sent_bytes = self.sent_bytes - self._epoch_began_bytes
                self._link.took(sent_bytes, boottime_s() - self._epoch_began_s)
                self._composer.tell_link(self._link.bytes_per_s)
            keeper.unanswered_since_s = None if is_all else boottime_s()
            self._answered.notify_all()

    def _progress(self, message: Heartbeat) -> None:
        """A slow epoch does not count as silence while the standby takes some of it."""
        keeper, has_more = self._keeper, self._channel.has_taken(message)
        if has_more and keeper.unanswered_since_s is not None:
            is_open = self._is_begun and self._acknowledged == self._number - 1
            has_all = message.received_bytes == self.sent_bytes
            keeper.unanswered_since_s = None if is_open and has_all else boottime_s()

    async def beat(self) -> None:
        """Send heartbeats, however long an epoch is."""
        with suppress(HostDownError):  # the receiver raises it too
            await self._channel.beat()

    async def end(self, kind: str, why: str) -> None:
        """Say how the protection ends, if there is a listener. A standby that reads nothing, but
        reports progress, does not block this: the message may still reach it.
        """
        self._is_left = self._is_left or not self.why
        with suppress(HostDownError, TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                await self._channel.fail(Failure(kind, "the primary ends the protection", why, "-"))

    def abort(self) -> None:
        """End the connection at once."""
        self._channel.abort()


def numbers_of(spans: tuple[Span, ...]) -> Numbers:
    """The numbers of the pages in spans, in order."""
    firsts, ends = (np.array(spans, dtype=np.int64) // PAGE_BYTES).T
    lengths = ends - firsts
    return np.repeat(firsts - (np.cumsum(lengths) - lengths), lengths) + np.arange(lengths.sum())
