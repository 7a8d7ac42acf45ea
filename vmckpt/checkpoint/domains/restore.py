"""Restore a domain's checkpoint into libvirt: the domain itself, or a copy. Runs on its host.

libvirt starts the domain from a save image that is made of the checkpoint, so that it is the same
domain as before, with nothing of vmckpt's in it. Its memory is loaded while the guest runs, or
before (`loading/loading.py`). Its images: `images.py`.

In place, the domain's guest is first saved by libvirt to a file. Until libvirt has started the new
guest everything is undone: the images get their content back, and the old guest continues from
that file. `record.py` guarantees this however the process ends.
"""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from vmckpt.checkpoint.catalogue.location import reading
from vmckpt.checkpoint.disks.qcow2 import write_image
from vmckpt.checkpoint.domains.images import SharedBases, write_content, write_over_base
from vmckpt.checkpoint.domains.loading.arriving import PagedMemory
from vmckpt.checkpoint.domains.loading.loading import DomainLoading
from vmckpt.checkpoint.domains.loading.missing import see_to_memory
from vmckpt.checkpoint.domains.loading.save_image import variables_bytes
from vmckpt.checkpoint.domains.planned import PlannedDomain, plan_copy, plan_itself
from vmckpt.checkpoint.domains.record import (
    PendingDomain,
    Phase,
    files_of,
    image_of,
    old_of,
    settle_all,
    settle_restore,
    write_down,
)
from vmckpt.checkpoint.domains.settle import AGAIN_S, SETTLE_S, settle
from vmckpt.checkpoint.facts import RAM, CheckpointFacts, usable_facts
from vmckpt.checkpoint.group.member import ALONE, Alone, Member
from vmckpt.checkpoint.history import History
from vmckpt.checkpoint.restore.making import proof_of, take_name
from vmckpt.checkpoint.restore.planned import replaced_file, standing_of
from vmckpt.checkpoint.restore.requests import CheckpointSource, Restored, RestoreOptions
from vmckpt.checkpoint.whole import saved_bytes
from vmckpt.deadlines import retry
from vmckpt.errors import (
    BusyError,
    HostDownError,
    NotFoundError,
    RefusedError,
    StorageError,
    VmckptError,
)
from vmckpt.hosts.host import Promise
from vmckpt.hosts.inventory.directories import state_dir
from vmckpt.hosts.inventory.inventory import check_name, local_host
from vmckpt.hosts.local import LocalHost
from vmckpt.preflight.checkpoint import require_replaceable
from vmckpt.preflight.domains.replaceable import loss_of
from vmckpt.sequence.in_thread import in_thread
from vmckpt.sequence.steps import finish, to_the_end
from vmckpt.state.durable import make_dir_durably, storage_errors
from vmckpt.store.files.manifest import Manifest
from vmckpt.store.store import Checkpoint
from vmckpt.units import format_size
from vmckpt.vm.disks.shared_storage import is_device
from vmckpt.vm.domains.definition.parts import parts_of
from vmckpt.vm.domains.inventory import Domain, as_domain, seen_again
from vmckpt.vm.domains.libvirtd import Libvirtd
from vmckpt.vm.domains.process import find_qemu
from vmckpt.vm.domains.running import domain_dir
from vmckpt.vm.domains.sessions import libvirtd
from vmckpt.vm.inventory import homes
from vmckpt.vm.lifecycle import owner
from vmckpt.vm.paths import lock_path, new_qemu_id

# Of a directory for images: libvirt's QEMUs, which run as another user, must reach theirs.
IMAGES_MODE = 0o711
NO_AGENT = "the guest's clock shows the time of the checkpoint: set it, or let it synchronize"
RESTORE, FORK = "checkpoint restore", "fork"
_OTHER_NAME = {FORK: "choose another name for the forks (--name), or remove it"}
NEW_MACS = "the guest learns of its new MAC addresses when it boots next"


