"""The protocol between a group's head and a member: lines of JSON, both ways.

Each side sends at least a heartbeat every second. Silence means that the other side is gone, so
neither waits for it for long.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

from vmckpt.codec import convert
from vmckpt.errors import OperationFailedError
from vmckpt.foreign import parse

BEAT_S, SILENT_S = 1.0, 10.0
MOST_LINE_BYTES = 1 << 20
_BEAT = "beat"


class LineMessage(NamedTuple):
    """A word and its parameters."""

    word: str
    more: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Worded:
    word: str


class LineWriter(Protocol):
    """The part of `asyncio.StreamWriter` that is used."""

    def write(self, data: bytes) -> None:
        """Queue data without waiting."""

    def close(self) -> None:
        """Close the stream."""


class Line:
    """One end of the line. `label` names the other end, for errors."""

    def __init__(self, reader: asyncio.StreamReader, writer: LineWriter, label: str) -> None:
        self._reader, self._writer, self.label = reader, writer, label

    def send(self, word: str, **more: Any) -> None:
        """Send it, without confirmation."""
        self._writer.write(json.dumps({"word": word, **more}).encode() + b"\n")

    async def receive(self, within_s: float | None = None) -> LineMessage:
        """The next word. Raises OperationFailedError if the other end is gone or silent.

        Raises TimeoutError if it sends only heartbeats for `within_s`.
        """
        now_s = asyncio.get_running_loop().time
        due_s = None if within_s is None else now_s() + within_s
        while True:
            left_s = SILENT_S if due_s is None else due_s - now_s()
            message = await self._next(min(left_s, SILENT_S))
            if message is not None and message.word != _BEAT:
                return message
            if message is None and left_s < SILENT_S:
                raise TimeoutError
            if message is None:
                raise self._gone(f"it said nothing for {SILENT_S:g} s")

    async def _next(self, within_s: float) -> LineMessage | None:
        try:
            async with asyncio.timeout(within_s):
                line = await self._reader.readline()
            if line.endswith(b"\n"):
                more = parse(line, most_bytes=MOST_LINE_BYTES)
                word = convert(_Worded, more).word
                del more["word"]
                return LineMessage(word, more)
        except TimeoutError:
            return None
        except (OSError, ValueError) as exc:
            raise self._gone(str(exc)) from exc
        raise self._gone("its connection was closed")

    def _gone(self, why: str) -> OperationFailedError:
        return given_up(f"{self.label}: {why}")

    @asynccontextmanager
    async def beating(self) -> AsyncIterator[Self]:
        """Send heartbeats during the block; then close the line."""

        async def beat() -> None:
            while True:
                self.send(_BEAT)
                await asyncio.sleep(BEAT_S)

        task = asyncio.ensure_future(beat())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.wait({task})
            with suppress(OSError):
                self._writer.close()


def given_up(why: str) -> OperationFailedError:
    """The error of a group's checkpoint or restore that was aborted."""
    return OperationFailedError(
        "the group was aborted: nothing was done",
        why=why,
        remedy="try again; `vmckpt vm list` shows the state of its VMs",
    )
