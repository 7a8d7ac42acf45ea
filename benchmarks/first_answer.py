"""A program: asks a guest for an answer, again every few milliseconds; says when the first came.

python -I -S first_answer.py ADDRESS PORT: "ready", then Unix seconds.
"""

import select
import socket
import subprocess
import sys
import time

from vmckpt.lab.state import Lab

EVERY_S = 0.004


def asking(lab: Lab, address: str, port: int) -> "subprocess.Popen[str]":
    """One that asks from the lab's outside client, and has begun to; its output is piped."""
    words = [*lab.client_enter, sys.executable, "-m", __name__, address, str(port)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    if process.stdout is None or process.stdout.readline() != "ready\n":
        raise SystemExit("nobody asks the guest")
    return process


def main(address: str, port: int) -> None:
    """Ask until there is an answer."""
    poll, connections = select.poll(), dict[int, socket.socket]()
    print("ready", flush=True)
    while True:
        one = socket.socket()
        one.setblocking(False)
        one.connect_ex((address, port))
        connections[one.fileno()] = one
        poll.register(one, select.POLLOUT)
        until_s = time.monotonic() + EVERY_S
        while (left_s := until_s - time.monotonic()) > 0:
            for fd, what in poll.poll(left_s * 1e3):
                if what == select.POLLOUT:
                    connections[fd].send(b"ping\n")
                    poll.modify(fd, select.POLLIN)
                    continue
                if what == select.POLLIN and connections[fd].recv(100):
                    print(time.time(), flush=True)
                    return
                poll.unregister(fd)
                connections.pop(fd).close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