async def restore_domain(
    host: LocalHost,
    source: CheckpointSource,
    options: RestoreOptions,
    running: Callable[[Restored], None],
    *,
    member: Member | Alone = ALONE,
) -> None:
    """Restore it; `running` is called when the guest runs.

    A `member` is restored together with the others of its group. Raises RefusedError,
    NotFoundError, BusyError, LibvirtRefusedError, StorageError: nothing was changed.
    """
    async with reading(source.location, source.checkpoint, source.secret) as point:
        facts = usable_facts(point.manifest)
        await require_trusted(point, source, host)
        plan = _plan(facts, options, host)
        memory = None if options.eager else PagedMemory(host, plan.uuid, plan.name, source)
        async with entitled(plan, RESTORE, host, in_place=options.in_place) as (session, old):
            loading = DomainLoading(plan, point, facts, memory)
            work = DomainRestoring(plan, point, facts, host=host, session=session, old=old)
            restored = await work.run(loading, keep_macs=options.keep_macs, member=member)
            warnings = await recorded(host, plan.uuid, point.manifest, source.location)
            running(replace(restored, warnings=(*restored.warnings, *warnings)))
            await to_the_end(loading.complete())


async def recorded(
    host: LocalHost, uuid: str, manifest: Manifest, location: str
) -> tuple[str, ...]:
    """Record what the domain was restored as; returns why that failed, in words."""
    path = domain_dir(host, uuid).point
    history = History.parse(await host.read_text(path))
    try:
        await host.write_text(
            path, history.then(manifest.id, host, location, manifest.sequence).text
        )
    except StorageError as exc:  # a full disk: the domain runs all the same
        return (f"{exc.what}: {exc.why}",)
    return ()


async def require_trusted(point: Checkpoint, source: CheckpointSource, host: LocalHost) -> None:
    """Its XML may name anything of the host. Raises RefusedError."""
    standing = await standing_of(
        point.manifest, host, known=source.known, is_foreign=source.is_foreign
    )
    if standing.is_foreign and not standing.is_trusted:
        raise RefusedError(
            f"the checkpoint of '{point.manifest.vm}' was not taken by this site",
            why="libvirt would open everything that its domain's XML names",
            remedy="do not restore it; or, if you trust its origin, add --trust",
        )


def _plan(facts: CheckpointFacts, options: RestoreOptions, host: LocalHost) -> PlannedDomain:
    if options.name is None:
        return plan_itself(facts)
    return plan_copy(
        facts,
        check_name(options.name, "VM"),
        keep_macs=options.keep_macs,
        plugged=options.plugged,
    )


@asynccontextmanager
async def entitled(
    plan: PlannedDomain, what: str, host: LocalHost, *, in_place: bool
) -> AsyncIterator[tuple[Libvirtd, Domain | None]]:
    """Hold the domain's name for the block; yields the domain that is to be replaced, if any.

    `what`: the operation. Raises RefusedError, NotFoundError, BusyError.
    """
    action = owner(what)
    name_lock = local_host().lock(state_dir() / "names" / plan.name, action)
    await settle_all(host)
    async with (
        name_lock,
        host.lock(lock_path(host.state_dir, plan.name), action),
        libvirtd(host) as session,
    ):
        await see_to_memory(host, plan.uuid, plan.name)
        await settle_restore(host, plan.uuid, session)
        await settle(host, plan.uuid)
        if in_place:
            seen = await session.find(plan.uuid)
            if seen is None:
                raise NotFoundError(
                    f"there is no domain '{plan.name}' on {host.name} that it could replace",
                    why=f"its libvirtd knows no domain {plan.uuid}",
                    remedy="leave out --in-place, or name the host that has it: --host",
                )
            yield session, as_domain(host, seen)
            return
        names = {word for one in await session.names() for word in (one.uuid, one.name)}
        if {plan.uuid, plan.name} & names or await homes(plan.name, [host]):
            raise RefusedError(
                f"there is a VM '{plan.name}' already",
                why=f"on host {host.name}",
                remedy=_OTHER_NAME.get(what, "restore it --in-place, or make a copy: --as NAME"),
            )
        yield session, None


