"""Copy local disks while the guest writes, so that both sides are identical at the switchover."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from vmckpt.errors import HostDownError, OperationFailedError, OutcomeUnknownError
from vmckpt.events.types import JobProgress
from vmckpt.migrate.outcome.ends import COPY_PREFIX, End, Pair
from vmckpt.migrate.steps.encryption import TlsCredentials
from vmckpt.options.migration import DISKS_SHARE
from vmckpt.preflight.migration.disks import DiskCopy
from vmckpt.qemu import block, commands
from vmckpt.qemu.monitor import CommandRefusedError, Monitor
from vmckpt.qemu.replies import QemuJob
from vmckpt.sequence.steps import finish
from vmckpt.units import format_duration
from vmckpt.vm.users.users import let_write

PORTS = (49152, 65535)
PORT_ATTEMPTS = 1000
SAMPLE_S = 0.1
# Nothing copied for this long: the link or the destination's storage is silent.
SILENCE_S = 30.0
# A guest that writes as fast as the copy proceeds keeps it from catching up.
STALL_S = 10.0
# The same while the guest is paused until its last writes are copied.
HAND_OVER_SILENCE_S = 5.0
DROP_TIMEOUT_S = 30.0


class DiskMirrors:
    """The copies of one migration: mirrors in the source's QEMU, exports in the destination's.

    The names of all they create contain the run's id. Without copies every method does nothing.
    With `write_through` the guest's writes wait for the destination from the beginning.
    """

    def __init__(
        self,
        pair: Pair,
        copies: Sequence[DiskCopy],
        *,
        run: str,
        bandwidth_bytes_per_s: int,
        write_through: bool = False,
        clock: Callable[[], float],
        emit: Callable[[JobProgress], None],
        note: Callable[[str, str], None],
    ) -> None:
        self._source, self._destination, self._copies, self._run = (
            pair.source,
            pair.destination,
            copies,
            run,
        )
        self._bandwidth, self._following = bandwidth_bytes_per_s, False
        self._writes_through = write_through
        self._clock, self._emit, self._note = clock, emit, note

    @property
    def any(self) -> bool:
        """Whether there are disks to copy."""
        return bool(self._copies)

    async def mirror(self, credentials: TlsCredentials | None) -> None:
        """Copy every disk; afterwards the copies follow the guest's writes.

        Encrypted with `credentials`, which both QEMUs have; unencrypted without. Raises
        OperationFailedError (no room, a broken link, no progress): `drop` the rest.
        """
        if not self._copies:
            return
        destination, source = await self._destination.monitor(), await self._source.monitor()
        port = await self._serve(destination, credentials)
        for copy in self._copies:
            await self._export(destination, copy)
            await self._connect(source, copy, port, credentials)
        with source.events("JOB_STATUS_CHANGE") as events:
            for copy in self._copies:
                name, speed = self._name(copy), self._bandwidth // len(self._copies)
                await block.blockdev_mirror(
                    source,
                    name,
                    copy.source_node,
                    name,
                    speed,
                    write_through=self._writes_through,
                )
            watch = CopyWatch(time.monotonic())
            while True:
                jobs = await self._jobs(source)
                self._report(jobs)
                if all(job.status == "ready" for job in jobs):
                    break
                stalls = watch.stalls(sum(job.done for job in jobs), _left(jobs), time.monotonic())
                if stalls and not self._writes_through:
                    await self._write_through(source)
                await events.next(SAMPLE_S)
        self._following = True
        if self._bandwidth:
            await self._set_speed(source)

    async def hold_to(self, bandwidth_bytes_per_s: int) -> None:
        """Change the bandwidth limit of copying and following; memory uses the rest."""
        if self._copies:
            self._bandwidth = bandwidth_bytes_per_s
            await self._set_speed(await self._source.monitor())

    async def _set_speed(self, source: Monitor) -> None:
        share = self._bandwidth // DISKS_SHARE if self._following else self._bandwidth
        for copy in self._copies:
            speed = max(share // len(self._copies), 1)
            await block.block_job_set_speed(source, self._name(copy), speed)

    async def check(self) -> None:
        """Raises OperationFailedError if a copy no longer follows the guest's writes."""
        if self._copies:
            await self._jobs(await self._source.monitor())

    async def hand_over(self) -> None:
        """With the guest stopped: complete the copies, and give them to the destination.

        Raises OperationFailedError; then only the source's disks are complete.
        """
        if not self._copies:
            return
        source = await self._source.monitor()
        began_s = time.monotonic()
        with source.events("JOB_STATUS_CHANGE") as events:
            for copy in self._copies:
                if self._bandwidth:
                    await block.block_job_set_speed(source, self._name(copy), 0)
                await block.block_job_cancel(source, self._name(copy), force=False)
            watch = CopyWatch(began_s, silence_s=HAND_OVER_SILENCE_S)
            while True:
                jobs = await self._jobs(source, ending=True)
                if all(job.concluded for job in jobs):
                    break
                watch.stalls(sum(job.done for job in jobs), _left(jobs), time.monotonic())
                await events.next(SAMPLE_S)
        # The export writes too: beside it the destination cannot take over its disks.
        destination = await self._destination.monitor()
        await block.nbd_server_stop(destination)
        for copy in self._copies:
            if copy.read_only:
                await block.blockdev_del(destination, self._name(copy))
        took = format_duration(time.monotonic() - began_s)
        self._note(
            "disk-hand-over", f"the guest was paused for {took} while its disks were handed over"
        )

    async def drop(self) -> None:
        """Undo `mirror` on the source, whose guest continues with its own disks."""
        if self._copies:
            await drop_mirrors(self._source, self._run)

    async def _serve(self, destination: Monitor, credentials: TlsCredentials | None) -> int:
        import random

        # QEMU does not report the port that it chose for 0.
        host, tls = self._destination.host, {}
        if credentials:
            tls["tls-creds"] = credentials.destination
            if credentials.authz:
                tls["tls-authz"] = credentials.authz
        first, last = host.migration_ports or PORTS
        ports = random.sample(range(first, last + 1), min(PORT_ATTEMPTS, last - first + 1))
        for port in ports:
            try:
                await block.nbd_server_start(destination, host.migration_address, port, tls)
            except CommandRefusedError as exc:
                if "in use" not in exc.description or port == ports[-1]:
                    raise
            else:
                break
        return port

    async def _export(self, destination: Monitor, copy: DiskCopy) -> None:
        node = copy.node
        if copy.read_only:
            # The guest's own node is not writable; this one is removed before the guest comes.
            node = self._name(copy)
            await let_write(self._destination.host, self._destination.files, copy.target)
            file = {"driver": "file", "filename": str(copy.target), "discard": "unmap"}
            options = {"driver": copy.format, "node-name": node, "discard": "unmap", "file": file}
            await block.blockdev_add(destination, options)
        await block.block_export_add(destination, self._name(copy), node)

    async def _connect(
        self, source: Monitor, copy: DiskCopy, port: int, credentials: TlsCredentials | None
    ) -> None:
        address = self._destination.host.migration_address
        options: dict[str, Any] = {
            "driver": "nbd",
            "node-name": self._name(copy),
            "server": {"type": "inet", "host": address, "port": str(port)},
            "export": self._name(copy),
            # Zeroes become holes, to keep sparse images sparse.
            "discard": "unmap",
            "detect-zeroes": "unmap",
        }
        if credentials:
            options["tls-creds"] = credentials.source
            if credentials.hostname:
                options["tls-hostname"] = credentials.hostname
        await block.blockdev_add(source, options)

    async def _jobs(self, source: Monitor, *, ending: bool = False) -> list[QemuJob]:
        """The mirrors, none of which has failed; `ending` ones may have concluded well."""
        jobs = await _mirrors(source, self._run)
        failed = [job for job in jobs if job.error or (job.concluded and not ending)]
        if failed or len(jobs) < len(self._copies):
            raise OperationFailedError(
                "copying the disks failed",
                why="; ".join(job.error or "a copy ended early" for job in failed)
                or "a copy was ended by another client of QEMU",
                remedy="check the destination's free space and the link between the hosts",
            )
        return jobs

    async def _write_through(self, source: Monitor) -> None:
        self._note(
            "disk-write-through",
            "the guest writes as fast as its disks are copied: now its writes wait",
        )
        for copy in self._copies:
            try:
                await block.block_job_write_through(source, self._name(copy))
            except CommandRefusedError as exc:
                raise OperationFailedError(
                    "the copy does not catch up with the guest",
                    why=f"the guest writes as fast as its disks are copied, and {exc.description}",
                    remedy="allow more bandwidth, or let the guest write less",
                ) from exc

    def _report(self, jobs: Sequence[QemuJob]) -> None:
        done, total = sum(job.done for job in jobs), sum(job.total for job in jobs)
        self._emit(JobProgress(self._clock(), "copying disks", done, total))

    def _name(self, copy: DiskCopy) -> str:
        return f"{_prefix(self._run)}{copy.number}"


