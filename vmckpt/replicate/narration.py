"""The event log of a replication's services: a line of JSON for each change.

STATE/replica-events/VM.jsonl on each host; it outlives `replicate stop`. At 1 MiB it becomes
VM.jsonl.1 and replaces the previous one, so there are never more than two files of 1 MiB.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from vmckpt.codec import convert
from vmckpt.foreign import parse
from vmckpt.hosts.every import ask_every
from vmckpt.hosts.host import Host, HostEntry
from vmckpt.hosts.processes.process import APPENDED
from vmckpt.notify.announce import announce
from vmckpt.replicate.notices import Noticing
from vmckpt.replicate.paths import UNHEARD
from vmckpt.replicate.status import ReplicaStatus
from vmckpt.vm.paths import file_name

MOST_BYTES = 1 << 20
# Rarely: a status takes a few tenths of a millisecond, in a process for which epochs wait.
CHECK_S = 0.2
DIRECTORY = "replica-events"
# A line is written when one of these changes, or a path is lost or back; the others are included
# in it.
REPORTED = ("state", "ending", "may_run")
ALSO_REPORTED = (
    "vm",
    "run",
    "role",
    "primary",
    "standby",
    "why",
    "term",
    "output_commit",
    "epoch",
    "paths",
)
Status = Callable[[], ReplicaStatus]


class _Event(TypedDict):
    """The fields of an event that are read unchanged."""

    time: str
    host: str
    role: NotRequired[str]
    state: str
    paths: NotRequired[dict[str, str]]


def events_file(host: Host | HostEntry, vm: str) -> Path:
    """The file to which a host's services write a VM's replication events."""
    return host.state_dir / DIRECTORY / f"{file_name(vm, 'VM')}.jsonl"


@asynccontextmanager
async def narrated(status: Status, host: HostEntry) -> AsyncIterator[None]:
    """For the block: report each change of a service's status, including the last."""
    changes: list[dict[str, Any]] = []
    noticing = Noticing()

    def tell() -> None:
        current = status()
        facts = {name: getattr(current, name) for name in REPORTED} | {"unheard": _unheard(current)}
        if not changes or changes[-1] != facts:
            changes[:] = [facts]
            tell_event(host, current, noticing)

    async def watch() -> None:
        while True:
            tell()
            await asyncio.sleep(CHECK_S)

    watching = asyncio.ensure_future(watch())
    try:
        yield
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.wait({watching})
        tell()


def _unheard(current: ReplicaStatus) -> list[str]:
    """The lost paths; loss and return are reported."""
    return [path for path, how in (current.paths or {}).items() if how in UNHEARD]


def tell_event(host: HostEntry, current: ReplicaStatus, noticing: Noticing | None = None) -> None:
    """Append an event with the current status, and notify of it if it is a reason to.

    A file that cannot be written stops nothing. Without `noticing` it is the first one.
    """
    for notification in (noticing or Noticing()).noticed(host.name, current):
        announce(notification)
    known = current.to_json()
    facts = {name: known[name] for name in (*REPORTED, *ALSO_REPORTED) if name in known}
    time_ = datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="milliseconds")
    line = json.dumps({"time": time_.replace("+00:00", "Z"), "host": host.name, **facts})
    path = events_file(host, str(current.vm))
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(path, APPENDED, 0o600), "w") as file:
            file.write(f"{line}\n")
            is_full = file.tell() >= MOST_BYTES
        if is_full:
            path.replace(_older(path))
    except OSError as exc:
        with suppress(OSError):  # it is on the same disk
            sys.stderr.write(f"{path}: {exc}: {line}\n")
            sys.stderr.flush()


async def read_events(vm: str, hosts: Iterable[Host]) -> list[dict[str, Any]]:
    """A VM's replication events from every host that answers, in the order of their clocks."""
    answers = await ask_every(hosts, lambda host: _events_of(host, vm))
    if not answers.given and answers.silent:
        raise answers.silent[0]
    found = [event for events in answers.given for event in events]
    return sorted(found, key=lambda event: str(event["time"]))


async def _events_of(host: Host, vm: str) -> list[dict[str, Any]]:
    path = events_file(host, vm)
    texts = [await host.read_text(one) or "" for one in (_older(path), path)]
    events = list[dict[str, Any]]()
    for line in "".join(texts).splitlines():
        with suppress(ValueError):  # cut off by a full disk
            event = parse(line)
            convert(_Event, event)
            events.append(event)
    return events


def _older(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")
