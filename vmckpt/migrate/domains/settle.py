"""Query both ends until it is clear who has the domain."""

import asyncio
import time
from collections.abc import Callable
from shlex import quote

from vmckpt.errors import (
    HostDownError,
    NotFoundError,
    OutcomeUnknownError,
    VmckptError,
    VmLostError,
)
from vmckpt.hosts.host import Host
from vmckpt.migrate.domains.journal import DomainJournal
from vmckpt.migrate.domains.whereabouts import (
    DomainMove,
    DomainView,
    EndState,
    decide,
    decide_off,
    end_state,
    is_orphan,
)
from vmckpt.vm.domains.faults import LibvirtRefusedError
from vmckpt.vm.domains.flags import ErrorCode
from vmckpt.vm.domains.libvirtd import Libvirtd
from vmckpt.vm.domains.sessions import libvirtd

POLL_S = 0.3
# How long to wait for an end that is silent or in transition; and for a post-copy whose link is
# silent, which QEMU continues by itself when the link is back.
SILENT_S, POSTCOPY_S = 15.0, 300.0
# How long both ends must report the same about a domain that is off.
STEADY_S = 1.0
# How long a destination whose source has ended may still turn out to have everything.
ORPHAN_S = 30.0


async def settle(
    journal: DomainJournal, ends: tuple[Host, Host], note: Callable[[str], None]
) -> tuple[DomainMove, DomainView]:
    """Who has the domain, by both libvirtds; waits for a migration in transition.

    While the source's libvirtd works on it, it waits without a limit.
    """
    waited_for, since_s = None, time.monotonic()
    while True:
        view = await inspect(journal.uuid, ends)
        move = decide(view)
        if move is not DomainMove.WAIT:
            return move, view
        if view != waited_for:
            waited_for, since_s = view, time.monotonic()
            note(f"waiting: {describe(view, ends)}")
        works = view.job and view.source in (EndState.RUNNING, EndState.PAUSED, EndState.WAITING)
        if not works and time.monotonic() - since_s > _patience_s(view):
            return DomainMove.LOST if is_orphan(view) else DomainMove.UNKNOWN, view
        await asyncio.sleep(POLL_S)


async def settle_off(
    journal: DomainJournal, ends: tuple[Host, Host]
) -> tuple[DomainMove, DomainView]:
    """Where a domain that is off is, by both libvirtds; waits for silent ones.

    Neither reports whether it still works on it, so both must report the same for a while.
    """
    since_s, before = time.monotonic(), None
    while True:
        view = await inspect(journal.uuid, ends)
        if view != before:
            since_s, before = time.monotonic(), view
        move = decide_off(view, known_to_target=journal.known_to_target)
        same_s = time.monotonic() - since_s
        if move is not DomainMove.WAIT and same_s >= STEADY_S:
            return move, view
        if same_s > SILENT_S:
            return DomainMove.UNKNOWN, view
        await asyncio.sleep(POLL_S)


def _patience_s(view: DomainView) -> float:
    if is_orphan(view):
        return ORPHAN_S
    return POSTCOPY_S if EndState.POSTCOPY in (view.source, view.destination) else SILENT_S


async def inspect(uuid: str, ends: tuple[Host, Host]) -> DomainView:
    """What both ends report now."""
    source, destination = ends
    (at_source, job), (at_target, _) = await asyncio.gather(
        _ask(uuid, source, is_source=True), _ask(uuid, destination, is_source=False)
    )
    return DomainView(at_source, at_target, job)


async def _ask(uuid: str, host: Host, *, is_source: bool) -> tuple[EndState, bool]:
    try:
        async with libvirtd(host) as session:
            return await inspect_end(session, uuid, is_source=is_source)
    except HostDownError:
        return EndState.SILENT, False


