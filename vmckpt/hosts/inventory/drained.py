"""The mark of a drained host, or one being drained: on the host, visible to every operator."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from vmckpt.codec import convert
from vmckpt.errors import RefusedError
from vmckpt.foreign import MalformedError, parse
from vmckpt.hosts.host import Host


class _Mark(TypedDict):
    """`run`: the drain that set it."""

    run: NotRequired[str | None]


def _mark(host: Host) -> Path:
    return host.state_dir / "drained.json"


async def close(host: Host, facts: Mapping[str, Any]) -> None:
    """Mark the host. Raises HostDownError, StorageError."""
    await host.make_dir(host.state_dir)
    await host.write_text(_mark(host), json.dumps(facts))


async def closed_by(host: Host) -> str | None:
    """The run of the drain that marked the host. Raises MalformedError, HostDownError."""
    return convert(_Mark, parse(await host.read_text(_mark(host)) or "")).get("run")


async def reopen(host: Host, of_run: str | None = None) -> None:
    """Remove the mark; with `of_run` only that drain's, since another operator may drain it too.

    Raises HostDownError, StorageError.
    """
    if of_run is not None:
        with suppress(MalformedError):  # an unreadable mark is removed
            if await closed_by(host) != of_run:
                return
    await host.remove(_mark(host))


async def is_closed(host: Host) -> bool:
    """Whether the host accepts no VMs. Raises HostDownError."""
    return await host.exists(_mark(host))


async def require_open(host: Host) -> None:
    """Raises RefusedError if the host is marked, HostDownError."""
    if await is_closed(host):
        raise RefusedError(
            f"{host.name} is drained",
            why=f"{_mark(host)} there marks it: no new VM is placed on it",
            remedy=f"choose another host, or let it have VMs again: vmckpt undrain {host.name}",
        )
