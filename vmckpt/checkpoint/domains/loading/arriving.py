"""Where the memory of a domain comes from that runs before all of it was read from its image."""

from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from vmckpt.checkpoint.domains.loading.missing import (
    forget_paging,
    key_of,
    paging_files,
    see_to_memory,
)
from vmckpt.checkpoint.restore.paging import PagerProcess
from vmckpt.checkpoint.restore.requests import CheckpointSource
from vmckpt.checkpoint.secret import keep
from vmckpt.errors import OperationFailedError
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes.process import ProcessId, kill
from vmckpt.memory.missing_pages import AnonymousRam
from vmckpt.memory.private.from_file import give_content
from vmckpt.sequence.in_thread import in_thread
from vmckpt.sequence.steps import finish

T = TypeVar("T")


class ArrivingMemory(Protocol):
    """One domain's memory."""

    async def prepare(self) -> None:
        """Do what takes time, before QEMU is started. Raises StorageError."""

    async def take_over(self, qemu: ProcessId, ram: AnonymousRam) -> str:
        """From here on its content comes from here; else why all of it has to be in the image.

        Raises OperationFailedError, StorageError: it can come by neither.
        """

    async def alive_during(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work`, which may wait for pages. Raises OperationFailedError: they cannot come."""

    async def complete(self) -> None:
        """Wait until all of it is there. Raises as `see_to_memory`."""

    async def give_up(self) -> None:
        """The domain was not started: let nothing wait for pages."""


class PagedMemory:
    """Its pages come from the checkpoint when they are used, by a pager, the rest meanwhile."""

    def __init__(self, host: LocalHost, uuid: str, name: str, source: CheckpointSource) -> None:
        self._host, self._uuid, self._name, self._source = host, uuid, name, source
        self._pager: PagerProcess | None = None
        self._qemu: ProcessId | None = None

    async def prepare(self) -> None:
        """Start the pager."""
        source, key = self._source, None
        files = paging_files(self._host, self._uuid)
        await self._host.make_dir(files.path)
        if source.secret is not None:
            key = key_of(self._uuid)
            await self._host.make_private_dir(key.parent)
            keep(key, source.secret)
        where = source.location, source.checkpoint, files.path / "pager.log", None
        self._pager = await PagerProcess.start(*where, key=key)

    async def take_over(self, qemu: ProcessId, ram: AnonymousRam) -> str:
        """See `ArrivingMemory`."""
        pager = self._started()
        self._qemu = qemu
        await pager.opened()
        try:
            await pager.attach(qemu.pid, private=ram)
        except OperationFailedError as exc:
            if ram.is_guarded(qemu.pid):
                raise
            self._pager = None
            await finish(pager.end())
            await forget_paging(self._host, self._uuid)
            return exc.why
        await pager.go(self._host, paging_files(self._host, self._uuid))
        return ""

    async def alive_during(self, work: Coroutine[Any, Any, T]) -> T:
        """See `ArrivingMemory`."""
        return await (work if self._pager is None else self._pager.alive_during(work))

    async def complete(self) -> None:
        """See `ArrivingMemory`."""
        if self._pager is not None:
            await self._pager.ended()
            await see_to_memory(self._host, self._uuid, self._name)

    async def give_up(self) -> None:
        """End a QEMU that waits for pages, so that libvirt does not wait for it."""
        if self._pager is None:
            return
        if self._qemu is not None:
            await in_thread(partial(kill, self._qemu))
        await self._pager.end()
        await forget_paging(self._host, self._uuid)

    def _started(self) -> PagerProcess:
        if self._pager is None:
            raise RuntimeError("call prepare() first")
        return self._pager


class SharedContent:
    """A file in memory has all of it; QEMU copies a page when its guest writes it.

    `cannot`: why the domain cannot have it from there; "": it can.
    """

    def __init__(self, path: Path, cannot: str = "") -> None:
        self._path, self._cannot = path, cannot

    async def prepare(self) -> None:
        """It is there."""

    async def take_over(self, qemu: ProcessId, ram: AnonymousRam) -> str:
        """See `ArrivingMemory`."""
        if self._cannot:
            return self._cannot
        try:
            await finish(in_thread(partial(give_content, qemu.pid, ram, self._path)))
        except OSError as exc:
            return exc.strerror or str(exc)
        return ""

    async def alive_during(self, work: Coroutine[Any, Any, T]) -> T:
        """See `ArrivingMemory`."""
        return await work

    async def complete(self) -> None:
        """It is."""

    async def give_up(self) -> None:
        """Nothing waits."""
