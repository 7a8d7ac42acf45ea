"""Inventory entries as JSON: what describes a host, both ways."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vmckpt.hosts.host import Entry, Host
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.uids import Uids, make_uids

if TYPE_CHECKING:
    from vmckpt.hosts.ssh.entry import SshEntry

LOCAL, SSH = "local", "ssh"


def parse_entry(name: str, data: Mapping[str, Any]) -> "LocalHost | SshEntry":
    """The entry of a host. Raises ValueError, TypeError or KeyError on a malformed one."""
    match data.get("kind", LOCAL):
        case "local":
            return LocalHost(name, **parse_fields(data), enter=_argv(data.get("enter", [])))
        case "ssh":
            from vmckpt.hosts.ssh.address import Address
            from vmckpt.hosts.ssh.entry import SshEntry

            config = _absolute(data["ssh_config"]) if data.get("ssh_config") else None
            return SshEntry(
                name,
                **parse_fields(data),
                address=Address.parse(_text(data["address"]), config),
                vmckpt=_text(data.get("vmckpt", "vmckpt")),
            )
        case other:
            raise ValueError(f"{other!r} is no kind of host: '{LOCAL}' and '{SSH}' are")


def entry_to_json(entry: "LocalHost | SshEntry") -> dict[str, Any]:
    """For its file; `parse_entry` is the inverse."""
    if isinstance(entry, LocalHost):
        return {"kind": LOCAL, "enter": list(entry.enter), **fields_to_json(entry)}
    return entry.to_json()


def fields_to_json(entry: Entry | Host) -> dict[str, Any]:
    """What every kind of host has."""
    return {
        "state_dir": str(entry.state_dir),
        "migration_address": entry.migration_address,
        "qemu": entry.qemu,
        "bridge": entry.bridge,
        "heartbeats": str(entry.heartbeats) if entry.heartbeats else None,
        "migration_ports": list(entry.migration_ports) if entry.migration_ports else None,
        "libvirt": str(entry.libvirt) if entry.libvirt else None,
        "second_address": entry.second_address,
        "vm_uids": list(entry.vm_uids) if entry.vm_uids else None,
    }


def parse_fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse, as arguments of `Entry`. Raises ValueError, TypeError or KeyError."""
    return {
        "state_dir": _absolute(data["state_dir"]),
        "migration_address": _text(data["migration_address"]),
        "qemu": _text(data.get("qemu", "qemu-system-x86_64")),
        "bridge": _text(data["bridge"]) if data.get("bridge") else None,
        "heartbeats": _absolute(data["heartbeats"]) if data.get("heartbeats") else None,
        "migration_ports": _ports(data.get("migration_ports")),
        "libvirt": _absolute(data["libvirt"]) if data.get("libvirt") else None,
        "second_address": _text(data["second_address"]) if data.get("second_address") else None,
        "vm_uids": _uids(data.get("vm_uids")),
    }


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


def _ports(value: object) -> tuple[int, int] | None:
    match value:
        case None:
            return None
        # bool is an int to Python, and no port.
        case [int(first), int(last)] if not isinstance(first, bool) and 0 < first <= last < 65536:
            return first, last
    raise ValueError(f"migration_ports {value!r} has to be [first, last], 1 to 65535")


def _uids(value: object) -> Uids | None:
    match value:
        case None:
            return None
        case [int(first), int(last)] if not isinstance(first, bool) and not isinstance(last, bool):
            return make_uids(first, last)
    raise ValueError(f"vm_uids {value!r} has to be [first, last]")