class CopyWatch:
    """Detects whether copying proceeds, and whether it approaches its end."""

    def __init__(self, now_s: float, silence_s: float = SILENCE_S) -> None:
        self._silence_s = silence_s
        self._done, self._moved_s = -1, now_s
        self._least_left: int | None = None
        self._nearer_s = now_s

    def stalls(self, done: int, left: int, now_s: float) -> bool:
        """True once if it proceeds but does not approach its end.

        Raises OperationFailedError if nothing is copied.
        """
        if done != self._done:
            self._done, self._moved_s = done, now_s
        elif now_s - self._moved_s > self._silence_s:
            raise OperationFailedError(
                "copying the disks makes no progress",
                why=f"no byte has moved for {self._silence_s:g} s",
                remedy="check the network between the hosts and the destination's storage",
            )
        if self._least_left is None or left < self._least_left:
            self._least_left, self._nearer_s = left, now_s
        elif now_s - self._nearer_s > STALL_S:
            self._nearer_s = float("inf")
            return True
        return False


async def drop_mirrors(source: End, run: str) -> None:
    """End every mirror of the run in the source's QEMU, in whatever state, and close its nodes.

    Connections are cut first, so that a QEMU that waits for a silent destination answers again. A
    QEMU that has ended has none; one that is busy, or still uses a node, is asked again for 30 s.
    Raises OperationFailedError if a mirror does not end.
    """
    deadline_s, runs = time.monotonic() + DROP_TIMEOUT_S, False
    while await source.alive():
        try:
            await block.yank_nodes(await source.rescue(), _prefix(run))
            monitor = await source.monitor()
            runs = runs or (await commands.query_status(monitor)).running
            await _end_jobs(monitor, run, deadline_s, runs=runs)
            for node in await commands.query_named_block_nodes(monitor):
                if node.node_name.startswith(_prefix(run)):
                    await block.blockdev_del(monitor, node.node_name)
            return
        except (CommandRefusedError, HostDownError, OutcomeUnknownError) as exc:
            if time.monotonic() > deadline_s:
                raise _stuck(f"{exc.what}: {exc.why}") from exc
        await asyncio.sleep(SAMPLE_S)


