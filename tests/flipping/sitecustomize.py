"""On PYTHONPATH: a bit of what a replication's service sends is flipped on the wire, when asked.

VK_FLIP leads to a directory; a file there that has the service's role for a name asks for one bit,
once. It is flipped behind TLS and ahead of TCP, whose checksum so finds nothing.
"""

import os
import random
import socket
import sys
from asyncio import selector_events
from pathlib import Path
from typing import Any

Transport: Any = selector_events._SelectorSocketTransport  # type: ignore[attr-defined]


def flip_when_asked(asked: Path) -> None:
    write = Transport.write

    def write_flipped(transport: Any, data: bytes) -> None:
        if transport.get_extra_info("socket").family == socket.AF_INET and asked.exists():
            asked.unlink()
            flipped = bytearray(data)
            flipped[random.randrange(len(data))] ^= 1 << random.randrange(8)
            data = bytes(flipped)
        write(transport, data)

    Transport.write = write_flipped


words = sys.orig_argv
if "VK_FLIP" in os.environ and "replica" in words:
    flip_when_asked(Path(os.environ["VK_FLIP"]) / words[words.index("replica") + 1])
