"""The standby's side of the disks: writes wait for their epoch, and are applied with it or never.

An epoch's writes arrive in its frames and wait in memory (the primary ends an epoch early rather
than let them grow large). When all of them are here, space is reserved for them, so that applying
them cannot fail for lack of it. Then the epoch is acknowledged, and a thread applies it after the
acknowledgement. Before that is done, neither is the next epoch acknowledged, nor does a guest
continue.

A service that dies while applying leaves copies that match no epoch. That does no harm: the
replica's memory and devices are lost with it, and the next standby uses such a file only as a base,
and reports block by block what it holds.
"""

import asyncio
import errno
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from vmckpt.errors import OperationFailedError, StorageError
from vmckpt.replicate.disks.copies import StandbyFile
from vmckpt.replicate.disks.image import WritableImage, opened
from vmckpt.replicate.disks.known import blocks_of
from vmckpt.replicate.wire.messages import Digests, DiskWrite, HelloDisk
from vmckpt.sequence.in_thread import in_thread_at_last
from vmckpt.sequence.steps import to_the_end

# Digests in one message: those of 256 MiB.
DIGESTS_AT_ONCE = 4096
T = TypeVar("T")


class DisksJournal:
    """The copies of all disks, in the order in which HELLO names them.

    `are_shared`: they are the disks themselves, on storage that both hosts share, and hold what
    the primary's held when it began.
    """

    def __init__(
        self, images: Sequence[tuple[Path, WritableImage]], *, are_shared: bool = False
    ) -> None:
        self._images, self._are_shared = images, are_shared
        self._applying: asyncio.Future[None] | None = None

    @property
    def applied_bytes(self) -> int:
        """How many bytes were written to the copies so far."""
        return sum(image.written_bytes for _, image in self._images)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being applied."""
        return self._applying is None or self._applying.done()

    @property
    def is_sound(self) -> bool:
        """False after a failure to apply accepted writes."""
        done = self._applying if self._applying and self._applying.done() else None
        return done is None or done.exception() is None

    def require_same(self, disks: Sequence[HelloDisk]) -> None:
        """Require that the copies are of these disks. Raises OperationFailedError."""
        ours = [image.size_bytes for _, image in self._images]
        theirs = [disk.size_bytes for disk in disks]
        if ours != theirs:
            raise OperationFailedError(
                "the primary's disks differ from the standby's",
                why=f"it has disks of {theirs} bytes, here are copies of {ours}",
                remedy="start again: vmckpt replicate start",
            )

    async def digests(self) -> AsyncIterator[Digests]:
        """What the copies hold before anything is applied, unless that is known.

        Raises StorageError.
        """
        if self._are_shared:
            return
        for number, (path, image) in enumerate(self._images):
            for first in range(0, blocks_of(image.size_bytes), DIGESTS_AT_ONCE):
                work = partial(image.digests, first, DIGESTS_AT_ONCE)
                outcome = await self._in_thread(path, work)
                yield Digests(number, first, outcome)

    async def ready_for(self, writes: Sequence[DiskWrite]) -> None:
        """Wait until earlier writes are applied, and reserve space for `writes`.

        Raises StorageError: none of them is applied.
        """
        await self.applied()
        await self._each(writes, lambda image, some: image.reserve(some))

    def take(self, writes: Sequence[DiskWrite]) -> None:
        """Apply them from now on; they belong to this replica."""
        if writes:
            self._applying = asyncio.ensure_future(
                self._each(writes, lambda image, some: image.apply(some))
            )

    async def applied(self) -> None:
        """Return when all accepted writes are applied. Raises StorageError: copies are unusable."""
        if self._applying is not None:
            await asyncio.shield(self._applying)

    async def flush(self) -> None:
        """Make everything that was applied durable. Raises StorageError."""
        for path, image in self._images:
            await self._in_thread(path, image.flush)

    async def _each(
        self, writes: Sequence[DiskWrite], do: Callable[[WritableImage, Sequence[DiskWrite]], None]
    ) -> None:
        for number, (path, image) in enumerate(self._images):
            if some := [write for write in writes if write.disk == number]:
                await self._in_thread(path, partial(do, image, some))

    async def _in_thread(self, path: Path, work: Callable[[], T]) -> T:
        try:
            return await in_thread_at_last(work)
        except OSError as exc:
            raise _unusable(path, exc) from exc


@asynccontextmanager
async def journal_of(
    copies: Sequence[StandbyFile], *, are_shared: bool = False
) -> AsyncIterator[DisksJournal]:
    """A journal before the copies, for the block; at its end no write is in progress.

    Raises OSError, ValueError (not a copy as `prepare` makes them).
    """
    with ExitStack() as stack:
        journal = DisksJournal(
            [
                (copy.path, stack.enter_context(opened(copy.path, copy.image_format)))
                for copy in copies
            ],
            are_shared=are_shared,
        )
        try:
            yield journal
        finally:
            with suppress(StorageError):  # already reported
                await to_the_end(journal.applied())


def _unusable(path: Path, exc: OSError) -> StorageError:
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(
            f"the standby has no room for {path}",
            why=exc.strerror or str(exc),
            remedy="free space there, and protect the VM again",
        )
    return StorageError(
        f"the standby cannot use its copy {path}",
        why=exc.strerror or str(exc),
        remedy="check that host's storage",
    )
