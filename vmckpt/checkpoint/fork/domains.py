"""Fork a libvirt domain: many domains from one checkpoint. Runs on their host.

Each is a copy that libvirt starts as any other (`restore.py`), but its memory is the checkpoint's,
in one file that all of them map: the kernel copies a page when a fork writes it. Its disks are
overlays. A QEMU that may not map the file gets memory of its own, and the result says so.
"""

import os
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

from vmckpt.checkpoint.catalogue.location import reading
from vmckpt.checkpoint.domains.images import SharedBases
from vmckpt.checkpoint.domains.loading.arriving import SharedContent
from vmckpt.checkpoint.domains.loading.loading import DomainLoading
from vmckpt.checkpoint.domains.planned import PlannedDomain, plan_copy
from vmckpt.checkpoint.domains.restore import (
    FORK,
    DomainRestoring,
    entitled,
    recorded,
    require_trusted,
)
from vmckpt.checkpoint.facts import CheckpointFacts, usable_facts
from vmckpt.checkpoint.fork.fork import Forked, ForkOptions
from vmckpt.checkpoint.fork.room import ForkRoom, load_content, room_files, room_for_all
from vmckpt.checkpoint.restore.requests import CheckpointSource
from vmckpt.errors import VmckptError
from vmckpt.hosts.inventory.inventory import check_name
from vmckpt.hosts.local import LocalHost
from vmckpt.memory.ram_file import open_fd
from vmckpt.sequence.in_thread import in_thread
from vmckpt.sequence.steps import finish
from vmckpt.state.durable import storage_errors
from vmckpt.store.store import Checkpoint
from vmckpt.vm.domains.sessions import libvirtd
from vmckpt.vm.paths import IN_MEMORY


class _HeldFork(NamedTuple):
    """A fork to make, its name held; or why it cannot be made."""

    plan: PlannedDomain
    error: str = ""


async def fork_domain(
    host: LocalHost, source: CheckpointSource, options: ForkOptions, *, run: str
) -> list[Forked]:
    """Make the forks one after the other; a failed one leaves nothing behind.

    `run` is this run's id. Raises RefusedError, NotFoundError, StorageError: none can be made.
    """
    async with reading(source.location, source.checkpoint, source.secret) as point:
        facts = usable_facts(point.manifest)
        await require_trusted(point, source, host)
        plans = [
            plan_copy(
                facts,
                check_name(name, "VM"),
                keep_macs=False,
                plugged=options.plugged,
                overlays=True,
            )
            for name in options.names
        ]
        async with AsyncExitStack() as held:
            # First, because loading what they share takes long.
            forks = [await _entitled(plan, host, held) for plan in plans]
            work = _DomainForking(host, point, facts, source)
            return await work.run(forks, run, overcommit=options.overcommit)


async def _entitled(plan: PlannedDomain, host: LocalHost, held: AsyncExitStack) -> _HeldFork:
    """Hold its name until `held` ends."""
    try:
        await held.enter_async_context(entitled(plan, FORK, host, in_place=False))
    except (VmckptError, OSError) as exc:
        return _HeldFork(plan, str(exc))
    return _HeldFork(plan)


class _DomainForking:
    """All forks of one request."""

    def __init__(
        self,
        host: LocalHost,
        point: Checkpoint,
        facts: CheckpointFacts,
        source: CheckpointSource,
    ) -> None:
        self._host, self._point, self._facts, self._source = host, point, facts, source
        self._bases = SharedBases(point)

    async def run(self, forks: Sequence[_HeldFork], run: str, *, overcommit: bool) -> list[Forked]:
        """Make them."""
        if all(fork.error for fork in forks):
            return [Forked(fork.plan.name, 0.0, fork.error) for fork in forks]
        room = ForkRoom(len(forks), self._facts.memory_bytes, IN_MEMORY, overcommit)
        async with room_for_all(self._host, run, self._point, room):
            content = room_files(run).ram(IN_MEMORY)
            await finish(in_thread(partial(self._load, content)))
            return [await self._one(fork, content) for fork in forks]

    def _load(self, path: Path) -> None:
        with storage_errors(f"write {path}"):
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with open_fd(os.open(path, flags, 0o600)) as fd:
                load_content(fd, self._point, self._facts.memory_bytes)

    async def _one(self, fork: _HeldFork, content: Path) -> Forked:
        plan = fork.plan
        if fork.error:
            return Forked(plan.name, 0.0, fork.error)
        memory = SharedContent(content, plan.cannot_share)
        loading = DomainLoading(plan, self._point, self._facts, memory)
        try:
            # A new connection: if libvirtd was restarted, earlier ones are closed.
            async with libvirtd(self._host) as session:
                work = DomainRestoring(
                    plan,
                    self._point,
                    self._facts,
                    host=self._host,
                    session=session,
                    old=None,
                    bases=self._bases,
                )
                restored = await work.run(loading, keep_macs=False)
        except (VmckptError, OSError) as exc:
            return Forked(plan.name, 0.0, str(exc))
        manifest = self._point.manifest
        left = await recorded(self._host, plan.uuid, manifest, self._source.location)
        return Forked(plan.name, restored.running_ms, "", (*restored.warnings, *left))
