"""Login settings of a host from ~/.ssh/config and /etc/ssh/ssh_config.

Supported keywords: HostName, User, Port, IdentityFile, IdentitiesOnly, ProxyJump, ProxyCommand,
UserKnownHostsFile, HostKeyAlias, ConnectTimeout; Host and Match select as in ssh(1).
"""

import getpass
import os
import re
import threading
from dataclasses import dataclass
from pathlib import Path

import paramiko

from vmckpt.errors import UsageError
from vmckpt.hosts.ssh.address import Address

_CONFIGS = ("~/.ssh/config", "/etc/ssh/ssh_config")
_KNOWN_HOSTS = "~/.ssh/known_hosts ~/.ssh/known_hosts2"
_NO = "none"
SSH_PORT = 22
# `Match exec` imports a package on first use, which two threads must not do at once.
_one_at_a_time = threading.Lock()
CONNECT_TIMEOUT_S = 10.0
_TIME_PART = re.compile(r"([0-9]{1,9})([smhdw]?)", re.ASCII)
_TIME = re.compile(rf"(?:{_TIME_PART.pattern})+", re.IGNORECASE | re.ASCII)
_TIME_UNITS_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_MOST_TIMEOUT_S = 86400.0


@dataclass(frozen=True, slots=True)
class Settings:
    """All that a login needs. `known_as` is the host's name in the files `known_hosts`.

    `jumps` are passed in this order. Without `keys` those in ~/.ssh are tried.
    """

    host: str
    port: int
    user: str
    known_as: str
    known_hosts: tuple[Path, ...]
    keys: tuple[Path, ...]
    use_agent: bool
    jumps: tuple[str, ...]
    command: str | None
    timeout_s: float


def read_settings(address: Address) -> Settings:
    """The settings for an address. Raises UsageError if the configuration is not usable."""
    try:
        me, usual = getpass.getuser(), [Path(path).expanduser() for path in _CONFIGS]
    except (KeyError, OSError, RuntimeError) as exc:
        raise UsageError(
            "this user cannot log in anywhere over SSH",
            why=f"uid {os.geteuid()} has no account here, and USER or HOME is not set",
            remedy="set USER and HOME",
        ) from exc
    paths = [address.config] if address.config else usual
    config = paramiko.SSHConfig()
    try:
        for path in paths:
            if address.config or path.exists():
                with path.open() as file:
                    config.parse(file)
        with _one_at_a_time:
            found = config.lookup(address.host)
        host, port = found["hostname"], address.port or int(found.get("port", SSH_PORT))
        jumps, command = found.get("proxyjump", _NO), found.get("proxycommand", _NO)
        # As in ssh(1), known_hosts has an alias without a port, and a name with any non-standard
        # port.
        plain = port == SSH_PORT or "hostkeyalias" in found
        name = found.get("hostkeyalias", host)
        files = found.get("userknownhostsfile", _KNOWN_HOSTS).split()
        return Settings(
            host=host,
            port=port,
            user=address.user or found.get("user") or me,
            known_as=name if plain else f"[{name}]:{port}",
            known_hosts=tuple(Path(file).expanduser() for file in files),
            keys=tuple(Path(file).expanduser() for file in found.get("identityfile", ())),
            use_agent=found.get("identitiesonly", "no") != "yes",
            jumps=() if jumps == _NO else tuple(jumps.split(",")),
            command=None if command == _NO else command,
            timeout_s=_timeout_s(found.get("connecttimeout", _NO)),
        )
    # ImportError: `Match exec` needs a package that is missing. RuntimeError: a home directory of
    # an unknown user.
    except (OSError, ValueError, ImportError, RuntimeError, paramiko.SSHException) as exc:
        raise UsageError(
            f"the SSH configuration for {address.host} cannot be used",
            why=str(exc),
            remedy=f"fix {' or '.join(str(path) for path in paths)}",
        ) from exc


def _timeout_s(text: str) -> float:
    """A time as in ssh_config(5), such as 90 or 1m30s. Raises ValueError.

    Without a limit (none, 0) ssh(1) waits for the kernel; here the usual one applies.
    """
    if text == _NO:
        return CONNECT_TIMEOUT_S
    if not _TIME.fullmatch(text):
        raise ValueError(f"ConnectTimeout {text} is not a time")
    parts = _TIME_PART.findall(text.lower())
    found = float(sum(int(number) * _TIME_UNITS_S[unit] for number, unit in parts))
    return min(found, _MOST_TIMEOUT_S) or CONNECT_TIMEOUT_S
