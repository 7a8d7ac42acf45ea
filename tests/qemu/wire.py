"""What passes on a lab host's migration link, read by a raw socket in the host's namespace."""

import json
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from vmckpt.lab.state import LabHost

# linux/if_packet.h and if_ether.h; Python's socket module has no names for the first two.
SOL_PACKET, PACKET_STATISTICS = 263, 6
SO_RCVBUFFORCE = 33
ETH_P_ALL = 3
BUFFER_BYTES = 256 << 20


@dataclass(slots=True)
class Wire:
    """Filled at the end of the block: bytes on the link, words seen unencrypted, frames missed."""

    bytes: int = 0
    words: dict[str, int] = field(default_factory=dict)
    missed: int = 0

    @property
    def in_clear(self) -> int:
        return sum(self.words.values())


@contextmanager
def captured(host: LabHost, *words: str) -> Iterator[Wire]:
    """Count `words` on the host's migration link for the block."""
    reader = subprocess.Popen(
        [*host.enter, sys.executable, __file__, *words],
        stdout=subprocess.PIPE,
        text=True,
    )
    wire = Wire()
    try:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "ready\n"
        yield wire
    finally:
        reader.send_signal(signal.SIGTERM)
        last, _ = reader.communicate(timeout=10)
    seen = json.loads(last)
    wire.bytes, wire.words, wire.missed = seen["bytes"], seen["words"], seen["missed"]


def _read(words: list[str]) -> None:
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL)) as link:
        link.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_BYTES)
        link.bind(("mig0", ETH_P_ALL))
        link.settimeout(0.05)
        ended: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
        print("ready", flush=True)
        total, counts, missed = 0, dict.fromkeys(words, 0), 0
        while True:
            try:
                frame = link.recv(1 << 18)
            except TimeoutError:
                if ended:
                    break
                continue
            total += len(frame)
            for word in words:
                counts[word] += frame.count(word.encode())
        _, missed = struct.unpack("II", link.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8))
    print(json.dumps({"bytes": total, "words": counts, "missed": missed}), flush=True)


if __name__ == "__main__":
    _read(sys.argv[1:])
