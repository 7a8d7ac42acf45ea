"""Detects when a guest fell silent, from the arrival times of its heartbeats.

A stopped guest's clock stops with it, so silence is measured here, outside the guest, by the
kernel's receive timestamps (SO_TIMESTAMPNS): scheduling of this process does not change them.

Run as `python -m vmckpt.lab.heartbeats --bind 10.77.0.254:7700 --socket PATH`. One JSON request
per line on the unix socket, `{"id": 7, "since_ns": ..., "until_ns": ...}` (CLOCK_MONOTONIC of this
machine; `until_ns` may be left out: now), one JSON line back: the fields of Silence, or
`{"error": "..."}`; for an id never heard `{"received": 0}`. The last 15 minutes are kept.
"""

import argparse
import json
import os
import selectors
import socket
import struct
import sys
import time
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict

from vmckpt.lab.silence import GuestSilence, summarise

# Little endian: magic, id, sequence number, the guest's CLOCK_MONOTONIC in ns, reserved.
_DATAGRAM = struct.Struct("<4sIQQQ")
_MAGIC = b"VKHB"
_TIMESPEC = struct.Struct("@ll")
# asm-generic/socket.h; Python's socket module does not name them.
_SO_RCVBUFFORCE, _SO_TIMESTAMPNS, _SO_RXQ_OVFL = 33, 35, 40
_ANCILLARY_BYTES = socket.CMSG_SPACE(_TIMESPEC.size) + socket.CMSG_SPACE(4)

_KEPT_NS = 15 * 60 * 10**9
_MAX_GUESTS = 256
_CHUNK_BEATS = 4096
# At 1 kHz a beat takes about 0.8 kB of this, so three guests have two seconds of slack.
_RECEIVE_BUFFER_BYTES = 4 << 20
_DRAIN_INTERVAL_S = 0.02
_CLOCK_READINGS = 3
_REQUEST_MAX_BYTES = 4096
_REPLY_TIMEOUT_S = 1.0


class Beats:
    """One guest's heartbeats, 16 bytes each, in order of arrival."""

    __slots__ = ("_chunks",)

    def __init__(self) -> None:
        self._chunks: deque[tuple[array[int], array[int]]] = deque()

    def add(self, arrival_ns: int, sequence_number: int) -> None:
        """Keep one beat; forget those that are older than the time kept."""
        if not self._chunks or len(self._chunks[-1][0]) >= _CHUNK_BEATS:
            self._chunks.append((array("q"), array("Q")))
            while self._chunks[0][0] and self._chunks[0][0][-1] < arrival_ns - _KEPT_NS:
                self._chunks.popleft()
        arrivals, numbers = self._chunks[-1]
        arrivals.append(arrival_ns)
        numbers.append(sequence_number)

    def silence(self, since_ns: int, until_ns: int, *, dropped: int) -> GuestSilence:
        """The heartbeats received within [since_ns, until_ns]."""
        arrivals, numbers, heard_before = array("q"), array("Q"), False
        for chunk_arrivals, chunk_numbers in self._chunks:
            heard_before = heard_before or chunk_arrivals[0] < since_ns
            start = bisect_left(chunk_arrivals, since_ns)
            end = bisect_right(chunk_arrivals, until_ns)
            arrivals += chunk_arrivals[start:end]
            numbers += chunk_numbers[start:end]
        return summarise(
            arrivals, numbers, since_ns, until_ns, heard_before=heard_before, dropped=dropped
        )


class Receiver:
    """The UDP socket and the heartbeats received on it."""

    def __init__(self, address: str, port: int) -> None:
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            self.udp.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _RECEIVE_BUFFER_BYTES)
        except PermissionError:  # not root: as much as net.core.rmem_max allows
            self.udp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
        self.udp.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        self.udp.setsockopt(socket.SOL_SOCKET, _SO_RXQ_OVFL, 1)
        self.udp.bind((address, port))
        self._guests: dict[int, Beats] = {}
        self._dropped = 0

    def drain(self) -> int:
        """Read what has arrived; return the number of datagrams."""
        # The timestamps are CLOCK_REALTIME, which an administrator or NTP may set: read the offset
        # each time.
        monotonic_offset_ns = _monotonic_offset_ns()
        count = 0
        while True:
            try:
                data, ancillary, _, _ = self.udp.recvmsg(64, _ANCILLARY_BYTES)
            except BlockingIOError:
                return count
            count += 1
            stamp_ns = 0
            for _, kind, payload in ancillary:
                if kind == _SO_TIMESTAMPNS:
                    seconds, nanoseconds = _TIMESPEC.unpack(payload)
                    stamp_ns = seconds * 10**9 + nanoseconds
                elif kind == _SO_RXQ_OVFL:
                    self._dropped = int.from_bytes(payload, sys.byteorder)
            if len(data) == _DATAGRAM.size:
                self._keep(data, stamp_ns + monotonic_offset_ns)

    def _keep(self, data: bytes, arrival_ns: int) -> None:
        magic, guest, number, _, _ = _DATAGRAM.unpack(data)
        beats = self._guests.get(guest)
        if beats is None and magic == _MAGIC and len(self._guests) < _MAX_GUESTS:
            beats = self._guests[guest] = Beats()
        if beats is not None and magic == _MAGIC:
            beats.add(arrival_ns, number)

    def answer(self, line: bytes) -> dict[str, object]:
        """The reply to one request line, including everything that has arrived by now."""
        self.drain()
        return answer(self._guests, line, self._dropped)