def _stuck(why: str) -> OperationFailedError:
    return OperationFailedError(
        "a copy of a disk does not end on the source",
        why=why,
        remedy="the guest continues; its QEMU must be restarted before the next move",
    )


async def _end_jobs(monitor: Monitor, run: str, deadline_s: float, *, runs: bool) -> None:
    """With the guest paused: see `block.blockdev_mirror`.

    If this process dies meanwhile, the recovery of the migration resumes it.
    """
    try:
        if await _mirrors(monitor, run):
            if runs:
                await commands.stop(monitor)
            await _cancel(monitor, run, deadline_s)
    finally:
        if runs:
            await finish(_run_on(monitor))


async def _run_on(monitor: Monitor) -> None:
    if not (await commands.query_status(monitor)).running:
        await commands.cont(monitor)


async def _cancel(monitor: Monitor, run: str, deadline_s: float) -> None:
    with monitor.events("JOB_STATUS_CHANGE") as events:
        for job in await _mirrors(monitor, run):
            if not job.concluded:
                with suppress(CommandRefusedError):  # it is ending already
                    await block.block_job_cancel(monitor, job.id, force=True)
        while jobs := await _mirrors(monitor, run):
            for job in jobs:
                if job.concluded:
                    await commands.job_dismiss(monitor, job.id)
            if time.monotonic() > deadline_s:
                raise _stuck(f"{jobs[0].id} is '{jobs[0].status}'")
            if any(not job.concluded for job in jobs):
                await events.next(SAMPLE_S)


async def _mirrors(monitor: Monitor, run: str) -> list[QemuJob]:
    return await block.query_mirrors(monitor, _prefix(run))


def _left(jobs: Sequence[QemuJob]) -> int:
    return sum(job.total - job.done for job in jobs)


def _prefix(run: str) -> str:
    # A node's name has at most 31 characters; the run's id has 20.
    return f"{COPY_PREFIX}{run}-"
