"""ARP probes of a guest from its host: any guest with an IPv4 address answers while it runs.

Frames by RFC 826 and 5227. `Echoes` is arithmetic; `watch` needs CAP_NET_RAW.
"""

import errno
import math
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from typing import NamedTuple

EVERY_S = 0.005
# Of a silence that counts in `silent_ms`, as for heartbeats.
LONG_NS = 20 * 10**6
# How long to wait for the first reply after the end.
LAST_S = 2.0
_ETHERTYPE = 0x0806
_HEADER = struct.Struct("!6s6sH")
_ARP = struct.Struct("!HHBBH6s4s6s4s")
_ETHERNET_IPV4 = (1, 0x0800, 6, 4)
_REQUEST, _REPLY = 1, 2
_NOBODY = bytes(4)
_FRAME_BYTES = 128
_TIMESPEC = struct.Struct("@ll")
_SO_TIMESTAMPNS = 35


class EchoFigures(NamedTuple):
    """Answers counted, unanswered probes, the longest silence and the sum of those over 20 ms.

    `too_short_ms`: by how much the longest one may be too short.
    """

    received: int
    lost: int
    longest_gap_ms: float
    silent_ms: float
    too_short_ms: float


@dataclass(slots=True)
class Echoes:
    """Silences from the times of probes and answers, ns on one clock.

    A silence begins with the first probe after an answer, not with that answer: what delays the
    sender is not counted. It is too long by at most the time of an answer, too short by at most the
    time between that probe and the one before: EVERY_S, or more on a busy host. Before the first
    answer there is no silence: nothing tells when it would have begun.
    """

    received: int = 0
    lost: int = 0
    longest_ns: int = 0
    silent_ns: int = 0
    too_short_ns: int = 0
    waiting: list[int] = field(default_factory=list)
    answered: int | None = None

    def sent(self, at_ns: int) -> None:
        """A probe was sent."""
        self.waiting.append(at_ns)

    def heard(self, at_ns: int) -> None:
        """The guest answered; a second answer to the same probes is ignored."""
        if not self.waiting:
            return
        self.received += 1
        self.lost += len(self.waiting) - 1
        self._ended(at_ns)
        self.answered = self.waiting[-1]
        self.waiting.clear()

    def figures(self, until_ns: int) -> EchoFigures:
        """The figures of a window that ends now; a silence that has not ended counts."""
        if self.waiting:
            self.lost += len(self.waiting)
            self._ended(until_ns)
        in_ms = (self.longest_ns / 1e6, self.silent_ns / 1e6, self.too_short_ns / 1e6)
        return EchoFigures(self.received, self.lost, *in_ms)

    def _ended(self, at_ns: int) -> None:
        if self.answered is None:
            return
        gap_ns = max(at_ns - self.waiting[0], 0)
        if gap_ns > self.longest_ns:
            self.longest_ns = gap_ns
            self.too_short_ns = self.waiting[0] - self.answered
        if gap_ns > LONG_NS:
            self.silent_ns += gap_ns


def probe(mine: bytes, theirs: bytes, address: IPv4Address) -> bytes:
    """A request for the guest's address, sent to the guest alone, from no address."""
    body = _ARP.pack(*_ETHERNET_IPV4, _REQUEST, mine, _NOBODY, bytes(6), address.packed)
    return _HEADER.pack(theirs, mine, _ETHERTYPE) + body


def answers(frame: bytes, mine: bytes, theirs: bytes, address: IPv4Address) -> bool:
    """Whether a frame is the guest's answer to `probe`."""
    if len(frame) < _HEADER.size + _ARP.size:
        return False
    if _HEADER.unpack_from(frame)[2] != _ETHERTYPE:
        return False
    *kind, operation, sender, says, target, _ = _ARP.unpack_from(frame, _HEADER.size)
    return (
        tuple(kind) == _ETHERNET_IPV4
        and operation == _REPLY
        and (sender, says, target) == (theirs, address.packed, mine)
    )


def watch(
    interface: str, theirs: bytes, address: IPv4Address, go_on: Callable[[int], bool]
) -> EchoFigures:
    """Probe until `go_on` is false and one answer came after that.

    `go_on` is called after each probe, with the number of answers until then. Raises OSError, also
    if the guest does not answer then: it has left this network, or never was on it.
    """
    with _opened(interface) as sock:
        mine: bytes = sock.getsockname()[4]
        request, echoes = probe(mine, theirs, address), Echoes()
        next_s, until_s, enough = time.monotonic(), math.inf, math.inf
        while time.monotonic() < until_s and echoes.received < enough:
            echoes.sent(time.clock_gettime_ns(time.CLOCK_REALTIME))
            sock.send(request)
            next_s = max(next_s + EVERY_S, time.monotonic())
            while (left_s := next_s - time.monotonic()) > 0:
                if select.select([sock], [], [], left_s)[0]:
                    for frame, at_ns in _frames(sock):
                        if answers(frame, mine, theirs, address):
                            echoes.heard(at_ns)
            if enough == math.inf and not go_on(echoes.received):
                patience_s = LAST_S if echoes.received else 0.0
                until_s, enough = time.monotonic() + patience_s, echoes.received + 1
        if echoes.received < enough:
            raise TimeoutError(errno.ETIMEDOUT, "the guest does not answer on its source's network")
        return echoes.figures(time.clock_gettime_ns(time.CLOCK_REALTIME))


@contextmanager
def _opened(interface: str) -> Iterator[socket.socket]:
    kind = socket.SOCK_RAW | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
    with socket.socket(socket.AF_PACKET, kind, socket.htons(_ETHERTYPE)) as sock:
        sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        sock.bind((interface, _ETHERTYPE))
        yield sock


def _frames(sock: socket.socket) -> Iterator[tuple[bytes, int]]:
    """The frames that have arrived, with the kernel's time of each."""
    while True:
        try:
            frame, ancillary, *_ = sock.recvmsg(
                _FRAME_BYTES, socket.CMSG_SPACE(_TIMESPEC.size), socket.MSG_DONTWAIT
            )
        except BlockingIOError:
            return
        at_ns = time.clock_gettime_ns(time.CLOCK_REALTIME)
        for _, kind, data in ancillary:
            if kind == _SO_TIMESTAMPNS:
                seconds, ns = _TIMESPEC.unpack(data)
                at_ns = seconds * 10**9 + ns
        yield frame, at_ns
