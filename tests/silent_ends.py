"""The ends of a migration, for tests: a host with a scripted QEMU, and what is found there."""

import asyncio
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.scripted_qmp import Server
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes.process import ProcessId
from vmckpt.vm.paths import QemuDir, vm_dir
from vmckpt.vm.record import Platform, Qemu

SPEC = 'name = "web"\nmemory = "64M"\n'
PLATFORM = Platform("q35", "tcg", "qemu64")


class Guest:
    """A QEMU: what it says of itself, and what changes that."""

    def __init__(self, run: str, status: str) -> None:
        self.run, self.status = run, status
        self.before_cont: Callable[[], None] = lambda: None
        self.told: list[str] = []
        self.sessions: set[asyncio.Task[None]] = set()

    def connect(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        self.sessions.add(asyncio.create_task(self._serve(Server(theirs))))
        return ours

    async def _serve(self, server: Server) -> None:
        try:
            await server.greet()
            while True:
                await self._answer(server, await server.command())
        except (EOFError, OSError):
            pass  # the client has gone
        finally:
            server.hang_up()

    async def _answer(self, server: Server, command: dict[str, Any]) -> None:
        match command["execute"]:
            case "query-status":
                state = {"status": self.run, "running": self.run == "running"}
                await server.answer(command, state)
            case "query-migrate":
                await server.answer(command, {"status": self.status})
            case "migrate_cancel" | "cont" as told:
                self._do(told)
                await server.answer(command, {})
            case _:
                await server.refuse(command, "not in the script")

    def _do(self, told: str) -> None:
        self.told.append(told)
        if told == "cont":
            self.before_cont()
            self.run = "running"
        else:
            self.status = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scripted(LocalHost):
    """A host whose only QEMU is the guest's."""

    guest: Guest

    async def connect(self, path: Path, *, of_anyone: bool = True) -> socket.socket:
        return self.guest.connect()


@contextmanager
def marked_as(files: QemuDir) -> "Iterator[subprocess.Popen[bytes]]":
    """A process that has what marks a QEMU."""
    argv = ["sh", "-c", "read line", "sh", "-pidfile", str(files.pid)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE) as process:
        # Right after exec(2) it has no arguments for a moment.
        while not Path(f"/proc/{process.pid}/cmdline").read_bytes():
            time.sleep(0.001)
        yield process
        process.kill()


async def make_home(host: LocalHost, qemu_id: str) -> None:
    directory = vm_dir(host.state_dir, "web")
    qemu = Qemu(directory.qemu(qemu_id), ProcessId(0, 0), PLATFORM)
    await host.make_dir(directory.path)
    await host.write_text(directory.spec, SPEC)
    await host.write_text(directory.current, qemu.to_json())
