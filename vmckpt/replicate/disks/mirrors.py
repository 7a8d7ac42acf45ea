"""The primary's side of the disks: QEMU writes through to this process, which is an NBD server.

A blocking mirror (`copy-mode=write-blocking`) completes no write of the guest before it is here.
`stop` waits until every write has completed. So when the guest is stopped, all that it has written
is here, and a cut at that moment is exactly the epoch's.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from vmckpt.epoch.guarding import guest_paused
from vmckpt.errors import HostDownError, OperationFailedError, OutcomeUnknownError
from vmckpt.qemu import block, commands
from vmckpt.qemu.disks import nbd_server
from vmckpt.qemu.monitor import CommandRefusedError, Events, Monitor
from vmckpt.replicate.disks.intake import Intake
from vmckpt.replicate.disks.known import KnownBlocks
from vmckpt.replicate.status import ReplicaStatus
from vmckpt.replicate.wire.messages import DiskWrite, HelloDisk, decode_digests
from vmckpt.sequence.steps import finish

# Prefix of the names of mirrors' jobs and nodes in QEMU.
PREFIX = "replica-"
DROP_S, BRIEF_S = 10.0, 0.002
# QEMU's events about them.
_CHANGED, _FAILED = "JOB_STATUS_CHANGE", "BLOCK_JOB_ERROR"
# A job in any other state does not write through yet, or no longer.
_READY = "ready"
_BEGINS = ("created", "running", "paused")


class MirrorSource(NamedTuple):
    """A disk of the VM: its index in the spec, its node in QEMU, its length.

    `is_shared`: the standby has everything in its backing file.
    """

    number: int
    node: str
    size_bytes: int
    is_shared: bool = False


class Mirrors:
    """The mirrors of one VM's disks. Without disks it does nothing, and is always ready."""

    def __init__(
        self, monitor: Monitor, sources: Sequence[MirrorSource], path: Path, events: Events
    ) -> None:
        self._monitor, self._sources, self._socket, self._events = monitor, sources, path, events
        self._disks = tuple(HelloDisk(source.node, source.size_bytes) for source in sources)
        self._known = {
            at: KnownBlocks(source.size_bytes)
            for at, source in enumerate(sources)
            if not source.is_shared
        }
        self.intake = Intake(self._known)
        self._ready = set[str]()
        self._lost = ""
        self._has_begun = False
        self._ended: list[DiskWrite] = []

    @property
    def has_disks(self) -> bool:
        """Whether any disk is replicated."""
        return bool(self._sources)

    def tell(self, payload: memoryview) -> None:
        """Take in what the standby's copies hold. Raises WireError, OperationFailedError."""
        digests = decode_digests(payload, self._disks)
        try:
            self._known[digests.disk].tell(digests.first_block, bytes(digests.digests))
        except (ValueError, KeyError) as exc:
            raise OperationFailedError(
                "the standby reports invalid contents of its disks",
                why=str(exc),
                remedy="report this; install the same vmckpt on both sides",
            ) from exc

    async def are_copied(self) -> bool:
        """Whether the copies have all that the disks have; call it until they do.

        Copying begins when the standby has reported what it holds. Raises CommandRefusedError,
        OperationFailedError.
        """
        if not self._has_begun and all(known.complete for known in self._known.values()):
            self._has_begun = True
            await self._begin()
        self._check()
        if not self._has_begun or len(self._ready) < len(self._sources):
            return False
        self.intake.all_is_copied()
        self._known.clear()  # half a GiB for each TiB
        return True

    async def _begin(self) -> None:
        for source in self._sources:
            name = f"{PREFIX}{source.number}"
            server = await self._server(name)
            options = {"driver": "nbd", "node-name": name, "server": server, "export": name}
            # Not `discard`: QEMU would first zero the whole copy.
            await block.blockdev_add(self._monitor, options)
            await block.blockdev_mirror(
                self._monitor, name, source.node, name, 0, write_through=True,
                sync="top" if source.is_shared else "full",
            )  # fmt: skip

    async def _server(self, name: str) -> dict[str, str]:
        """Where QEMU finds this process: a lent one need not reach the socket, and gets its
        connection.
        """
        if not self._monitor.is_lent:
            return {"type": "unix", "path": str(self._socket)}
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self._socket))
            await self._monitor.give_fd(name, connection.fileno())
        return {"type": "fd", "str": name}

    def end_epoch(self) -> None:
        """With the guest stopped: all that it has written so far belongs to the epoch, see `ended`.

        Raises OperationFailedError if a write may be missing.
        """
        self._check()
        self._ended = self.intake.cut()

    def ended(self) -> list[DiskWrite]:
        """What was written in the epoch that ended last."""
        return self._ended

    def lost(self, which: str) -> None:
        """QEMU has closed a mirror's connection."""
        self._lost = self._lost or f"QEMU has closed the mirror of {which}"

    def added_to(self, status: ReplicaStatus) -> ReplicaStatus:
        """The status with the bytes written and copied, and how many of them the standby had."""
        if not self._sources:
            return status
        intake = self.intake
        return replace(
            status, disk_bytes=intake.written_bytes, disk_bytes_not_sent=intake.same_bytes
        )

    def _check(self) -> None:
        """Process QEMU's events about its jobs: it sends them before it answers a later command."""
        for event in self._events.drain():
            data: Any = event["data"]
            if event["event"] == _FAILED:
                self._lost = self._lost or f"the mirror {data['device']} cannot {data['operation']}"
                continue
            name, status = data["id"], data["status"]
            if not name.startswith(PREFIX) or status in _BEGINS:
                continue
            if status == _READY:
                self._ready.add(name)
            elif status != "standby":
                self._lost = self._lost or f"the mirror {name} is '{status}'"
        if self.intake.is_flooded:
            self._lost = self._lost or "QEMU wrote without end while it was to stop its guest"
        if self._lost:
            raise OperationFailedError(
                "a disk is no longer mirrored",
                why=self._lost,
                remedy="see the VM's stderr.log, and protect it again",
            )


