"""Have libvirt start a domain from a checkpoint, with its guest running before memory is loaded.

libvirt reads the save image from a pipe. Once the RAM is found in the QEMU that libvirt has
started (`vm/domains/loading/starting.py`), its content is delivered separately (`arriving.py`); the
rest of the image holds the devices. libvirt knows nothing of this: the domain is in the same state
as after `virsh restore`.

If QEMU does not allow that, all pages follow in the pipe, and the result says so.
"""

import asyncio
from functools import partial
from pathlib import Path

from vmckpt.checkpoint.domains.loading.arriving import ArrivingMemory
from vmckpt.checkpoint.domains.loading.save_image import head_of, pages_of
from vmckpt.checkpoint.domains.planned import PlannedDomain
from vmckpt.checkpoint.facts import CheckpointFacts
from vmckpt.qemu.stream_head import StreamHead, plain_begin, plain_end
from vmckpt.sequence.in_thread import in_thread
from vmckpt.sequence.steps import finish
from vmckpt.store.store import Checkpoint
from vmckpt.vm.domains.libvirtd import Libvirtd
from vmckpt.vm.domains.loading.image_pipe import ImagePipe
from vmckpt.vm.domains.loading.starting import begin_marked, image_head, reader_of


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
        await pipe.offer(image_head(self._plan.xml), partial(reader_of, pipe, self._plan.uuid))
        await in_thread(partial(pipe.write, [plain_begin(head)]))
        await self._feed_all(pipe, head)

    async def _feed_all(self, pipe: ImagePipe, head: StreamHead) -> None:
        pages = pages_of(self._point, self._facts)
        await in_thread(partial(pipe.write, plain_end(head, pages)))

    async def _feed_marked(self, pipe: ImagePipe, memory: ArrivingMemory) -> None:
        await memory.prepare()
        head = await in_thread(partial(head_of, self._point, self._facts))
        started = await begin_marked(
            pipe,
            head,
            image_head(self._plan.xml),
            uuid=self._plan.uuid,
            name=self._plan.name,
        )
        self.loaded_before = await memory.take_over(started.process, started.ram)
        if self.loaded_before:
            await self._feed_all(pipe, head)
        else:
            await memory.alive_during(in_thread(partial(pipe.write, plain_end(head, ()))))
