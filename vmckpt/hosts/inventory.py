"""Which hosts there are: one JSON file each under STATE/hosts, and always `local`, this machine."""

import json
import os
import re
from pathlib import Path

from vmckpt.errors import NotFoundError, UsageError
from vmckpt.hosts.host import Host
from vmckpt.hosts.local import LocalHost

LOCAL = "local"
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")


def state_dir() -> Path:
    """This user's state: $VMCKPT_STATE_DIR, else /var/lib/vmckpt for root, XDG's for others."""
    if given := os.environ.get("VMCKPT_STATE_DIR"):
        return Path(given).absolute()
    if os.geteuid() == 0:
        return Path("/var/lib/vmckpt")
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "vmckpt"


def check_name(name: str, what: str) -> str:
    """`name` itself.

    Raises UsageError unless it is [a-z0-9][a-z0-9._-]* of at most 40 characters.
    """
    if not _NAME.fullmatch(name) or len(name) > 40:
        raise UsageError(
            f"'{name}' is no name for a {what}",
            why="names match [a-z0-9][a-z0-9._-]* and have at most 40 characters",
            remedy="choose another name",
        )
    return name


def all_hosts() -> list[Host]:
    """Every host, `local` first, then by name. Raises UsageError on a malformed inventory file."""
    paths = sorted((state_dir() / "hosts").glob("*.json"))
    hosts = {path.stem: _read(path) for path in paths}
    return [hosts.pop(LOCAL, local_host()), *hosts.values()]


def find_host(name: str) -> Host:
    """The host of that name. Raises NotFoundError, naming those there are."""
    hosts = {host.name: host for host in all_hosts()}
    if name not in hosts:
        raise NotFoundError(
            f"there is no host '{name}'",
            why=f"the inventory has: {', '.join(hosts)}",
            remedy="see `vmckpt host list`",
        )
    return hosts[name]


def local_host() -> LocalHost:
    """This machine."""
    return LocalHost(LOCAL, state_dir(), "127.0.0.1")


def _read(path: Path) -> Host:
    try:
        data = json.loads(path.read_text())
        if not isinstance(data, dict):
            raise TypeError("it has to be an object")
        _kind(data.get("kind", LOCAL))
        return LocalHost(
            name=check_name(path.stem, "host"),
            state_dir=_absolute(data["state_dir"]),
            migration_address=_text(data["migration_address"]),
            enter=_argv(data.get("enter", [])),
            qemu=_text(data.get("qemu", "qemu-system-x86_64")),
            bridge=_text(data["bridge"]) if data.get("bridge") else None,
            heartbeats=_absolute(data["heartbeats"]) if data.get("heartbeats") else None,
            migration_ports=_ports(data.get("migration_ports")),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise UsageError(
            f"the inventory file {path} is malformed",
            why=f"{type(exc).__name__}: {exc}",
            remedy="mend or remove it",
        ) from exc


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} has to be text")
    return value


def _argv(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} has to be a list, one argument an item")
    return tuple(_text(item) for item in value)


def _absolute(value: object) -> Path:
    path = Path(_text(value))
    if not path.is_absolute():
        raise ValueError(f"{value!r} has to be an absolute path")
    return path


def _kind(value: object) -> str:
    if value != LOCAL:
        raise ValueError(f"{value!r} is no kind of host: '{LOCAL}' is")
    return LOCAL


def _ports(value: object) -> tuple[int, int] | None:
    match value:
        case None:
            return None
        # bool is an int to Python, and no port.
        case [int(first), int(last)] if not isinstance(first, bool) and 0 < first <= last < 65536:
            return first, last
    raise ValueError(f"migration_ports {value!r} has to be [first, last], 1 to 65535")
