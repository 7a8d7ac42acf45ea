"""Asking both ends until it is clear who has the domain; then no more and no less than tidying."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from vmckpt.errors import HostDownError, OutcomeUnknownError, StorageError, VmckptError, VmLostError
from vmckpt.hosts.host import Host
from vmckpt.migrate.disk_files import hand_over_files, remove_files
from vmckpt.migrate.domains.journal import DomainJournal
from vmckpt.migrate.domains.whereabouts import Move, Place, View, decide, place
from vmckpt.vm.domains.flags import State
from vmckpt.vm.domains.libvirtd import libvirtd

POLL_S = 0.3
# How long an end may be silent, or in between, until nobody waits for it any more; and how long a
# post-copy whose link is silent, which QEMU goes on with by itself when the link is back.
SILENT_S, POSTCOPY_S = 15.0, 300.0


async def settle(
    journal: DomainJournal, ends: tuple[Host, Host], note: Callable[[str], None]
) -> tuple[Move, View]:
    """Who has the domain, by both libvirtds' word, waiting for what is on its way.

    While the source's libvirtd works on it, for as long as that takes.
    """
    waited_for, since_s = None, time.monotonic()
    while True:
        view = await look(journal.uuid, ends)
        move = decide(view)
        if move is not Move.WAIT:
            return move, view
        if view != waited_for:
            waited_for, since_s = view, time.monotonic()
            note(f"waiting: {describe(view, ends)}")
        works = view.job and view.source in (Place.RUNNING, Place.PAUSED, Place.WAITING)
        patience_s = POSTCOPY_S if Place.POSTCOPY in (view.source, view.target) else SILENT_S
        if not works and time.monotonic() - since_s > patience_s:
            return Move.UNKNOWN, view
        await asyncio.sleep(POLL_S)


async def look(uuid: str, ends: tuple[Host, Host]) -> View:
    """What both ends say at this moment."""
    (source, job), (target, _) = await asyncio.gather(*(_ask(uuid, host) for host in ends))
    return View(source, target, job)


async def _ask(uuid: str, host: Host) -> tuple[Place, bool]:
    try:
        async with libvirtd(host) as session:
            seen = await session.find(uuid)
            if seen is None:
                return Place.ABSENT, False
            where = place(seen.state, seen.reason)
            if where in (Place.OFF, Place.ABSENT):
                return where, False
            job = False
            with suppress(VmckptError):  # a target's libvirtd refuses to tell
                job = (await session.job(uuid)).active
            return where, job
    except HostDownError:
        return Place.SILENT, False


def describe(view: View, ends: tuple[Host, Host]) -> str:
    """Both ends, in words."""
    source, target = ends
    text = f"on {source.name} it {view.source.value}, on {target.name} it {view.target.value}"
    return text.replace("it gives no answer", "libvirtd gives no answer")


async def leave_on_source(journal: DomainJournal, target: Host) -> None:
    """The domain stays: nothing made for it on the target does."""
    await remove_files(target, journal.run, journal.disks)
    await journal.remove()


async def leave_on_target(
    journal: DomainJournal, ends: tuple[Host, Host], note: Callable[[str], None]
) -> None:
    """The domain has moved: neither its definition nor copied images stay on the source."""
    source, target = ends
    if journal.persistent:
        try:
            await _undefine(journal, source)
        except VmckptError as exc:
            note(f"its definition stays on {source.name}: {exc}")
    try:
        await hand_over_files(source, target, journal.run, journal.disks, note)
        await journal.remove()
    except (HostDownError, StorageError) as exc:
        note(f"its old images may stay on {source.name}: {exc}")


async def _undefine(journal: DomainJournal, source: Host) -> None:
    """What libvirt does itself, unless it lost sight of the target meanwhile."""
    async with libvirtd(source) as session:
        seen = await session.find(journal.uuid)
        if seen is not None and seen.state is State.SHUTOFF:
            await session.undefine(journal.uuid)


def lost(journal: DomainJournal, view: View, ends: tuple[Host, Host]) -> VmLostError:
    """The domain runs nowhere."""
    return VmLostError(
        f"'{journal.vm}' runs nowhere: its memory is lost",
        why=f"it ended while it was migrated: {describe(view, ends)}",
        remedy=f"start it from its disks: vmckpt vm start {journal.vm}",
    )


async def unknown(
    journal: DomainJournal, move: Move, view: View, ends: tuple[Host, Host]
) -> OutcomeUnknownError:
    """It cannot be said yet who has it; which QEMUs of it live is said, when that can be seen."""
    source, target = ends
    again = f"vmckpt migrate --recover {journal.vm}"
    if move is Move.BROKEN_POSTCOPY or Place.POSTCOPY_FAILED in (view.source, view.target):
        return OutcomeUnknownError(
            f"'{journal.vm}' waits on {target.name} for memory that is still on {source.name}",
            why=f"{describe(view, ends)}; libvirt's way to rejoin them "
            "(VIR_MIGRATE_POSTCOPY_RESUME) crashes its daemon on the target (seen with 11.3), so "
            "vmckpt does not use it",
            remedy=f"if only the link was silent, {again} sees it end well; with a libvirt that "
            "can, virsh migrate --postcopy-resume; else end it on both (virsh destroy) and start "
            f"it from its disks: vmckpt vm start {journal.vm}",
        )
    silent = [
        host
        for host, where in zip(ends, (view.source, view.target), strict=True)
        if where is Place.SILENT
    ]
    seen = [await _processes(journal.uuid, host) for host in silent]
    return OutcomeUnknownError(
        f"nobody knows yet where '{journal.vm}' runs",
        why="; ".join([describe(view, ends), *(text for text in seen if text)]),
        remedy=f"nothing was started twice; start libvirtd on "
        f"{' and '.join(host.name for host in silent)}, then: {again}"
        if silent
        else f"see virsh domjobinfo on {source.name}; then: {again}",
    )


async def _processes(uuid: str, host: Host) -> str:
    """Whether a QEMU of the domain lives on a host whose libvirtd is silent."""
    try:
        found = await host.find_processes(f"-uuid\0{uuid}")
    except VmckptError:
        return f"{host.name} itself gives no answer"
    pids = ", ".join(str(process.pid) for process in found)
    return (
        f"its QEMU on {host.name} lives (pid {pids})" if found else f"no QEMU of it on {host.name}"
    )
