"""A client outside, in a process and a session of its own: how long does it wait for answers?

    python -m benchmarks.group_client STATE_DIR FILE GUEST...

It asks each guest's TCP server all the time, one question after the other over one connection, and
adds a line to FILE for each answer: when it was asked (Unix s), whom, how long it took (s), and how
many segments it has had to send twice so far.
"""

import asyncio
import socket
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import NamedTuple, TextIO

from tests.qemu.talking import guests
from vmckpt.lab import state
from vmckpt.lab.guests.guest import KEY_VALUE_PORT, KvClient
from vmckpt.lab.guests.labguest import LabGuest
from vmckpt.lab.sockets import connect_guest
from vmckpt.lab.state import Lab

ASK_EVERY_S, PATIENCE_S = 0.01, 30.0
# struct tcp_info of linux/tcp.h: tcpi_total_retrans.
_TCP_INFO_BYTES, _RETRANSMITTED = 104, struct.Struct("100xI")


class Wait(NamedTuple):
    """For one answer."""

    asked_unix_s: float
    guest: str
    waited_s: float
    sent_twice: int


class Waits:
    """What the client has written down so far: each line is read once, however long it runs."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        self._path, self._read_bytes = path, 0
        self._of: dict[str, list[Wait]] = {name: [] for name in names}

    def between(self, first_unix_s: float, last_unix_s: float) -> dict[str, list[Wait]]:
        """Those asked in that time, by guest; all of them have been answered when this returns."""
        given_up_s = time.monotonic() + PATIENCE_S
        while True:
            self._read_on()
            if all(some and some[-1].asked_unix_s > last_unix_s for some in self._of.values()):
                return {
                    name: [one for one in some if first_unix_s <= one.asked_unix_s <= last_unix_s]
                    for name, some in self._of.items()
                }
            if time.monotonic() > given_up_s:
                raise SystemExit("a guest does not answer any more")
            time.sleep(0.05)

    def _read_on(self) -> None:
        with self._path.open("rb") as file:
            file.seek(self._read_bytes)
            told = file.read()
        whole = told[: told.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        for line in whole.decode().splitlines():
            wait = _parsed(line)
            self._of[wait.guest].append(wait)


@contextmanager
def client(state_dir: Path, names: Sequence[str]) -> Iterator[Waits]:
    """One at work for the block."""
    path = state_dir / "waits"
    path.touch()
    words = [sys.executable, "-m", "benchmarks.group_client", str(state_dir), str(path), *names]
    with Popen(words, stdin=DEVNULL, start_new_session=True) as process:
        try:
            yield Waits(path, names)
        finally:
            process.kill()


def _parsed(line: str) -> Wait:
    asked, name, waited, twice = line.split()
    return Wait(float(asked), name, float(waited), int(twice))


async def _ask(lab: Lab, guest: LabGuest, told: TextIO) -> None:
    sock = await connect_guest(lab, guest.address, KEY_VALUE_PORT)
    asking = await KvClient.over(sock)
    while True:
        asked_s, asked_unix_s = time.perf_counter(), time.time()
        await asking.echo("there")
        waited_s = time.perf_counter() - asked_s
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        twice = _RETRANSMITTED.unpack(info)[0]
        told.write(f"{asked_unix_s:.6f} {guest.name} {waited_s:.6f} {twice}\n")
        await asyncio.sleep(ASK_EVERY_S)


async def _main(state_dir: Path, path: Path, names: Sequence[str]) -> None:
    lab = state.read(state_dir)
    if lab is None:
        raise SystemExit("there is no lab")
    with path.open("a", buffering=1) as told:
        await asyncio.gather(*(_ask(lab, guest, told) for guest in guests(*names)))


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
