"""A store over SSH: ssh://[USER@]HOST[:PORT]/DIRECTORY, served by `vmckpt lend` there.

The connection is OpenSSH's, with its own configuration and keys, so that a server can restrict a
key to one command: `restrict,command="vmckpt lend --append-only /DIRECTORY" ssh-ed25519 ...` in
authorized_keys. Such a client adds and reads checkpoints, and removes and replaces nothing.
"""

import os
import re
import shlex
import socket
import subprocess
import tempfile

from vmckpt.errors import HostDownError, StorageError, UsageError
from vmckpt.events.trace import trace_process
from vmckpt.installing import Need, advice_here
from vmckpt.store.backends.lent import LentBackend

# Like BORG_RSH: another ssh program, or more options for it.
COMMAND = "VMCKPT_STORE_SSH"
_LOCATION = re.compile(r"ssh://(?:([A-Za-z0-9_][A-Za-z0-9._-]*)@)?([A-Za-z0-9][A-Za-z0-9.-]*)"
                    r"(?::([0-9]{1,5}))?(/.*)")  # fmt: skip
_OPTIONS = (
    *("-o", "BatchMode=yes"),
    *("-o", "ConnectTimeout=30"),
    *("-o", "ServerAliveInterval=15"),
    *("-o", "ServerAliveCountMax=4"),
    # Whatever the user's configuration forwards, the server gets none of it.
    *("-o", "ForwardAgent=no"),
    *("-o", "ForwardX11=no"),
    *("-o", "ClearAllForwardings=yes"),
)
_END_S = 10.0


class SshBackend(LentBackend):
    """The near side of a store that a server lends over SSH. Raises UsageError, HostDownError."""

    def __init__(self, location: str) -> None:
        ours, theirs = socket.socketpair()
        trace_process("this machine", command(location))
        self._said = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command(location),
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=self._said,
                )
        except OSError as exc:
            ours.close()
            raise HostDownError(
                f"the store {location} is not reached",
                why=f"ssh does not run: {exc.strerror}",
                remedy=f"install OpenSSH's client: {advice_here(Need.SSH_CLIENT)}",
            ) from exc
        super().__init__(ours, location)
        try:
            self._ask("here")
        except StorageError as exc:
            raise HostDownError(
                f"the store {location} is not reached",
                why=self._last_words() or exc.why,
                remedy=f"try it: ssh {shlex.join(command(location)[-2:-1])}; the server needs "
                "vmckpt, "
                "and this key in its authorized_keys",
            ) from exc

    def close(self) -> None:
        """Close the stream, which ends ssh. May be called again."""
        self._end()
        self._said.close()

    def _end(self) -> None:
        super().close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _last_words(self) -> str:
        """The last output of ssh or the far side."""
        self._end()
        with self._said as said:
            said.seek(0)
            words = said.read(4096).decode(errors="replace").strip().rpartition("\n")[2]
        return "".join(letter if letter.isprintable() else " " for letter in words)


def command(location: str) -> list[str]:
    """The command that connects to such a store. Raises UsageError."""
    found = _LOCATION.fullmatch(location)
    if found is None:
        raise UsageError(
            f"'{location}' is not a store",
            why="one over SSH is ssh://[USER@]HOST[:PORT]/DIRECTORY",
            remedy="write it so",
        )
    user, host, port, directory = found.groups()
    words = [*shlex.split(os.environ.get(COMMAND) or "ssh"), *_OPTIONS]
    if port:
        words += ["-p", port]
    far = f"{user}@{host}" if user else host
    return [*words, "--", far, f"vmckpt lend {shlex.quote(directory)}"]