def _monotonic_offset_ns() -> int:
    """CLOCK_MONOTONIC minus CLOCK_REALTIME, accurate to half of the shortest of a few readings.

    A single reading is wrong by the time for which this process was preempted during it.
    """
    readings = []
    for _ in range(_CLOCK_READINGS):
        before_ns, real_ns, after_ns = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        readings.append((after_ns - before_ns, (before_ns + after_ns) // 2 - real_ns))
    return min(readings)[1]


def answer(guests: Mapping[int, Beats], line: bytes, dropped: int) -> dict[str, object]:
    """The reply to one request line; a malformed request is answered, not raised."""
    try:
        request = json.loads(line)
        guest, since_ns = int(request["id"]), int(request["since_ns"])
        now_ns = time.monotonic_ns()
        until_ns = min(int(request.get("until_ns") or now_ns), now_ns)
    except (ValueError, TypeError, KeyError, AttributeError) as exc:
        return {"error": f"{type(exc).__name__}: {exc}"}
    beats = guests.get(guest)
    if beats is None:
        return {"received": 0}
    return asdict(beats.silence(since_ns, until_ns, dropped=dropped))


def serve(receiver: Receiver, listener: socket.socket) -> None:
    """Receive and answer until killed.

    While heartbeats arrive, the datagram socket is not waited for but emptied every 20 ms, so that
    this process does not wake a thousand times a second; without heartbeats, nothing wakes it.
    """
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    buffers: dict[socket.socket, bytearray] = {}
    watching = False
    while True:
        idle = receiver.drain() == 0
        if idle != watching:
            if idle:
                selector.register(receiver.udp, selectors.EVENT_READ)
            else:
                selector.unregister(receiver.udp)
            watching = idle
        for key, _ in selector.select(None if idle else _DRAIN_INTERVAL_S):
            if key.fileobj is listener:
                client, _ = listener.accept()
                client.settimeout(_REPLY_TIMEOUT_S)
                buffers[client] = bytearray()
                selector.register(client, selectors.EVENT_READ)
            elif isinstance(key.fileobj, socket.socket) and key.fileobj in buffers:
                client = key.fileobj
                if not _talk(receiver, client, buffers[client]):
                    selector.unregister(client)
                    del buffers[client]
                    client.close()


def _talk(receiver: Receiver, client: socket.socket, buffer: bytearray) -> bool:
    """Answer the complete lines that a client has sent; False if the connection is to be closed."""
    try:
        data = client.recv(_REQUEST_MAX_BYTES)
        buffer += data
        while b"\n" in buffer:
            line, _, rest = bytes(buffer).partition(b"\n")
            buffer[:] = rest
            client.sendall(json.dumps(receiver.answer(line)).encode() + b"\n")
    except OSError:  # the client disconnected, or does not read
        return False
    return bool(data) and len(buffer) < _REQUEST_MAX_BYTES


def main() -> int:
    """Bind both sockets, then serve until killed."""
    parser = argparse.ArgumentParser(description="Receives heartbeats, answers about silences.")
    parser.add_argument("--bind", required=True, metavar="ADDRESS:PORT")
    parser.add_argument("--socket", required=True, metavar="PATH")
    options = parser.parse_args()
    address, _, port = options.bind.rpartition(":")
    os.umask(0o177)
    receiver = Receiver(address, int(port))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(options.socket)
    listener.listen(16)
    serve(receiver, listener)
    return 0


if __name__ == "__main__":
    sys.exit(main())
