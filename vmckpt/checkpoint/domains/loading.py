"""Have libvirt start a domain from a checkpoint, and load its memory while its guest runs.

libvirt reads the save image from a pipe. The first page of RAM in it is a mark, by which the RAM is
found in the QEMU that libvirt has started. A pager takes it over: from then on all of it is
missing, and comes when it is used. The rest of the image are the devices. libvirt knows nothing of
this, so that the domain is as `virsh restore` would have started it.

If QEMU may not be given a userfaultfd, all pages follow in the pipe, and the result says so.
"""

import asyncio
import secrets
from functools import partial
from pathlib import Path

from vmckpt.checkpoint.domains.image_pipe import ImagePipe
from vmckpt.checkpoint.domains.missing import forget_paging, key_of, paging_files, see_to_memory
from vmckpt.checkpoint.domains.planned import PlannedDomain
from vmckpt.checkpoint.domains.save_image import head_of, image_head, pages_of
from vmckpt.checkpoint.facts import CheckpointFacts
from vmckpt.checkpoint.restore.paging import PagerProcess
from vmckpt.checkpoint.restore.requests import CheckpointSource
from vmckpt.checkpoint.secret import keep
from vmckpt.deadlines import poll
from vmckpt.errors import OperationFailedError
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes.process import ProcessId, find_by_argument, kill
from vmckpt.memory.missing_pages import AnonymousRam
from vmckpt.memory.private.marked import find_marked
from vmckpt.qemu.stream_head import StreamHead, plain_begin, plain_end, plain_page
from vmckpt.sequence.in_thread import in_thread
from vmckpt.sequence.steps import finish
from vmckpt.store.files.manifest import PAGE_CHUNK_BYTES
from vmckpt.store.store import Checkpoint
from vmckpt.vm.domains.libvirtd import Libvirtd

# How long a QEMU that has been started may take to read the mark.
_MARK_S, _MARK_POLL_S = 30.0, 0.005


