"""The primary's end of the connection: epochs out, acknowledgements in."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from vmckpt.epoch.epoch import Pages
from vmckpt.errors import HostDownError, VmckptError
from vmckpt.lease.clock import boottime_s
from vmckpt.memory.ram_file import PAGE_BYTES, Span
from vmckpt.replicate.channel import Channel
from vmckpt.replicate.keeper import Keeper
from vmckpt.replicate.wire.epoch import Composer
from vmckpt.replicate.wire.frames import Kind
from vmckpt.replicate.wire.messages import Begin, Failure, Heartbeat, decode_failure
from vmckpt.replicate.wire.pages import Encoder, Numbers, Shadow, as_words

HEARTBEAT_S, POLL_S = 0.5, 0.1


class StandbyLostError(Exception):
    """The standby has gone, is silent, or has said why it cannot go on."""


class Stream:
    """Epochs on their way to the standby, one at a time. `wake` is called when it is lost."""

    def __init__(
        self, channel: Channel, keeper: Keeper, ram_bytes: int, wake: Callable[[], None]
    ) -> None:
        self._channel, self._keeper, self._wake = channel, keeper, wake
        self._composer = Composer(channel.outbound, Encoder(Shadow(ram_bytes // PAGE_BYTES)))
        self._number = self._acknowledged = 0
        self._answered = asyncio.Condition()
        self._why = ""

    @property
    def sent_bytes(self) -> int:
        """All that was sent, as it was sent."""
        return self._channel.outbound.sent_bytes

    async def begin(self) -> int:
        """Begin the next epoch; its number."""
        begin = Begin(self._number, 0, 0)
        self._number += 1
        await self._channel.send(self._composer.begin(self._number, begin))
        return self._number

    async def pages(self, pages: Pages) -> None:
        """Pages of the epoch that has begun; of a page that comes twice the later one counts."""
        if pages.spans:
            contents = as_words(pages.data)
            await self._channel.send(*self._composer.pages(numbers_of(pages.spans), contents))

    async def commit(self, device_state: bytes = b"") -> None:
        """The end of the epoch."""
        await self._channel.send(*self._composer.device(device_state), self._composer.commit())

    async def acknowledged(self, number: int) -> None:
        """Return when the standby has epoch `number`. Raises StandbyLostError."""
        if self._acknowledged >= number:
            return
        self._keeper.unanswered_since_s = boottime_s()
        try:
            async with self._answered:
                while self._acknowledged < number:
                    if self._why:
                        raise StandbyLostError(self._why)
                    if self._keeper.is_silent():
                        raise StandbyLostError("the standby is silent")
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._answered.wait(), POLL_S)
        finally:
            self._keeper.unanswered_since_s = None

    async def receive(self) -> None:
        """Take acknowledgements until the standby has gone; then raises StandbyLostError."""
        try:
            while True:
                head, payload = await self._channel.receive()
                if head.kind is Kind.FAILURE:
                    failure = decode_failure(payload)
                    raise StandbyLostError(f"{failure.what}: {failure.why}")
                if head.kind is Kind.ACK:
                    async with self._answered:
                        self._acknowledged = self._keeper.acknowledged = head.epoch
                        self._answered.notify_all()
        except (VmckptError, StandbyLostError) as exc:
            async with self._answered:
                self._why = f"{exc.what}: {exc.why}" if isinstance(exc, VmckptError) else str(exc)
                self._answered.notify_all()
            self._wake()
            raise StandbyLostError(self._why) from exc

    async def beat(self) -> None:
        """Be heard, however long an epoch is."""
        with suppress(HostDownError):  # the receiver says so too
            while True:
                await asyncio.sleep(HEARTBEAT_S)
                beat = Heartbeat(time.monotonic_ns(), 0).encode()
                await self._channel.send(self._channel.outbound.frame(Kind.HEARTBEAT, 0, beat))

    async def end(self, kind: str, why: str) -> None:
        """Say how the protection ends, if anybody hears it."""
        with suppress(HostDownError):
            await self._channel.fail(Failure(kind, "the primary ends the protection", why, "-"))

    def abort(self) -> None:
        """End the connection at once."""
        self._channel.abort()


def numbers_of(spans: tuple[Span, ...]) -> Numbers:
    """The numbers of the pages in spans, in their order."""
    firsts, ends = (np.array(spans, dtype=np.int64) // PAGE_BYTES).T
    lengths = ends - firsts
    return np.repeat(firsts - (np.cumsum(lengths) - lengths), lengths) + np.arange(lengths.sum())
