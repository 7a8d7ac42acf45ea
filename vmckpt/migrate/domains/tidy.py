"""Clean up once it is clear who has a domain: nothing of it stays on the other end."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from shlex import quote

from vmckpt.deadlines import retry
from vmckpt.errors import (
    HostDownError,
    NotFoundError,
    OutcomeUnknownError,
    RefusedError,
    StorageError,
    VmckptError,
)
from vmckpt.hosts.host import Host
from vmckpt.migrate.domains.journal import DomainJournal
from vmckpt.migrate.domains.settle import POLL_S, SILENT_S, inspect_end
from vmckpt.migrate.domains.whereabouts import EndState
from vmckpt.migrate.steps.disk_files import hand_over_files, keep_files, remove_files
from vmckpt.sequence.steps import all_of
from vmckpt.vm.disks.backing import base_of_its_own
from vmckpt.vm.disks.images import remove_own
from vmckpt.vm.domains.faults import LibvirtRefusedError
from vmckpt.vm.domains.flags import ErrorCode
from vmckpt.vm.domains.libvirtd import Libvirtd
from vmckpt.vm.domains.sessions import libvirtd

# How long a source may take to notice that the domain has gone: libvirt holds its locks for 30 s.
FORGET_S = 60.0


async def leave_on_source(
    journal: DomainJournal,
    destination: Host,
    note: Callable[[str], None],
    *,
    patience_s: float = SILENT_S,
) -> None:
    """The domain stays: remove images made for it, and a new definition, from the destination.

    A destination that is silent for longer than `patience_s` is left to the next command on the
    domain: the journal stays.
    """
    try:
        if not journal.known_to_target:
            await _undefined(journal, destination, note, patience_s)
        await remove_files(destination, journal.run, journal.disks)
    except (HostDownError, OutcomeUnknownError, StorageError) as exc:
        note(_left_to_the_next(journal, destination, exc))
        await _keep(replace(journal, stayed=True), note)
    else:
        await journal.remove()


async def _undefined(
    journal: DomainJournal, destination: Host, note: Callable[[str], None], patience_s: float
) -> None:
    try:
        await _patiently(
            destination,
            None,
            patience_s,
            lambda libvirt_session: give_back(libvirt_session, journal),
        )
    except (LibvirtRefusedError, RefusedError) as exc:
        note(f"a definition of it may stay on {destination.name}: {exc}")


async def leave_on_destination(
    journal: DomainJournal,
    ends: tuple[Host, Host],
    note: Callable[[str], None],
    *,
    session: Libvirtd | None = None,
    patience_s: float = SILENT_S,
) -> None:
    """The domain has moved: remove it and its copied images from the source.

    `session` is an open one with the source's libvirtd, if any. A source that is silent for longer
    than `patience_s` is left to the next command on the domain: the journal stays.
    """
    source, destination = ends
    if not journal.moved:
        await _take_along(journal, destination, note)
        await _start_with(journal, destination, note)
        journal = replace(journal, moved=True)
        if journal.disks:
            await _keep(journal, note)
    try:
        paths = [Path(disk.source) for disk in journal.disks if not disk.keep]
        bases = await all_of(base_of_its_own(source, path) for path in paths)
        await hand_over_files(source, destination, journal.run, journal.disks, note)
        _, kept = await remove_own(source, [base for base in bases if base is not None])
        for path, why in kept.items():
            note(f"{path} stays on {source.name}: {why}")
        # They must not be removed a second time: the domain may have returned to their host.
        journal = replace(journal, disks=())
    except (HostDownError, StorageError) as exc:
        note(f"its old images may stay on {source.name}: {exc}")
    try:
        await _patiently(
            source, session, patience_s, lambda libvirt_session: forget(libvirt_session, journal)
        )
    except (HostDownError, OutcomeUnknownError) as exc:
        note(_left_to_the_next(journal, source, exc))
        await _keep(journal, note)
        return
    except VmckptError as exc:
        note(f"its definition stays on {source.name}: {exc}")
    if not journal.disks:
        await journal.remove()


async def _start_with(
    journal: DomainJournal, destination: Host, note: Callable[[str], None]
) -> None:
    """Libvirt does not tell the destination that a domain starts with its host."""
    if not journal.starts_with_host:
        return
    try:
        async with libvirtd(destination) as session:
            await session.start_with_host(journal.uuid)
    except VmckptError as exc:
        note(
            f"it does not start with {destination.name}, as it did with {journal.source}; there: "
            f"virsh autostart {quote(journal.vm)} ({exc})"
        )


async def _keep(journal: DomainJournal, note: Callable[[str], None]) -> None:
    """If it cannot be written, the earlier journal counts: both libvirtds are asked again then."""
    try:
        await journal.write()
    except StorageError as exc:
        note(str(exc))


async def _take_along(
    journal: DomainJournal, destination: Host, note: Callable[[str], None]
) -> None:
    """Remove what earlier migrations left on other hosts while the destination has the domain."""
    for left in await DomainJournal.all_left(journal.vm):
        if left.run == journal.run:
            continue
        try:
            if left.untidy != destination.name:
                await left.held_by(destination.name).write()
                continue
            if left.stayed:
                await keep_files(destination, left.run, left.disks)
            await left.remove()
        except (HostDownError, StorageError) as exc:
            note(f"what run {left.run} left on {left.untidy} may stay there: {exc}")


def _left_to_the_next(journal: DomainJournal, host: Host, exc: VmckptError) -> str:
    return (
        f"{host.name} may still have what is left of it, which is removed when it answers again, "
        f"by: vmckpt migrate --recover {quote(journal.vm)} ({exc})"
    )


async def _patiently(
    host: Host,
    session: Libvirtd | None,
    patience_s: float,
    work: Callable[[Libvirtd], Awaitable[None]],
) -> None:
    """Do the work; retry for a while if a libvirtd is being restarted."""

    async def attempt() -> None:
        nonlocal session
        given, session = session, None  # do not reuse a failed session
        async with nullcontext(given) if given else libvirtd(host) as libvirt_session:
            await work(libvirt_session)

    await retry(attempt, (HostDownError, OutcomeUnknownError), every_s=POLL_S, within_s=patience_s)


async def give_back(session: Libvirtd, journal: DomainJournal) -> None:
    """Remove a new definition from the destination; the source has the domain.

    libvirt defines it there when all of it has arrived, just before it runs. A libvirtd that dies
    in that moment ends its QEMU at its next start, but keeps the definition. Raises HostDownError;
    OutcomeUnknownError while the domain still waits there for the migration.
    """
    where, _ = await inspect_end(session, journal.uuid, is_source=False)
    if where is EndState.OFF:
        await _undefine(session, journal)
    elif where is EndState.WAITING:
        raise OutcomeUnknownError(
            f"libvirtd does not see that '{journal.vm}' will not come",
            why=f"it reports that the domain {where.value}",
            remedy=f"if that does not change, see its log on {journal.target}: journalctl -u "
            "libvirtd",
        )


async def forget(session: Libvirtd, journal: DomainJournal) -> None:
    """Make the source forget a domain that the destination has; normally libvirt does.

    A libvirtd that was restarted meanwhile notices only after a while that all has gone, or never
    learns that the destination runs the guest, and keeps the sent one, paused. Raises
    OutcomeUnknownError if that does not end, HostDownError.
    """
    given_up_s = time.monotonic() + FORGET_S
    while True:
        where, job = await inspect_end(session, journal.uuid, is_source=True)
        if where is EndState.ABSENT:
            return
        if where is EndState.OFF:
            await _undefine(session, journal)
            return
        if where is EndState.WAITING and not job:
            with suppress(LibvirtRefusedError, NotFoundError):  # libvirt has just ended it itself
                await session.destroy(journal.uuid)
        if time.monotonic() > given_up_s:
            name = quote(journal.vm)
            raise OutcomeUnknownError(
                f"libvirtd does not see that '{journal.vm}' has gone",
                why=f"to it the domain {where.value}, after {FORGET_S:g} s",
                remedy=f"virsh destroy {name} there, and virsh undefine {name}",
            )
        await asyncio.sleep(POLL_S)


async def _undefine(session: Libvirtd, journal: DomainJournal) -> None:
    """Undefine a domain that is off; its TPM's state stays.

    That may be on storage that both ends share, and the other end's guest needs it. Raises
    OutcomeUnknownError while libvirtd has the domain locked. A domain whose QEMU dies at the moment
    when libvirtd aborts a post-copy stays locked until libvirtd is restarted (seen with 11.3).
    """
    try:
        with suppress(NotFoundError):
            await session.undefine(journal.uuid, keeps_tpm=True if journal.has_tpm else None)
    except LibvirtRefusedError as exc:
        if exc.code != ErrorCode.OPERATION_TIMEOUT:
            raise
        raise OutcomeUnknownError(exc.what, why=exc.why, remedy=exc.remedy) from exc
