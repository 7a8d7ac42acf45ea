"""The users of the link between two hosts: their files there, see migrate/shared_link.py."""

import os
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from vmckpt.errors import BusyError
from vmckpt.hosts.every import ask_every
from vmckpt.hosts.host import Host
from vmckpt.hosts.lock import Owner
from vmckpt.sequence.steps import both

OUT, IN, TURN = "out", "in", "turn"
# Bytes per second.
_LIMIT = re.compile(r"[0-9]{1,15}")


async def others_on_the_link(source: Host, destination: Host) -> int:
    """How many migrations currently use the link between the two. Raises HostDownError."""
    out, in_ = await both(limits(source, OUT), limits(destination, IN))
    return len(out.keys() | in_.keys())


async def limits(host: Host, direction: str, but: str = "") -> dict[str, int]:
    """The limits of the runs that use this route from or to the host."""
    directory, found = directory_of(host, direction), dict[str, int]()
    for name in await host.list_dir(directory):
        run, _, limit = name.partition(".")
        if run == but or not _LIMIT.fullmatch(limit):
            continue
        if await host.lock_owner(directory / name) is not None:
            found[run] = int(limit)
        else:
            await _forget(host, directory / name)
    return found


async def forget_killed(hosts: Iterable[Host]) -> None:
    """Remove the shares and turns left by killed migrations; unreachable hosts keep theirs."""

    async def forget(host: Host) -> None:
        for direction in (OUT, IN, TURN):
            for name in await host.list_dir(directory_of(host, direction)):
                if await host.lock_owner(directory_of(host, direction) / name) is None:
                    await _forget(host, directory_of(host, direction) / name)

    await ask_every(hosts, forget)


async def _forget(host: Host, path: Path) -> None:
    """Remove a killed process's file, unless it was taken in the meantime."""
    with suppress(BusyError):
        async with host.lock(path, Owner("", "tidy up", os.getpid(), time.time())):
            pass


def directory_of(host: Host, direction: str) -> Path:
    """The directory with the files of the migrations that use this route."""
    return host.state_dir / "links" / direction
