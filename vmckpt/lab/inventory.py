"""The lab's hosts in the operator's inventory, STATE/hosts/NAME.json."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vmckpt.errors import RefusedError
from vmckpt.lab.network import GUEST_BRIDGE
from vmckpt.lab.real.services import LIBVIRT_SOCKET
from vmckpt.lab.state import HOST_PREFIX, Lab, LabHost, replace_file, ssh_config


def check_free(directory: Path, names: Iterable[str]) -> None:
    """Raises RefusedError if a host that is not the lab's has one of these names."""
    for name in names:
        entry = _hosts(directory) / f"{name}.json"
        if entry.exists() and not _is_ours(entry, directory):
            raise RefusedError(
                f"the host name '{name}' is taken",
                why=f"{entry} describes a host that is not the lab's",
                remedy="give that host another name",
            )


def enter_hosts(lab: Lab) -> None:
    """Enter the lab's hosts, so that every command knows them."""
    _hosts(lab.directory).mkdir(mode=0o700, exist_ok=True)
    for host in () if lab.bare else lab.hosts:
        entry = {
            **(_over_ssh(lab, host) if host.ssh_address else _here(host)),
            "state_dir": str(host.state_dir),
            "migration_address": host.migration_address,
            "qemu": str(host.qemu),
            "bridge": GUEST_BRIDGE,
            "heartbeats": str(lab.heartbeats),
            "second_address": host.second_address,
        }
        replace_file(_hosts(lab.directory) / f"{host.name}.json", json.dumps(entry, indent=1))


def _here(host: LabHost) -> dict[str, Any]:
    return {"kind": "local", "enter": list(host.enter)}


def _over_ssh(lab: Lab, host: LabHost) -> dict[str, Any]:
    return {
        "kind": "ssh",
        "address": f"ssh://{host.name}",
        "ssh_config": str(ssh_config(lab.directory)),
        "libvirt": str(LIBVIRT_SOCKET),
    }


def remove_hosts(directory: Path) -> set[str]:
    """Remove the lab's hosts in `directory`, including half-written ones; return their names."""
    names = set()
    for entry in _hosts(directory).glob(f"{HOST_PREFIX}*.json"):
        if _is_ours(entry, directory):
            entry.unlink(missing_ok=True)
            names.add(entry.stem)
    for unfinished in _hosts(directory).glob(f".{HOST_PREFIX}*.json.new"):
        unfinished.unlink(missing_ok=True)
    return names


def _hosts(directory: Path) -> Path:
    return directory.parent / "hosts"


def _is_ours(entry: Path, directory: Path) -> bool:
    try:
        described = json.loads(entry.read_bytes())
        # The state of a host that looks like a machine is in its own /var/lib.
        which = "ssh_config" if described.get("kind") == "ssh" else "state_dir"
        return Path(described[which]).is_relative_to(directory)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
