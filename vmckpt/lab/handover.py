"""Makes one socket where it runs and hands it to its parent over descriptor 0.

A socket belongs to the network namespace in which it was made, wherever it is used afterwards: run
as `nsenter --net=... python -m vmckpt.lab.handover tcp`, this gives the parent a socket in there
while the parent stays where it is. It imports nothing that would make its start slow.
"""

import socket
import sys

KINDS = {"tcp": socket.SOCK_STREAM, "udp": socket.SOCK_DGRAM}


def main() -> int:
    """Make a socket of the kind named by the first argument and send it."""
    with (
        socket.socket(fileno=0) as parent,
        socket.socket(socket.AF_INET, KINDS[sys.argv[1]]) as made,
    ):
        socket.send_fds(parent, [b"s"], [made.fileno()])
    return 0


if __name__ == "__main__":
    sys.exit(main())
