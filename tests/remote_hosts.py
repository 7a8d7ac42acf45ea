"""Hosts behind a real `vmckpt serve`, for tests: over a socket to a child process."""

import asyncio
import socket
import subprocess
import sys
from pathlib import Path

from vmckpt.errors import HostDownError
from vmckpt.hosts.remote.host import RemoteHost
from vmckpt.hosts.remote.session import ServeConnection, Session

SERVE = [sys.executable, "-m", "vmckpt.cli.entry", "serve"]


class PipedServes:
    """Opens connections to `vmckpt serve` children, and ends these."""

    def __init__(self, *argv: str) -> None:
        self.argv = list(argv) or SERVE
        self.children: list[subprocess.Popen[bytes]] = []

    async def open(self) -> ServeConnection:
        ours, theirs = socket.socketpair()
        with theirs:
            child = subprocess.Popen(self.argv, stdin=theirs.fileno(), stdout=theirs.fileno())  # noqa: ASYNC220
        self.children.append(child)
        reader, writer = await asyncio.open_connection(sock=ours)
        return ServeConnection(reader, writer, self._why_silent)

    async def _why_silent(self) -> HostDownError:
        return HostDownError("serve said nothing", why="it ended", remedy="-")

    def host(self, state_dir: Path, name: str = "a") -> RemoteHost:
        session = Session(name, state_dir, self.open)
        return RemoteHost(name, state_dir, "127.0.0.1", session=session)

    def end(self) -> None:
        for child in self.children:
            child.kill()
            child.wait()
