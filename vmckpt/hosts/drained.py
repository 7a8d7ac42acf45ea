"""The mark of a host that is drained, or is being so: on the host, for every operator to see."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vmckpt.errors import RefusedError
from vmckpt.hosts.host import Host


def _mark(host: Host) -> Path:
    return host.state_dir / "drained.json"


async def close(host: Host, facts: Mapping[str, Any]) -> None:
    """Mark it. Raises HostDownError, StorageError."""
    await host.make_dir(host.state_dir)
    await host.write_text(_mark(host), json.dumps(facts))


async def reopen(host: Host) -> None:
    """Take the mark away. Raises HostDownError, StorageError."""
    await host.remove(_mark(host))


async def is_closed(host: Host) -> bool:
    """Whether nothing is to be put there. Raises HostDownError."""
    return await host.exists(_mark(host))


async def require_open(host: Host) -> None:
    """Raises RefusedError when the host is marked, HostDownError."""
    if await is_closed(host):
        raise RefusedError(
            f"{host.name} is drained",
            why=f"{_mark(host)} says so there: no new VM is put on it",
            remedy=f"choose another host, or let it have VMs again: vmckpt undrain {host.name}",
        )