class DomainRestoring:
    """One restore. `bases`: the images that its new ones are based on, if they are overlays."""

    def __init__(
        self,
        plan: PlannedDomain,
        point: Checkpoint,
        facts: CheckpointFacts,
        *,
        host: LocalHost,
        session: Libvirtd,
        old: Domain | None,
        bases: SharedBases | None = None,
    ) -> None:
        self._plan, self._point, self._facts = plan, point, facts
        self._bases = bases or SharedBases(point)
        # Memory for forks, which have their bases in common, is reserved for all of them.
        self._reserves = old is None and bases is None
        self._host, self._session, self._old = host, session, old
        self._files = files_of(host, plan.uuid, new_qemu_id())

    async def run(
        self, loading: DomainLoading, *, keep_macs: bool, member: Member | Alone = ALONE
    ) -> Restored:
        """Run it. Raises as `restore_domain`."""
        began_s = time.monotonic()
        pending = self._pending()
        await (self._require_new_images() if self._old is None else self._require_same())
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self._settle)
            await write_down(self._host, pending)
            await self._host.make_dir(self._files.path)
            await (self._reserve_memory() if self._reserves else self._require_room())
            await finish(in_thread(self._write_images))
            ready_s = time.monotonic()
            if self._old is not None:
                await self._switch(pending)
            # The old guest is in libvirt's file now: writing it takes longer than others wait.
            await member.all_ready()
            await member.all_switched()
            await to_the_end(self._started(loading, pending, member))
            ran_s = time.monotonic()
        # Left by `_settle`: the domain runs, so that the restore is finished.
        warnings = [NO_AGENT]
        if self._plan.is_copy and not keep_macs and self._facts.macs:
            warnings.append(NEW_MACS)
        if loading.loaded_before:
            warnings.append(f"all memory was loaded before the guest ran: {loading.loaded_before}")
        return Restored(
            vm=self._plan.name,
            host=self._host.name,
            checkpoint=self._point.manifest.id,
            preflight_ms=0.0,
            disks_ms=round((ready_s - began_s) * 1e3, 1),
            running_ms=round((ran_s - began_s) * 1e3, 1),
            ran_unix_s=time.time(),
            warnings=tuple(warnings),
            settled=True,
        )

    def _pending(self) -> PendingDomain:
        paths = [str(self._file(image.path)) for image in self._plan.images]
        return PendingDomain(
            name=self._plan.name,
            uuid=self._plan.uuid,
            id=self._files.qemu_id,
            images=tuple(paths),
            replaces=self._old is not None,
            was_active=self._old is not None and self._old.is_active,
            definition=self._plan.definition,
        )

    def _file(self, path: Path) -> Path:
        """The file that gets the image's content. Raises RefusedError."""
        return path if self._old is None else replaced_file(path)

    async def _require_new_images(self) -> None:
        for image in self._plan.images:
            if await is_device(self._host, image.path):
                raise RefusedError(
                    f"{image.path} would be a file in the memory of {self._host.name}",
                    why="it is, or was, a device; a restore makes image files",
                    remedy="make a copy, whose disks are image files: --as NAME",
                )
            if await self._host.exists(image.path):
                raise RefusedError(
                    f"{image.path} exists already",
                    why="a disk or the UEFI variables would be written there",
                    remedy="remove it if nothing needs it, or make a copy: --as NAME",
                )

    async def _require_same(self) -> None:
        """Raises RefusedError: the domain would keep something that belongs to its new past."""
        old, uuid = self._old, self._plan.uuid
        if old is None:
            return
        if old.name != self._plan.name:
            raise self._in_the_way(f"it is called '{old.name}' now", "rename it: virsh domrename")
        now = parts_of(old.seen.xml)
        paths = {str(part.path) for part in now.disks if not part.read_only}
        if now.variables is not None:
            paths.add(str(now.variables.path))
        if paths != {str(image.path) for image in self._plan.images}:
            raise self._in_the_way(
                f"its disks are {', '.join(sorted(paths)) or 'none'} now, which are others than "
                "those of the checkpoint",
                "give it back the disks that it had: virsh edit",
            )
        if (loss := await loss_of(uuid, self._session)) is not None:
            raise self._in_the_way(*loss)
        await require_replaceable(
            self._host,
            old.name,
            [(disk.image.path, disk.image.format) for disk in self._plan.disks],
            f"'{old.name}' cannot be replaced by the checkpoint",
            self._facts.taken_unix_s,
        )

    def _in_the_way(self, why: str, remedy: str) -> RefusedError:
        return RefusedError(
            f"'{self._plan.name}' cannot be replaced by the checkpoint",
            why=why,
            remedy=f"make a copy: --as NAME; or {remedy}",
        )

    def _write_images(self) -> None:
        """Write disks and UEFI variables. Blocking. Raises StorageError, DamagedError."""
        for disk in self._plan.disks:
            if disk.base is None:
                make = partial(write_content, self._point, disk, disk.image.format)
                self._write_image(disk.image.path, make)
            else:
                self._write_image(disk.base.path, partial(self._bases.write, disk))
                self._write_image(disk.image.path, partial(write_over_base, disk))
        if (variables := self._plan.variables) is not None:
            size_bytes = variables_bytes(self._point, self._facts)
            make = partial(write_image, kind=variables.format, size_bytes=size_bytes, chunks=())
            self._write_image(variables.path, make)

    def _write_image(self, path: Path, make: Callable[[Path], None]) -> None:
        path = self._file(path)
        with storage_errors(f"write {path}"):
            if self._old is not None and not path.is_file():
                raise RefusedError(
                    f"{path} cannot be replaced",
                    why="it is no file: it is a block device, or gone",
                    remedy="make a copy: --as NAME",
                )
            make_dir_durably(path.parent, mode=IMAGES_MODE)
            proof = proof_of(path, self._files.qemu_id)
            make(proof)
            if self._old is None:
                take_name(proof, path)

    async def _started(
        self, loading: DomainLoading, pending: PendingDomain, member: Member | Alone
    ) -> None:
        await loading.start(self._session, image_of(self._host, pending))
        try:
            await member.all_running()
        except VmckptError:
            await finish(self._session.destroy(pending.uuid))
            await finish(loading.give_up())
            raise
        await write_down(self._host, pending.at(Phase.RUNNING))

    async def _switch(self, pending: PendingDomain) -> None:
        """Save the old guest, and give the images their new content.

        Writing them took minutes: raises BusyError if the domain was started or ended meanwhile.
        """
        if self._old is not None:
            self._old = await seen_again(self._old, self._session)
            await self._require_same()
            if self._old.is_active != pending.was_active:
                what = "started" if self._old.is_active else "ended"
                raise BusyError(
                    f"'{pending.name}' was {what} meanwhile",
                    why="while its new images were written",
                    remedy="try again",
                )
        await self._require_room()
        await write_down(self._host, pending.at(Phase.SAVING))
        if pending.was_active:
            await to_the_end(self._session.save(pending.uuid, old_of(self._host, pending)))
        await write_down(self._host, pending.at(Phase.SWITCHING))
        with storage_errors("put the images in place"):
            await finish(in_thread(partial(pending.put_in_place)))

    async def _reserve_memory(self) -> None:
        """Until the guest runs: of what it has, at least. In place it gets the old guest's.

        Of huge pages libvirt's QEMU reserves all, or does not start. Raises RefusedError: another
        guest would be ended for want of memory.
        """
        if self._plan.uses_huge_pages:
            return
        ram, record = self._point.manifest.area(RAM), self._files.promised
        needed = ram.chunks * ram.chunk_bytes if ram else 0
        await self._host.make_private_dir(record.parent)
        promise = Promise(record, needed, None, is_private=True, holder="")
        found = await self._host.promise_memory(promise, overcommit=False)
        if not found.is_given:
            raise RefusedError(
                f"there is no room for the memory of '{self._plan.name}' on {self._host.name}",
                why=f"its guest has {format_size(needed)}, and {format_size(found.free_bytes)} are "
                f"free, besides {format_size(found.promised_bytes)} that other VMs may still touch",
                remedy="free memory there, or restore it on another host: --host",
            )

    async def _require_room(self) -> None:
        """Raises StorageError: the old guest would be paused until its save fails."""
        directory, old = self._files.path, self._old
        if old is None or not old.is_active:
            return
        try:
            needed = saved_bytes(find_qemu(old.uuid), old.description.memory_bytes)
        except OSError:  # how much is unknown: libvirt finds out
            return
        if (free := await self._host.free_bytes(directory)) < needed:
            raise StorageError(
                f"there is no room for the memory of '{old.name}'",
                why=f"libvirt first saves its present guest below {directory}: up to "
                f"{format_size(needed)}, and {format_size(free)} are free",
                remedy="make room there; or make a copy: --as NAME",
            )

    async def _settle(self) -> None:
        """Finish the restore if the domain runs, else undo it; also if libvirtd was restarted."""

        async def attempt() -> None:
            async with libvirtd(self._host) as session:
                await settle_restore(self._host, self._plan.uuid, session)

        await finish(retry(attempt, (HostDownError, BusyError), every_s=AGAIN_S, within_s=SETTLE_S))
