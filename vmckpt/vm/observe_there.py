"""Page tracking on the host that has the VM: it runs `vmckpt observe` there, which answers once."""

import errno
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vmckpt.hosts.host import Host
from vmckpt.hosts.lock import read_owner
from vmckpt.memory.content import Content
from vmckpt.memory.observe import Observation, Window, observe
from vmckpt.memory.windows import Dirtied

# What the command may take besides: an interpreter's start, and reading samples of memory.
BESIDES_S = 30.0


async def observe_there(
    host: Host, pid: int, ram_file: Path, for_s: float, lock: Path
) -> Observation | None:
    """As `memory.observe`, on the host; None once somebody holds the lock.

    Raises OSError as that does, too (ENOTSUP) when the host's vmckpt knows no such command;
    HostDownError.
    """
    words = ["observe", str(pid), str(ram_file), str(for_s), str(lock)]
    done = await host.run([*await host.own_command(), *words], for_s + BESIDES_S)
    try:
        told = json.loads(done.stdout)
        if "errno" in told:
            raise OSError(told["errno"], told["why"])
        return _from_json(told["seen"]) if told["seen"] else None
    except (ValueError, KeyError, TypeError) as exc:
        why = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise OSError(errno.ENOTSUP, f"its vmckpt did not track pages: {why[0]}") from exc


async def observe_here(pid: int, ram_file: Path, for_s: float, lock: Path) -> None:
    """The host's side: what was seen, or the error, as a line of JSON on standard output."""

    async def is_free() -> bool:
        return read_owner(lock) is None

    try:
        seen = await observe(pid, ram_file, for_s, is_free)
        told: dict[str, Any] = {"seen": _to_json(seen) if seen else None}
    except OSError as exc:
        told = {"errno": exc.errno, "why": exc.strerror or str(exc)}
    json.dump(told, sys.stdout)


def _to_json(seen: Observation) -> dict[str, Any]:
    return seen._asdict() | {
        "samples": {str(level): group for level, group in seen.samples.items()},
        "ram": seen.ram._asdict(),
        "dirtied": seen.dirtied._asdict(),
    }


def _from_json(data: Mapping[str, Any]) -> Observation:
    return Observation(
        took_s=data["took_s"],
        samples={
            int(level): [Dirtied(*one) for one in group] for level, group in data["samples"].items()
        },
        windows=tuple(Window(*window) for window in data["windows"]),
        working_set_pages=data["working_set_pages"],
        faults=data["faults"],
        ram=Content(**data["ram"]),
        dirtied=Content(**data["dirtied"]),
    )
