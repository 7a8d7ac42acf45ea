"""The messages that test guests have sent to each other and received, at their checkpoints.

Each guest counts in one page of its memory (images/guest/talk.c), which a checkpoint contains like
any other.
"""

import socket
import struct
from collections.abc import Mapping
from typing import NamedTuple

MAGIC = b"VKTALK01"
PAGE_BYTES = 4096
_HEAD = struct.Struct("<8sII")
_PEER = struct.Struct("<4sIQQQQQ")


class Counts(NamedTuple):
    """The counts between a guest and one other: the last number each way, by UDP and by TCP.

    `wrong`: numbers over TCP that were not the next one.
    """

    udp_sent: int
    udp_heard: int
    tcp_sent: int
    tcp_heard: int
    wrong: int


class Violation(NamedTuple):
    """A message that a cut contains as received but not as sent."""

    said_by: str
    heard_by: str
    over: str
    said: int
    heard: int


def parse_page(page: bytes) -> Mapping[str, Counts]:
    """A guest's counts, by the address of the other guest."""
    _, _, room = _HEAD.unpack_from(page)
    found = {}
    for number in range(room):
        address, _, *counts = _PEER.unpack_from(page, _HEAD.size + number * _PEER.size)
        if any(address):
            found[socket.inet_ntoa(address)] = Counts(*counts)
    return found


def pages_at(data: memoryview) -> list[int]:
    """The pages that start with the signature of such a page."""
    found, text = [], data.tobytes()
    at = text.find(MAGIC)
    while at >= 0:
        if at % PAGE_BYTES == 0:
            found.append(at // PAGE_BYTES)
        at = text.find(MAGIC, at + 1)
    return found


def violations(counts: Mapping[str, Mapping[str, Counts]]) -> list[Violation]:
    """What makes a cut inconsistent; `counts` are by a guest's address, then by the other's."""
    found = []
    for one, of_one in counts.items():
        for other, heard in of_one.items():
            if other not in counts:
                continue
            said = counts[other].get(one, Counts(0, 0, 0, 0, 0))
            for over, sent, got in (
                ("udp", said.udp_sent, heard.udp_heard),
                ("tcp", said.tcp_sent, heard.tcp_heard),
            ):
                if got > sent:
                    found.append(Violation(other, one, over, sent, got))
    return found
