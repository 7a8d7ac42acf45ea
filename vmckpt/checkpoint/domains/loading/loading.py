"""Have libvirt start a domain from a checkpoint, its guest running before its memory was read.

libvirt reads the save image from a pipe. The first page of each block of RAM in it is a mark, by
which that is found in the QEMU that libvirt has started. From then on its content comes from
elsewhere (`arriving.py`), and the rest of the image are the devices. libvirt knows nothing of this,
so that the domain is as `virsh restore` would have started it.

If QEMU does not allow that, all pages follow in the pipe, and the result says so.
"""

import asyncio
import secrets
from functools import partial
from pathlib import Path

from vmckpt.checkpoint.domains.loading.arriving import ArrivingMemory
from vmckpt.checkpoint.domains.loading.image_pipe import ImagePipe
from vmckpt.checkpoint.domains.loading.save_image import head_of, image_head, pages_of
from vmckpt.checkpoint.domains.planned import PlannedDomain
from vmckpt.checkpoint.facts import CheckpointFacts
from vmckpt.deadlines import poll
from vmckpt.errors import OperationFailedError
from vmckpt.hosts.processes.process import ProcessId, find_by_argument
from vmckpt.memory.missing_pages import AnonymousRam
from vmckpt.memory.private.marked import find_marked
from vmckpt.memory.ram_file import Span
from vmckpt.qemu.stream_head import StreamHead, plain_begin, plain_end, plain_page
from vmckpt.sequence.in_thread import in_thread
from vmckpt.sequence.steps import finish
from vmckpt.store.files.manifest import PAGE_CHUNK_BYTES
from vmckpt.store.store import Checkpoint
from vmckpt.vm.domains.libvirtd import Libvirtd

# How long a QEMU that has been started may take to read the mark.
_MARK_S, _MARK_POLL_S = 30.0, 0.005


class DomainLoading:
    """One domain's start. `loaded_before`: why its memory was loaded before its guest ran.

    `memory`: where it comes from; None: all of it is in the image.
    """

    def __init__(
        self,
        plan: PlannedDomain,
        point: Checkpoint,
        facts: CheckpointFacts,
        memory: ArrivingMemory | None,
    ) -> None:
        self._plan, self._point, self._facts = plan, point, facts
        self._memory, self.loaded_before = memory, ""

    async def start(self, session: Libvirtd, path: Path) -> None:
        """Have libvirt start it from a pipe at `path`; returns once its guest runs.

        Raises what libvirt says, DamagedError, StorageError, OperationFailedError: it does not run.
        """
        if self._memory is not None and not self._plan.has_private_memory:
            self._memory = None
            self.loaded_before = (
                "its XML says where its memory is, or shares it (memoryBacking, memAccess)"
            )
        memory = self._memory
        with ImagePipe(path) as pipe:
            feeding = self._feed(pipe) if memory is None else self._feed_marked(pipe, memory)
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
                if memory is not None:
                    await finish(memory.give_up())
                await finish(pipe.spoil(started))
                raise

    async def complete(self) -> None:
        """Wait until all of its memory is there. Raises as `see_to_memory`."""
        if self._memory is not None:
            await self._memory.complete()

    async def give_up(self) -> None:
        """Its guest, which ran, was ended: let nothing wait for its memory."""
        if self._memory is not None:
            await self._memory.give_up()

    async def _with_pages(self, started: "asyncio.Future[None]") -> None:
        """Wait for what may wait for pages. Raises OperationFailedError: they cannot come."""

        async def outcome() -> None:
            await asyncio.shield(started)

        await (outcome() if self._memory is None else self._memory.alive_during(outcome()))

    async def _feed(self, pipe: ImagePipe) -> None:
        head = await in_thread(partial(head_of, self._point, self._facts))
        await pipe.offer(image_head(self._plan.xml), partial(self._reader_of, pipe))
        await in_thread(partial(pipe.write, [plain_begin(head)]))
        await self._feed_all(pipe, head)

    async def _feed_all(self, pipe: ImagePipe, head: StreamHead) -> None:
        pages = pages_of(self._point, self._facts)
        await in_thread(partial(pipe.write, plain_end(head, pages)))

    async def _feed_marked(self, pipe: ImagePipe, memory: ArrivingMemory) -> None:
        await memory.prepare()
        head = await in_thread(partial(head_of, self._point, self._facts))
        marks = [secrets.token_bytes(PAGE_CHUNK_BYTES) for _ in head.absent]
        firsts = map(partial(plain_page, head), head.first_pages, marks)
        begin = plain_begin(head) + b"".join(firsts)
        qemu = await pipe.offer(image_head(self._plan.xml), partial(self._reader_of, pipe))
        await in_thread(partial(pipe.write, [begin]))
        blocks = zip(head.ram_sizes, marks, strict=True)
        found = [await self._block_of(qemu, size, mark) for size, mark in blocks]
        ram = AnonymousRam(tuple(found))
        self.loaded_before = await memory.take_over(qemu, ram)
        if self.loaded_before:
            await self._feed_all(pipe, head)
        else:
            await memory.alive_during(in_thread(partial(pipe.write, plain_end(head, ()))))

    def _reader_of(self, pipe: ImagePipe) -> ProcessId | None:
        """The QEMU of the domain that has the pipe."""
        for process in find_by_argument(f"\0-uuid\0{self._plan.uuid}\0"):
            if pipe.is_open_in(process.pid):
                return process
        return None

    async def _block_of(self, qemu: ProcessId, size_bytes: int, mark: bytes) -> Span:
        find = partial(find_marked, qemu.pid, size_bytes, mark)
        try:
            found = await poll(find, every_s=_MARK_POLL_S, within_s=_MARK_S)
        except ProcessLookupError as exc:
            raise BrokenPipeError from exc  # libvirt says why
        if found is None:
            raise OperationFailedError(
                f"the memory of '{self._plan.name}' is not found in its QEMU",
                why=f"process {qemu.pid} did not load its first pages within {_MARK_S:g} s",
                remedy="load all memory before the guest runs: --eager",
            )
        return found
