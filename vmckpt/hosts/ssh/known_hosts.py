"""Host keys: known, unknown, changed or revoked; only a known one is accepted."""

from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import NoReturn

import paramiko
from paramiko.hostkeys import HostKeyEntry, HostKeys

from vmckpt.errors import HostDownError

GLOBAL = Path("/etc/ssh/ssh_known_hosts")
# Markers at the beginning of a line, and of a hashed name (sshd(8)).
_MARK, _REVOKED, _HASHED = "@", "@revoked", "|"


class KnownHosts:
    """The known keys of one host; decides what paramiko does with an unknown one."""

    def __init__(self, name: str, known_as: str, files: Sequence[Path]) -> None:
        self._name, self._known_as, self._files = name, known_as, files
        self._revoked: frozenset[bytes] = frozenset()

    def load(self, client: paramiko.SSHClient) -> None:
        """Load the known host keys into `client`. Raises OSError.

        Malformed lines are ignored, as by ssh(1).
        """
        lines = [line for path in (*self._files, GLOBAL) for line in _lines(path)]
        gone = [_entry(rest) for mark, *rest in lines if mark == _REVOKED]
        self._revoked = frozenset(entry.key.asbytes() for entry in gone if entry)
        known = dict[str, list[paramiko.PKey]]()
        for line in lines:
            entry = None if line[0].startswith(_MARK) else _entry(line)
            if entry and entry.key.asbytes() not in self._revoked and self._is_its(entry):
                known.setdefault(entry.key.get_name(), []).append(entry.key)
        for kind, keys in known.items():
            client.get_host_keys().add(self._known_as, kind, _AnyOf(keys))

    def _is_its(self, entry: HostKeyEntry) -> bool:
        names = HostKeys()
        for name in entry.hostnames:
            names.add(name, entry.key.get_name(), entry.key)
        return names.lookup(self._known_as) is not None

    def missing_host_key(self, _: paramiko.SSHClient, __: str, key: paramiko.PKey) -> NoReturn:
        """Called by paramiko for a host without a known key. Raises HostDownError."""
        if key.asbytes() in self._revoked:
            raise HostDownError(
                f"THE SSH KEY OF {self._name} IS REVOKED: another machine may be listening there",
                why=f"{self._shown(key)}, which is marked as {_REVOKED}",
                remedy="give the host a new key, then make that one known",
            )
        line = f"{self._known_as} {key.get_name()} {key.get_base64()}"
        raise HostDownError(
            f"the SSH key of {self._name} is not known",
            why=self._shown(key),
            remedy="compare it with what the host itself says (ssh-keygen -lf "
            f"/etc/ssh/ssh_host_*_key.pub); then: echo '{line}' >> {self._files[0]}",
        )

    def changed(self, key: paramiko.PKey) -> HostDownError:
        """The error for a host key that differs from the known one."""
        files = " or ".join(str(path) for path in self._files)
        return HostDownError(
            f"THE SSH KEY OF {self._name} HAS CHANGED: another machine may be listening there",
            why=f"{self._shown(key)}, and {files} has another one",
            remedy="find out why before anything else; only if the host was reinstalled: "
            f"ssh-keygen -R '{self._known_as}' -f {self._files[0]}",
        )

    def _shown(self, key: paramiko.PKey) -> str:
        kind, digest = key.get_name(), _digest(key)
        return f"{self._known_as} shows the {kind} key with the fingerprint {digest}"


def _lines(path: Path) -> list[list[str]]:
    """The words of each line that is not empty or a comment."""
    if not path.exists():
        return []
    lines = (line.split() for line in path.read_text(errors="replace").split("\n"))
    return [words for words in lines if words and not words[0].startswith("#")]


def _entry(words: Sequence[str]) -> HostKeyEntry | None:
    """The names and the key in a line; None if paramiko cannot read it."""
    try:
        entry = HostKeyEntry.from_line(" ".join(words))
        for name in entry.hostnames if entry else ():
            if name.startswith(_HASHED):
                HostKeys.hash_host("", name)  # otherwise it would fail when a name is looked up
    except Exception:  # noqa: BLE001 - damage shows in whatever way, also in numbers too large
        return None
    return entry


class _AnyOf:
    """The known keys of one type of a host, as one key: like ssh(1), any of them will do."""

    def __init__(self, keys: Sequence[paramiko.PKey]) -> None:
        self._keys = keys

    def get_name(self) -> str:
        """The type of them all."""
        return str(self._keys[0].get_name())

    def __eq__(self, other: object) -> bool:
        return other in self._keys

    def __hash__(self) -> int:
        return hash(self.get_name())


def _digest(key: paramiko.PKey) -> str:
    """The fingerprint in ssh-keygen(1)'s format."""
    return "SHA256:" + b64encode(sha256(key.asbytes()).digest()).decode().rstrip("=")
