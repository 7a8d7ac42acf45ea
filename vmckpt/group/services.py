"""The services of a group's members: one on each VM's host, and a connection to each."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, NamedTuple

from vmckpt.checkpoint.group.line import MOST_LINE_BYTES, Line
from vmckpt.checkpoint.group.member import HEAD_S
from vmckpt.checkpoint.jobs import RESTORE
from vmckpt.checkpoint.operate import StoreJob, begun
from vmckpt.errors import HostDownError, VmckptError
from vmckpt.events.types import ignore_event
from vmckpt.group.head import GroupHead
from vmckpt.hosts.processes.process import ProcessId
from vmckpt.jobs.handle import Handle
from vmckpt.sequence.steps import all_of, finish

# A member whose cut is cancelled resumes its guest at once, and then undoes the rest.
END_S = 60.0


class Service(NamedTuple):
    """One member's job, which `process` executes."""

    work: StoreJob[Any, Any]
    job: Handle[Any, Any]
    process: ProcessId


@asynccontextmanager
async def at_work(
    works: Sequence[StoreJob[Any, Any]],
) -> AsyncIterator[tuple[GroupHead, Sequence[Service]]]:
    """The services for these jobs, and their head, for the block.

    An error in the block is an error for all of them: each undoes what it can, and has ended when
    this returns. So have those that take checkpoints in any case; a restored VM's service is still
    loading its memory.
    """
    async with AsyncExitStack() as stack:
        services = await all_of(_begun(stack, work) for work in works)
        try:
            lines = await all_of(_line(service) for service in services)
        except BaseException:
            await finish(_called_off(services))
            raise
        for line in lines:
            await stack.enter_async_context(line.beating())
        head = GroupHead(dict(zip((service.work.vm for service in services), lines, strict=True)))
        try:
            yield head, services
        except BaseException as exc:
            head.give_up(str(exc) or "cancelled")
            await finish(_ended(services))
            raise
        if works[0].kind.name != RESTORE.name:
            await finish(_ended(services))


async def _begun(stack: AsyncExitStack, work: StoreJob[Any, Any]) -> Service:
    job = await stack.enter_async_context(begun(work))
    process = await job.worker()
    if process is None:
        raise HostDownError(
            f"whether the {work.kind.what} of '{work.vm}' has begun is not known",
            why=f"the connection to {work.host.name} broke",
            remedy="try again",
        )
    return Service(work, job, process)


async def _line(service: Service) -> Line:
    host, control = service.work.host, service.job.files.control
    given_up_s = asyncio.get_running_loop().time() + HEAD_S
    while not await host.await_path(control, 1.0):
        if not await host.is_alive(service.process):
            await service.job.outcome(ignore_event)
        if asyncio.get_running_loop().time() > given_up_s:
            raise HostDownError(
                f"the {service.work.kind.what} of '{service.work.vm}' does not join its group",
                why=f"its process {service.process.pid} on {host.name} has not come for "
                f"{HEAD_S:g} s: it is frozen, or the host is too busy",
                remedy=f"check {host.name}, and try again",
            )
    sock = await host.connect(control)
    reader, writer = await asyncio.open_connection(sock=sock, limit=MOST_LINE_BYTES)
    return Line(reader, writer, f"'{service.work.vm}' on {host.name}")


async def _called_off(services: Sequence[Service]) -> None:
    for service in services:
        with suppress(VmckptError):
            await service.work.host.interrupt(service.process)
    await _ended(services)


async def _ended(services: Sequence[Service]) -> None:
    await all_of(_end(service) for service in services)


async def _end(service: Service) -> None:
    with suppress(VmckptError):  # a silent host's members are unknown; they give up alone
        if await service.job.ended(END_S):
            await service.job.remove()
