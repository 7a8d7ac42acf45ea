"""Creates one socket and passes it to its parent over descriptor 0.

A socket belongs to the network namespace in which it was created, wherever it is used: run as
`nsenter --net=... python -m vmckpt.lab.handover tcp`, this gives the parent a socket in that
namespace without entering it. It imports nothing that would slow its start.
"""

import socket
import sys

KINDS = {"tcp": socket.SOCK_STREAM, "udp": socket.SOCK_DGRAM}


def main() -> int:
    """Create a socket of the kind named by the first argument and send it."""
    with (
        socket.socket(fileno=0) as parent,
        socket.socket(socket.AF_INET, KINDS[sys.argv[1]]) as made,
    ):
        socket.send_fds(parent, [b"s"], [made.fileno()])
    return 0


if __name__ == "__main__":
    sys.exit(main())