@asynccontextmanager
async def mirrored(
    monitor: Monitor,
    sources: Sequence[MirrorSource],
    path: Path,
    tell_guard: Callable[[str], None],
    let_in: Callable[[Path], None],
) -> AsyncIterator[Mirrors]:
    """Mirrors of the disks, for the block; they are removed from QEMU afterwards.

    `path`: of the socket, to which `let_in` lets QEMU connect.

    The guest is paused for a moment at the end, watched by its guard. Raises OSError (no socket at
    that path).
    """
    with monitor.events(_CHANGED, _FAILED) as events:
        mirrors = Mirrors(monitor, sources, path, events)
        exports = {
            f"{PREFIX}{source.number}": _Taken(mirrors, at, source)
            for at, source in enumerate(sources)
        }
        if not sources:
            yield mirrors
            return
        async with nbd_server.serving(path, exports):
            try:
                let_in(path)
                await drop_mirrors(monitor, tell_guard)  # left by a service that was killed
                yield mirrors
            finally:
                mirrors.intake.drop()
                with suppress(HostDownError, OutcomeUnknownError):  # its QEMU has ended
                    await finish(drop_mirrors(monitor, tell_guard))


class _Taken:
    """One disk, as the NBD server sees it."""

    def __init__(self, mirrors: Mirrors, at: int, source: MirrorSource) -> None:
        self._mirrors, self._at = mirrors, at
        self._name = f"disk{source.number}"
        self._size_bytes = source.size_bytes

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    async def write(self, offset_bytes: int, data: bytes) -> None:
        await self._mirrors.intake.write(self._at, offset_bytes, data)

    async def zero(self, offset_bytes: int, length_bytes: int) -> None:
        await self._mirrors.intake.zero(self._at, offset_bytes, length_bytes)

    def left(self) -> None:
        self._mirrors.lost(self._name)


async def drop_mirrors(monitor: Monitor, tell_guard: Callable[[str], None]) -> None:
    """End every mirror in QEMU, in any state; the guest continues with its own disks.

    The guest is paused for that: see `block.blockdev_mirror`. Raises OperationFailedError if one
    does not end, HostDownError, OutcomeUnknownError.
    """
    if await block.query_mirrors(monitor, PREFIX):
        async with guest_paused(monitor, tell_guard):
            await _end_jobs(monitor)
    for node in await commands.query_named_block_nodes(monitor):
        if node.node_name.startswith(PREFIX):
            await block.blockdev_del(monitor, node.node_name)


async def _end_jobs(monitor: Monitor) -> None:
    given_up_s = asyncio.get_running_loop().time() + DROP_S
    while jobs := await block.query_mirrors(monitor, PREFIX):
        for job in jobs:
            with suppress(CommandRefusedError):  # it is ending, or has gone
                if job.concluded:
                    await commands.job_dismiss(monitor, job.id)
                else:
                    await block.block_job_cancel(monitor, job.id, force=True)
        if asyncio.get_running_loop().time() > given_up_s:
            raise OperationFailedError(
                "a mirror of a disk does not end",
                why=f"{jobs[0].id} is '{jobs[0].status}'",
                remedy="the guest continues; its QEMU must be restarted before it is moved",
            )
        await asyncio.sleep(BRIEF_S)