class DomainLoading:
    """One domain's start. `loaded_before`: why its memory was loaded before its guest ran."""

    def __init__(
        self,
        host: LocalHost,
        plan: PlannedDomain,
        point: Checkpoint,
        facts: CheckpointFacts,
        source: CheckpointSource,
    ) -> None:
        self._host, self._plan, self._source = host, plan, source
        self._point, self._facts = point, facts
        self._pager: PagerProcess | None = None
        self._qemu: ProcessId | None = None
        self.loaded_before = ""

    async def start(self, session: Libvirtd, path: Path, *, lazily: bool) -> None:
        """Have libvirt start it from a pipe at `path`; returns once its guest runs.

        Raises what libvirt says, DamagedError, StorageError, OperationFailedError: it does not run.
        """
        if lazily and not self._plan.has_private_memory:
            lazily, self.loaded_before = False, "its XML says where its memory is (memoryBacking)"
        with ImagePipe(path) as pipe:
            feeding = self._feed_lazily(pipe) if lazily else self._feed(pipe)
            started = asyncio.ensure_future(session.restore(path))
            fed = asyncio.ensure_future(feeding)
            try:
                await asyncio.wait({started, fed}, return_when=asyncio.FIRST_COMPLETED)
                if not fed.done():  # libvirt refuses the image
                    fed.cancel()
                    await asyncio.wait({fed})
                elif not isinstance(fed.exception(), BrokenPipeError):  # then libvirt says why
                    fed.result()
                pipe.close()
                await self._with_pages(started)
            except BaseException:
                await finish(self._give_up())
                await finish(pipe.spoil(started))
                raise

    async def complete(self) -> None:
        """Wait until all of its memory is there. Raises as `see_to_memory`."""
        if self._pager is not None:
            await self._pager.ended()
            await see_to_memory(self._host, self._plan.uuid, self._plan.name)

    async def _with_pages(self, started: "asyncio.Future[None]") -> None:
        """Wait for what may wait for pages. Raises OperationFailedError: the pager died."""

        async def outcome() -> None:
            await asyncio.shield(started)

        await (outcome() if self._pager is None else self._pager.alive_during(outcome()))

    async def _feed(self, pipe: ImagePipe) -> None:
        head = await in_thread(partial(head_of, self._point, self._facts))
        await pipe.offer(image_head(self._plan.xml), partial(self._reader_of, pipe))
        await in_thread(partial(pipe.write, [plain_begin(head)]))
        await self._feed_all(pipe, head)

    async def _feed_all(self, pipe: ImagePipe, head: StreamHead) -> None:
        pages = pages_of(self._point, self._facts)
        await in_thread(partial(pipe.write, plain_end(head, pages)))

    async def _feed_lazily(self, pipe: ImagePipe) -> None:
        self._pager = pager = await self._new_pager()
        head = await in_thread(partial(head_of, self._point, self._facts))
        mark = secrets.token_bytes(PAGE_CHUNK_BYTES)
        begin = plain_begin(head) + plain_page(head, 0, mark)
        qemu = await pipe.offer(image_head(self._plan.xml), partial(self._reader_of, pipe))
        await in_thread(partial(pipe.write, [begin]))
        ram = await self._ram_of(qemu, mark)
        await pager.opened()
        if await self._is_taken_over(pager, qemu, ram):
            rest = in_thread(partial(pipe.write, plain_end(head, ())))
            await pager.alive_during(rest)
        else:
            await self._feed_all(pipe, head)

    async def _new_pager(self) -> PagerProcess:
        uuid, source, key = self._plan.uuid, self._source, None
        files = paging_files(self._host, uuid)
        await self._host.make_dir(files.path)
        if source.secret is not None:
            key = key_of(uuid)
            await self._host.make_private_dir(key.parent)
            keep(key, source.secret)
        where = source.location, source.checkpoint, files.path / "pager.log", None
        return await PagerProcess.start(*where, key=key)

    def _reader_of(self, pipe: ImagePipe) -> ProcessId | None:
        """The QEMU of the domain that has the pipe."""
        for process in find_by_argument(f"\0-uuid\0{self._plan.uuid}\0"):
            if pipe.is_open_in(process.pid):
                self._qemu = process
                return process
        return None

    async def _ram_of(self, qemu: ProcessId, mark: bytes) -> AnonymousRam:
        find = partial(find_marked, qemu.pid, self._facts.memory_bytes, mark)
        try:
            found = await poll(find, every_s=_MARK_POLL_S, within_s=_MARK_S)
        except ProcessLookupError as exc:
            raise BrokenPipeError from exc  # libvirt says why
        if found is None:
            raise OperationFailedError(
                f"the memory of '{self._plan.name}' is not found in its QEMU",
                why=f"process {qemu.pid} did not load the first page within {_MARK_S:g} s",
                remedy="load all memory before the guest runs: --eager",
            )
        return found

    async def _is_taken_over(self, pager: PagerProcess, qemu: ProcessId, ram: AnonymousRam) -> bool:
        """Whether its memory comes by the pager from now on; else all of it has to be in the pipe.

        Raises OperationFailedError, StorageError: it can come by neither.
        """
        try:
            await pager.attach(qemu.pid, private=ram)
        except OperationFailedError as exc:
            if ram.is_guarded(qemu.pid):
                raise
            self.loaded_before = exc.why
            self._pager = None
            await finish(pager.end())
            await forget_paging(self._host, self._plan.uuid)
            return False
        await pager.go(self._host, paging_files(self._host, self._plan.uuid))
        return True

    async def _give_up(self) -> None:
        """End a QEMU that waits for pages, so that libvirt does not wait for it."""
        if self._pager is None:
            return
        if self._qemu is not None:
            await in_thread(partial(kill, self._qemu))
        await self._pager.end()
        await forget_paging(self._host, self._plan.uuid)
