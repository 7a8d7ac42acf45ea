"""Guest-visible downtime, from a host's observer: a guest's own clock stops with the guest."""

import asyncio
import json
from typing import NamedTuple, TypedDict

from vmckpt.codec import convert
from vmckpt.errors import HostDownError
from vmckpt.foreign import parse
from vmckpt.hosts.host import Host


class Silence(NamedTuple):
    """Heartbeats of one guest that arrived in a window of this machine's monotonic clock.

    `too_short_ms`: by how much the longest gap may be too short, if that is known.
    """

    received: int
    lost: int
    longest_gap_ms: float
    silent_ms: float
    last_ns: int
    too_short_ms: float | None = None


class _Reply(TypedDict, total=False):
    """An observer's answer; the last number of a gap is its length."""

    received: int
    lost: int
    last_ns: int | None
    longest_gap_ms: float
    gaps_over_20ms: tuple[tuple[float, ...], ...]


async def silence(host: Host, guest_id: int, since_ns: int, until_ns: int) -> Silence | None:
    """The silence of guest `guest_id` between two CLOCK_MONOTONIC instants.

    `longest_gap_ms` is the longest time between two arrivals, `silent_ms` the sum of all gaps over
    20 ms, `last_ns` the last arrival. None if the host has no observer, or it heard nothing of that
    guest.
    """
    if host.heartbeats is None:
        return None
    try:
        async with asyncio.timeout(2.0):
            sock = await host.connect(host.heartbeats)
            reader, writer = await asyncio.open_unix_connection(sock=sock)
            question = {"id": guest_id, "since_ns": since_ns, "until_ns": until_ns}
            try:
                writer.write(json.dumps(question).encode() + b"\n")
                reply = convert(_Reply, parse(await reader.readline()))
            finally:
                writer.close()
    except (OSError, ValueError, TimeoutError, HostDownError) as exc:
        raise HostDownError(
            f"the heartbeat observer of {host.name} does not answer",
            why=str(exc) or type(exc).__name__,
            remedy="guest-visible downtime is unknown; see `vmckpt lab status`",
        ) from exc
    if not (received := reply.get("received", 0)):
        return None
    silent_ms = sum(gap[-1] for gap in reply.get("gaps_over_20ms", ()) if gap)
    longest_gap_ms, last_ns = reply.get("longest_gap_ms", 0.0), reply.get("last_ns") or 0
    return Silence(received, reply.get("lost", 0), longest_gap_ms, silent_ms, last_ns)
