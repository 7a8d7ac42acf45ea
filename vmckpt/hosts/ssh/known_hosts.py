"""Host keys: known, unknown, or changed; only the first is let pass."""

from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import NoReturn

import paramiko

from vmckpt.errors import HostDownError

GLOBAL = Path("/etc/ssh/ssh_known_hosts")


class KnownHosts:
    """What is known of one host's keys; tells paramiko what to do about a key that is not."""

    def __init__(self, name: str, known_as: str, files: Sequence[Path]) -> None:
        self._name, self._known_as, self._files = name, known_as, files

    def load(self, client: paramiko.SSHClient) -> None:
        """Have `client` know the keys that stand in the files."""
        for path in (*self._files, GLOBAL):
            if path.exists():
                client.load_system_host_keys(str(path))

    def missing_host_key(self, _: paramiko.SSHClient, __: str, key: paramiko.PKey) -> NoReturn:
        """Called by paramiko for a host of which no key is known. Raises HostDownError."""
        line = f"{self._known_as} {key.get_name()} {key.get_base64()}"
        raise HostDownError(
            f"the SSH key of {self._name} is not known",
            why=self._shown(key),
            remedy="compare it with what the host itself says (ssh-keygen -lf "
            f"/etc/ssh/ssh_host_*_key.pub); then: echo '{line}' >> {self._files[0]}",
        )

    def changed(self, key: paramiko.PKey) -> HostDownError:
        """The host shows another key than the one that is known."""
        files = " or ".join(str(path) for path in self._files)
        return HostDownError(
            f"THE SSH KEY OF {self._name} HAS CHANGED: another machine may be listening there",
            why=f"{self._shown(key)}, and {files} has another one",
            remedy="find out why before anything else; only if the host was set up anew: "
            f"ssh-keygen -R '{self._known_as}' -f {self._files[0]}",
        )

    def _shown(self, key: paramiko.PKey) -> str:
        kind, digest = key.get_name(), _digest(key)
        return f"{self._known_as} shows the {kind} key with the fingerprint {digest}"


def _digest(key: paramiko.PKey) -> str:
    """As ssh-keygen(1) shows it."""
    return "SHA256:" + b64encode(sha256(key.asbytes()).digest()).decode().rstrip("=")
