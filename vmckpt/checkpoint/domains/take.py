"""Take a checkpoint of a running libvirt domain, through libvirt's monitor of its QEMU.

Runs on the domain's host. What a checkpoint contains, and how it is taken, is the same as for every
VM (`checkpoint/take.py`); this module presents the domain as a VM, and removes everything from its
QEMU afterwards.
"""

from collections.abc import Callable
from dataclasses import replace
from shlex import quote

from vmckpt.checkpoint.domains.loading.missing import see_to_memory
from vmckpt.checkpoint.domains.record import settle_restore
from vmckpt.checkpoint.domains.settle import (
    AGAIN_S,
    SETTLE_S,
    clean,
    find_there,
    require_running,
    settle,
)
from vmckpt.checkpoint.facts import DomainFacts
from vmckpt.checkpoint.group.member import ALONE, Alone, Member
from vmckpt.checkpoint.requests import TakenCheckpoint, TakeOptions
from vmckpt.checkpoint.store_thread import store_thread
from vmckpt.checkpoint.take import Taking
from vmckpt.deadlines import retry
from vmckpt.errors import (
    HostDownError,
    NotFoundError,
    OperationFailedError,
    OutcomeUnknownError,
    VmckptError,
)
from vmckpt.hosts.host import Host
from vmckpt.hosts.processes.deadman import attended
from vmckpt.preflight.domains import capture
from vmckpt.preflight.finding import ask, require
from vmckpt.qemu.relayed import RelayedMonitor
from vmckpt.sequence.steps import finish
from vmckpt.store.open import Access
from vmckpt.vm.domains.definition.parts import Parts, parts_of
from vmckpt.vm.domains.guard import guard_words
from vmckpt.vm.domains.inventory import Domain, held_domain, seen_again
from vmckpt.vm.domains.libvirtd import Libvirtd
from vmckpt.vm.domains.monitor import domain_monitor
from vmckpt.vm.domains.running import as_vm, domain_dir


async def take_domain(
    host: Host,
    uuid: str,
    store: tuple[str, Access],
    options: TakeOptions,
    *,
    tell: Callable[[str], None],
    member: Member | Alone = ALONE,
) -> TakenCheckpoint:
    """Take it; the guest continues in any case.

    `store`: its location, and what opens it; `member`: as for `take.take`. Raises RefusedError,
    BusyError, StorageError, OperationFailedError, NotFoundError.
    """
    domain = await find_there(host, uuid)
    if domain is None:
        raise NotFoundError(
            f"the domain is no longer on {host.name}",
            why=f"its libvirtd knows no domain {uuid}",
            remedy="see `vmckpt vm list`",
        )
    async with held_domain(domain, "checkpoint create") as (found, session):
        await see_to_memory(host, uuid, found.name)
        await settle_restore(host, uuid, session)
        await settle(host, uuid)
        now = await seen_again(found, session)
        require_running(now)
        work = _DomainCheckpoint(now, parts_of(now.seen.xml), session, options, tell)
        work.join(member)
        return await work.take(*store)


class _DomainCheckpoint:
    """One checkpoint of a domain in the making; the domain's lock is held."""

    def __init__(
        self,
        domain: Domain,
        parts: Parts,
        session: Libvirtd,
        options: TakeOptions,
        tell: Callable[[str], None],
    ) -> None:
        self._domain, self._parts, self._session = domain, parts, session
        self._options, self._tell = options, tell
        self._directory = domain_dir(domain.host, domain.uuid)
        self._is_lost = False
        self._member: Member | Alone = ALONE

    def join(self, member: Member | Alone) -> None:
        """Take it together with the other members of a group, if any."""
        self._member = member

    async def take(self, location: str, access: Access) -> TakenCheckpoint:
        """Take it; nothing of it stays in QEMU, unless libvirtd does not answer for long."""
        host, name = self._domain.host, f"{self._domain.name} on {self._domain.host.name}"
        await host.make_dir(self._directory.path)
        await host.write_text(self._directory.identity, f"{self._domain.uuid}\n")
        mark = self._directory.saving
        try:
            async with domain_monitor(host, self._domain.uuid, name, mark) as monitor:
                try:
                    taken = await self._take(monitor, location, access)
                finally:
                    self._is_lost = not monitor.is_open
        except VmckptError as exc:
            left = await finish(self._settled())
            if not self._is_lost:
                raise
            raise self._interrupted(exc, left) from exc
        except BaseException:
            await finish(self._settled())
            raise
        left = await finish(self._settled())
        return taken if left is None else replace(taken, not_ended=f"{left.what}: {left.why}")

    async def _take(
        self, monitor: RelayedMonitor, location: str, access: Access
    ) -> TakenCheckpoint:
        domain = self._domain
        vm = await as_vm(domain, self._parts, monitor)
        found = await ask(
            capture.described(domain.name, vm.spec.memory_bytes, self._parts),
            capture.memory(vm, monitor),
            capture.devices(vm, monitor),
            capture.disks(vm, monitor),
            capture.unused(vm, monitor),
        )
        require(found, f"'{domain.name}' cannot have checkpoints while it runs")
        await domain.host.make_dir(vm.qemu.files.path)  # from here on `settle` has work
        command = [
            *await domain.host.own_command(),
            *guard_words(vm, domain.uuid, self._directory.saving),
        ]
        log, mark = vm.qemu.files.path / "guard.log", self._directory.saving
        with attended(command, log, is_needed=mark.exists) as tell_guard:
            async with store_thread(last=self._member.is_grouped) as store_calls:
                work = Taking(
                    vm, monitor, self._options, store_calls, self._tell, domain=self._facts
                )
                work.join(self._member, tell_guard)
                taken = await work.take(location, access)
            await clean(monitor)
        return taken

    async def _facts(self) -> DomainFacts:
        """What libvirt says of it, after its moment.

        Raises OperationFailedError: devices were plugged in or out in the meantime.
        """
        now = await seen_again(self._domain, self._session)
        if parts_of(now.seen.xml) != self._parts:
            raise OperationFailedError(
                f"'{now.name}' was changed during its checkpoint",
                why="a device or disk was plugged in or unplugged, or its image changed",
                remedy="take it again",
            )
        definition = await self._session.definition(now.uuid) if now.seen.persistent else ""
        return DomainFacts(now.uuid, await self._session.migratable(now.uuid), definition)

    async def _settled(self) -> VmckptError | None:
        """Remove what is left in QEMU, also if libvirtd has to start again first; why that failed.

        The next checkpoint tries again; a paused guest is resumed by the guard.
        """
        try:
            await retry(
                lambda: settle(self._domain.host, self._domain.uuid),
                (HostDownError, OutcomeUnknownError),
                every_s=AGAIN_S,
                within_s=SETTLE_S,
            )
        except VmckptError as exc:
            return exc
        return None

    def _interrupted(self, exc: VmckptError, left: VmckptError | None) -> OperationFailedError:
        name = self._domain.name
        remedy = f"take it again: vmckpt checkpoint create {quote(name)}"
        if left is not None:
            remedy = (
                f"when its libvirtd answers: see that it runs (vmckpt vm show {quote(name)}), and "
                "take it again, which also removes what this one has left in its QEMU"
            )
        return OperationFailedError(
            f"the checkpoint of '{name}' was interrupted",
            why=f"the libvirtd of {self._domain.host.name} ended or was restarted: {exc.what}: "
            f"{exc.why}",
            remedy=remedy,
        )
