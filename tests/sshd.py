"""A real sshd on 127.0.0.1 for tests, with keys and an SSH configuration of its own."""

import getpass
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vmckpt.hosts.ssh.address import Address
from vmckpt.hosts.ssh.entry import SshEntry

SSHD = "/usr/sbin/sshd"
START_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Sshd:
    """A server that lets `key` in; `config` is for the client, who reaches it as `alias`."""

    directory: Path
    process: subprocess.Popen[bytes]
    port: int

    @property
    def config(self) -> Path:
        return self.directory / "config"

    @property
    def key(self) -> Path:
        return self.directory / "user_key"

    @property
    def known_hosts(self) -> Path:
        return self.directory / "known_hosts"

    @property
    def vmckpt(self) -> Path:
        """The command there."""
        return self.directory / "vmckpt"

    @property
    def host_line(self) -> str:
        words = (self.directory / "host_key.pub").read_text().split()
        return f"[127.0.0.1]:{self.port} {words[0]} {words[1]}\n"

    def entry(self, name: str, state_dir: Path, **more: Any) -> SshEntry:
        """The host that this server is, for an inventory."""
        address = Address("127.0.0.1", getpass.getuser(), self.port, self.config)
        entry = SshEntry(name, state_dir, "127.0.0.1", address=address, vmckpt=str(self.vmckpt))
        return replace(entry, **more)

    def sessions(self) -> list[int]:
        """The pids of the processes that serve one connection each."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(word) for word in children.read_text().split()]

    def cut(self) -> None:
        """Kill every session, as a broken connection does; the server stays."""
        for pid in self.sessions():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


@contextmanager
def sshd(directory: Path, *more: str) -> Iterator[Sshd]:
    """A server for the block, with `more` lines in its configuration."""
    # sshd itself wants it, and only a service makes it at the start of the machine.
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o755)
    for name in ("host_key", "user_key"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / name)]
        subprocess.run(words, check=True)
    (directory / "authorized_keys").write_text((directory / "user_key.pub").read_text())
    port = _free_port()
    command = shlex.join([sys.executable, "-m", "vmckpt.cli.entry"])
    (directory / "vmckpt").write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    (directory / "vmckpt").chmod(0o755)
    (directory / "sshd_config").write_text(
        "\n".join(
            [
                f"Port {port}",
                "ListenAddress 127.0.0.1",
                f"HostKey {directory}/host_key",
                f"AuthorizedKeysFile {directory}/authorized_keys",
                f"PidFile {directory}/sshd.pid",
                "UsePAM no",
                "StrictModes no",
                "PasswordAuthentication no",
                "KbdInteractiveAuthentication no",
                "MaxStartups 100",
                *more,
            ]
        )
        + "\n"
    )
    (directory / "config").write_text(
        f"Host *\n  IdentityFile {directory}/user_key\n  IdentitiesOnly yes\n"
        f"  UserKnownHostsFile {directory}/known_hosts\n"
    )
    log = directory / "sshd.log"
    argv = [SSHD, "-D", "-e", "-f", str(directory / "sshd_config")]
    with log.open("wb") as output:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=output)
    made = Sshd(directory, process, port)
    made.known_hosts.write_text(made.host_line)
    try:
        _wait_until_it_listens(made, log)
        yield made
    finally:
        made.cut()
        process.terminate()
        process.wait(10)


def _wait_until_it_listens(made: Sshd, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        assert made.process.poll() is None, log.read_text()
        try:
            socket.create_connection(("127.0.0.1", made.port), 5).close()
            return
        except OSError:
            assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)