async def inspect_end(session: Libvirtd, uuid: str, *, is_source: bool) -> tuple[EndState, bool]:
    """What one end reports, and (for a source) whether it works on the domain.

    A source that reports on the domain but not whether it works on it has it locked, or is silent:
    that happens while it works. A destination is not asked: that of a broken post-copy would never
    answer. Raises HostDownError.
    """
    where = await _end_state(session, uuid)
    if where in (EndState.OFF, EndState.ABSENT) or not is_source:
        return where, False
    try:
        if (await session.job(uuid)).active:
            return where, True
    except NotFoundError:
        return EndState.ABSENT, False
    except HostDownError:  # libvirt itself would wait longer for the lock than we do
        return EndState.LOCKED, False
    except LibvirtRefusedError as exc:
        locked = exc.code == ErrorCode.OPERATION_TIMEOUT
        return EndState.LOCKED if locked else EndState.SILENT, False
    # The job may have ended between the two queries, and the domain may have moved with that.
    return await _end_state(session, uuid), False


async def _end_state(session: Libvirtd, uuid: str) -> EndState:
    found = await session.condition(uuid)
    return EndState.ABSENT if found is None else end_state(*found)


def describe(view: DomainView, ends: tuple[Host, Host]) -> str:
    """Both ends, in words."""
    source, destination = ends
    text = (
        f"on {source.name} it {view.source.value}, on {destination.name} it "
        f"{view.destination.value}"
    )
    return text.replace("it does not answer", "libvirtd does not answer")


def lost(journal: DomainJournal, view: DomainView, ends: tuple[Host, Host]) -> VmLostError:
    """The error for a domain that runs nowhere."""
    return VmLostError(
        f"'{journal.vm}' runs nowhere: its memory is lost",
        why=f"it ended while it was migrated: {describe(view, ends)}",
        remedy=f"start it from its disks: vmckpt vm start {quote(journal.vm)}",
    )


async def unknown(
    journal: DomainJournal, move: DomainMove, view: DomainView, ends: tuple[Host, Host]
) -> OutcomeUnknownError:
    """The error if it is unknown who has it; it names those of its QEMUs that are alive, if
    known.
    """
    source, destination = ends
    again = f"vmckpt migrate --recover {quote(journal.vm)}"
    if move is DomainMove.BROKEN_POSTCOPY or EndState.POSTCOPY_FAILED in (
        view.source,
        view.destination,
    ):
        return OutcomeUnknownError(
            f"'{journal.vm}' waits on {destination.name} for memory that is still on {source.name}",
            why=f"{describe(view, ends)}; libvirt's way to rejoin them "
            "(VIR_MIGRATE_POSTCOPY_RESUME) crashes its daemon there (seen with 11.3), so "
            "vmckpt does not use it",
            remedy=f"if only the link was silent, {again} sees it end well; with a libvirt that "
            f"can, virsh migrate --postcopy-resume; else give its memory up: virsh destroy it on "
            f"{source.name}, then {again} leaves it stopped on {destination.name}",
        )
    silent = [
        host
        for host, where in zip(ends, (view.source, view.destination), strict=True)
        if where is EndState.SILENT
    ]
    seen = [await _processes(journal.uuid, host) for host in silent]
    if EndState.LOCKED in (view.source, view.destination):
        remedy = (
            f"wait, then: {again}; if that does not help: systemctl restart libvirtd on "
            f"{source.name} "
            "(its QEMUs live on)"
        )
    elif silent:
        names = " and ".join(host.name for host in silent)
        remedy = f"the guest was not started twice; start libvirtd on {names}, then run: {again}"
    elif view.source is EndState.WAITING and view.destination in (EndState.OFF, EndState.ABSENT):
        remedy = (
            f"it was sent, and {source.name} does not know whether it started: if the log of "
            f"its QEMU on {destination.name} shows that it did not, virsh resume it on "
            f"{source.name}, "
            f"else virsh destroy it there; then: {again}"
        )
    else:
        remedy = f"see virsh domjobinfo on {source.name}; then: {again}"
    return OutcomeUnknownError(
        f"it is not known yet where '{journal.vm}' runs",
        why="; ".join([describe(view, ends), *(text for text in seen if text)]),
        remedy=remedy,
    )


async def _processes(uuid: str, host: Host) -> str:
    """Whether the domain has a live QEMU on a host whose libvirtd is silent."""
    try:
        found = await host.find_processes(f"-uuid\0{uuid}", of_anyone=True)
    except VmckptError:
        return f"{host.name} itself does not answer"
    pids = ", ".join(str(process.pid) for process in found)
    return (
        f"its QEMU on {host.name} lives (pid {pids})" if found else f"no QEMU of it on {host.name}"
    )
