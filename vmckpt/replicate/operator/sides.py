"""The reports of a replication's services, on any host, and whether the services are alive."""

import asyncio
import operator
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from vmckpt.codec import convert
from vmckpt.deadlines import poll
from vmckpt.errors import (
    HostDownError,
    NotFoundError,
    OperationFailedError,
    TimedOutError,
    VmckptError,
)
from vmckpt.foreign import MalformedError, parse
from vmckpt.hosts.every import Answers, ask_every
from vmckpt.hosts.host import Host
from vmckpt.hosts.processes.process import ProcessId
from vmckpt.replicate.control import STATUS_TIMEOUT_S, ask
from vmckpt.replicate.request import DIRECTORY, REQUEST, ServiceFiles
from vmckpt.replicate.status import DEAD, PROMOTED, SILENT, ReplicaStatus, Role

POLL_S, BEGIN_S = 0.05, 60.0
# How long a killed service may still take: the kernel may be flushing its disks.
STUCK_S = 300.0


@dataclass(frozen=True, slots=True)
class _Named:
    name: str | None = None


@dataclass(frozen=True, slots=True)
class _Request:
    """The fields that are read of a dead service's request, from any version of vmckpt."""

    vm: str | None = None
    run: str | None = None
    primary: _Named = _Named()
    standby: _Named = _Named()


class ReplicaSide(NamedTuple):
    """One host's service's report about a VM; `answers`: it is alive. If not, its last word."""

    host: Host
    status: ReplicaStatus
    answers: bool

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return self.status.to_json() | {"host": self.host.name, "answers": self.answers}


async def sides(name: str, hosts: Iterable[Host]) -> list[ReplicaSide]:
    """The report, or last report, of every host's service for the VM's replication; primary first.

    Hosts that do not answer are skipped. Raises HostDownError if only they may know.
    """
    answers = await ask_every(hosts, lambda host: side_of(host, name))
    found = [side for side in answers.given if side is not None]
    if not found and answers.silent:
        raise answers.silent[0]
    return sorted(found, key=lambda side: side.status.role)


async def all_sides(hosts: Iterable[Host]) -> Answers[list[ReplicaSide]]:
    """The reports, or last reports, of all replications' services on every host; by host."""

    async def ask_host(host: Host) -> list[ReplicaSide]:
        names = await host.list_dir(host.state_dir / DIRECTORY)
        found = [await side_of(host, name) for name in names]
        return [side for side in found if side is not None]

    return await ask_every(hosts, ask_host)


def latest(sides: Iterable[ReplicaSide]) -> dict[str | None, ReplicaSide]:
    """By VM, the side whose report says whether a standby could take over now: the primary's, or if
    no primary answers, that of the last host that ran the VM. Hosts keep records of earlier
    replications.
    """
    found: dict[str | None, ReplicaSide] = {}
    for side in sorted(sides, key=_order):
        if side.status.is_primary or side.status.state == PROMOTED:
            found[side.status.vm] = side
    return found


def _order(side: ReplicaSide) -> tuple[bool, int, bool]:
    """Of two in one term, the standby's took over from the primary's."""
    status = side.status
    return side.answers and status.is_primary, status.term or 0, not status.is_primary


async def side_of(host: Host, name: str) -> ReplicaSide | None:
    """The report, or last report, of one host's service for the VM; None: it has none."""
    files = ServiceFiles.of(host, name)
    if not await host.exists(files.request):
        return None
    try:
        answer = await ask(host, files, "status", STATUS_TIMEOUT_S)
        return ReplicaSide(host, answer, answers=True)
    except HostDownError as exc:
        status = await last_status(host, files) or await _status_of_dead(host, files, exc)
        return ReplicaSide(host, status, answers=False)


async def _status_of_dead(host: Host, files: ServiceFiles, silence: HostDownError) -> ReplicaStatus:
    """The status of a service that was killed or hangs."""
    text = await host.read_text(files.request) or "{}"
    try:
        request = convert(_Request, parse(text))
    except MalformedError as exc:
        raise REQUEST.damaged(files.request, str(exc), host.name) from exc
    lives = await services(host, files.path.name)
    return ReplicaStatus(
        role=Role.PRIMARY if request.primary.name == host.name else Role.STANDBY,
        state=SILENT if lives else DEAD,
        why=silence.why if lives else "its service died without a last status",
        vm=request.vm,
        run=request.run,
        primary=request.primary.name,
        standby=request.standby.name,
    )


async def is_still_of(host: Host, files: ServiceFiles, run: str | None) -> bool:
    """Whether the files there are of that replication, or of an unknown one; not of one that has
    begun since.
    """
    try:
        now = convert(_Request, parse(await host.read_text(files.request) or "{}")).run
    except MalformedError:
        now = None
    return None in (now, run) or now == run


async def last_status(host: Host, files: ServiceFiles) -> ReplicaStatus | None:
    """What a service recorded at its end; None: it has not ended, or was killed.

    A record that a power cut emptied counts as none.
    """
    try:
        return ReplicaStatus.from_json(parse(await host.read_text(files.status) or ""))
    except MalformedError:
        return None


async def services(host: Host, name: str) -> list[ProcessId]:
    """The processes that replicate the VM there."""
    path = ServiceFiles.of(host, name).path
    marks = (f"replica\0{role}\0{path}\0" for role in ("standby", "primary"))
    return [process for mark in marks for process in await host.find_processes(mark)]


async def until_gone(
    host: Host, name: str, again: Callable[[], Awaitable[object]] | None = None
) -> None:
    """Wait until the service there has ended, repeating `again`; on timeout it is killed.

    Raises OperationFailedError: it survives that.
    """
    given_up_s = asyncio.get_running_loop().time() + BEGIN_S
    while left := await services(host, name):
        if again is not None:
            with suppress(VmckptError):  # it does not listen yet, or no longer
                await again()
        if (now_s := asyncio.get_running_loop().time()) > given_up_s:
            for process in left:
                if not await host.kill(process) and now_s > given_up_s + STUCK_S:
                    raise OperationFailedError(
                        f"the replication's service of '{name}' on {host.name} does not end",
                        why=f"pid {process.pid} survived SIGKILL: it is stuck in the kernel",
                        remedy="check the storage of that host, and repeat the command",
                    )
        await asyncio.sleep(POLL_S)


async def until_recovered(host: Host, name: str) -> None:
    """Wait until the dead-man's switch of a primary's service has finished its recovery.

    It reads the files in the service's directory. Raises TimedOutError: it continues.
    """
    mark = f"replica\0recover\0{ServiceFiles.of(host, name).path}\0"
    late = TimedOutError(
        f"the recovery after the killed service of '{name}' has not ended within {BEGIN_S:g} s",
        why="the arbiter does not answer, or another command works on the VM",
        remedy=f"restore access to the arbiter: {host.name} keeps trying",
    )
    await while_there_is(lambda: host.find_processes(mark), late)


async def while_there_is(something: Callable[[], Awaitable[object]], late: TimedOutError) -> None:
    """Wait until it ends. Raises `late` after BEGIN_S; the operation itself continues."""
    if await poll(something, operator.not_, every_s=POLL_S, within_s=BEGIN_S):
        raise late


def not_replicated(name: str) -> NotFoundError:
    """The error: no host has anything of a replication of the VM."""
    return NotFoundError(
        f"'{name}' is not replicated",
        why="no host has a service for it",
        remedy=f"vmckpt replicate start {name} STANDBY",
    )
