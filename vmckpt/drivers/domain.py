"""A domain of a host's libvirtd. vmckpt never bypasses libvirt."""

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from shlex import quote
from typing import TYPE_CHECKING, Any, Literal

from vmckpt.drivers.driver import Driver, RemovedVm, Started, VmInfo, VmSnapshot
from vmckpt.errors import RefusedError
from vmckpt.hosts.host import Host

if TYPE_CHECKING:
    from pathlib import Path

    from vmckpt.checkpoint.domain_snapshots import LibvirtSnapshot
    from vmckpt.checkpoint.jobs import Take
    from vmckpt.checkpoint.operate import StoreJob
    from vmckpt.checkpoint.requests import TakenCheckpoint, TakeOptions
    from vmckpt.events.types import Emit
    from vmckpt.forecast.measure.dirty_rate import DirtyRate
    from vmckpt.forecast.model.choose import Intent
    from vmckpt.forecast.planner import MigrationPlan
    from vmckpt.migrate.report import MigrationReport
    from vmckpt.options.migration import MigrationOptions
    from vmckpt.options.replication import ReplicationOptions
    from vmckpt.preflight.finding import Examined
    from vmckpt.qemu.agent import GuestAgent
    from vmckpt.replicate.status import ReplicationOutcome
    from vmckpt.store.sealing.keys import KeySource
    from vmckpt.vm.domains.inventory import Domain
    from vmckpt.vm.inventory import Vm

# What vmckpt does only with VMs that it runs.
OwnOnly = Literal["autostart", "devices", "edit", "export", "network", "other"]
_IMPORTED = (
    "shut {name} down, and make it a VM of vmckpt's own: vmckpt vm import {name}; docs/libvirt.md "
    "says what differs then"
)
_INSTEAD: dict[OwnOnly, tuple[str, str]] = {
    "autostart": ("libvirt starts it", "on {host}: virsh autostart {name}"),
    "devices": ("libvirt manages its devices", "on {host}: virsh dumpxml {name}"),
    "edit": ("libvirt has its definition", "on {host}: virsh edit {name}"),
    "export": ("libvirt has its definition", "on {host}: virsh dumpxml {name}"),
    "network": ("libvirt manages its NICs", "on {host}: virsh domif-setlink {name} NIC up|down"),
    "other": ("vmckpt does this only with VMs of its own", _IMPORTED),
}


@dataclass(frozen=True, slots=True)
class LibvirtDomain:
    """One domain."""

    domain: "Domain"

    @property
    def name(self) -> str:
        """The domain's name."""
        return self.domain.name

    @property
    def host(self) -> Host:
        """The host that it is on."""
        return self.domain.host

    async def inspect(self) -> VmInfo:
        """Its state when it was found, and the operation that holds it."""
        return await info(self.domain)

    async def console(self) -> "Path":
        """Refused: libvirt serves consoles as a stream, for which virsh has the terminal."""
        raise RefusedError(
            "vmckpt does not show the console of a libvirt domain",
            why="libvirt manages it; virsh connects a terminal to it",
            remedy=f"on {self.host.name}: virsh console {quote(self.name)}",
        )

    def agent(self) -> "AbstractAsyncContextManager[GuestAgent]":
        """A session with the agent in its guest, for a block. Raises AgentSilentError."""
        from vmckpt.vm.domains.agent import domain_agent

        return domain_agent(self.domain)

    async def start(self) -> Started:
        """Start it on its host."""
        from vmckpt.replicate.primary.claim import require_right
        from vmckpt.vm.domains.lifecycle import start_domain

        if (home := await self._replicated_home()) is not None:
            await require_right(home)  # another host may have it
        await start_domain(self.domain)
        what = self.domain.description
        return Started(None, what.accel_word, what.machine, what.cpu)

    async def pause(self) -> None:
        """Pause its guest; one that is paused is left alone. Raises RefusedError if it is off."""
        from vmckpt.vm.domains.lifecycle import pause_domain

        await pause_domain(self.domain)

    async def resume(self) -> None:
        """Resume its guest; one that runs is left alone. Raises RefusedError if it is off, or while
        a standby may take it over: a primary that loses the right to run is paused.
        """
        from vmckpt.vm.domains.lifecycle import resume_domain

        await self._require_decided("vm resume")
        await resume_domain(self.domain)

    async def _replicated_home(self) -> "Vm | None":
        """Its home by the records of a replication, if there was one."""
        from vmckpt.vm.inventory import read_home

        home = await read_home(self.host, self.name)
        return home if home is not None and home.qemu.domain == self.domain.uuid else None

    async def _require_decided(self, action: str) -> None:
        """Raises RefusedError if a standby has it, or may take it over; BusyError if an operation
        holds it.
        """
        if (home := await self._replicated_home()) is None:
            return
        from vmckpt.replicate.operator.operate import require_decided
        from vmckpt.vm.lifecycle import owner
        from vmckpt.vm.paths import lock_path

        async with self.host.lock(lock_path(self.host.state_dir, self.name), owner(action)):
            pass
        await require_decided(home)

    async def reboot(self, *, force: bool, timeout_s: float) -> None:
        """Power it off by its button and start it again; with `force` reset it at once."""
        from vmckpt.vm.domains.lifecycle import reboot_domain

        await self._require_decided("vm reboot")
        await reboot_domain(self.domain, force=force, timeout_s=timeout_s)

    async def stop(self, *, force: bool, timeout_s: float) -> None:
        """Press its power button and wait until it is off; with `force` end it at once."""
        from vmckpt.vm.domains.lifecycle import stop_domain

        await stop_domain(self.domain, force=force, timeout_s=timeout_s)

    async def remove(self, *, with_state: bool = False) -> RemovedVm:
        """Have libvirt forget it; return what remains. `with_state` does not cover its TPM."""
        from vmckpt.replicate.domains.guest import forget
        from vmckpt.vm.domains.lifecycle import remove_domain

        tpm = await remove_domain(self.domain, with_tpm=with_state)
        await forget(self.host, self.name)
        return RemovedVm(_disks(self.domain), tpm=tpm)

    def own_images(self) -> "list[Path]":
        """The paths of the disks that it writes, and of its UEFI variables."""
        what = self.domain.description
        disks = [disk.path for disk in what.disks if disk.path and not disk.read_only]
        return disks if what.variables is None else [*disks, what.variables]

    async def examine(self, destination: Host, options: "MigrationOptions") -> "Examined":
        """Check whether it can be migrated, and what would be copied; changes nothing."""
        from vmckpt.preflight.domains.checks import busy, preflight
        from vmckpt.preflight.finding import Examined
        from vmckpt.vm.domains.sessions import libvirtd

        if options.offline:
            from vmckpt.preflight.domains.off import preflight_off as preflight
        async with libvirtd(self.host) as here, libvirtd(destination) as there:
            found = await preflight(self.domain, here, there, options)
        held = await busy(self.domain)
        checks = (*found.checks,) if held is None else (held, *found.checks)
        return Examined(checks, sum(copy.allocated_bytes for copy in found.copies))

    async def plan(
        self,
        destination: Host,
        options: "MigrationOptions",
        intent: "Intent",
        *,
        began_s: float,
        for_s: float | None = None,
    ) -> "MigrationPlan":
        """Every migration method, and the one that meets the intent; see `forecast.planner`."""
        from vmckpt.forecast.planner import MEASURE_S, make_plan
        from vmckpt.forecast.subjects.domain import DomainSubject
        from vmckpt.vm.domains.sessions import libvirtds

        look_s = MEASURE_S if for_s is None else for_s
        async with libvirtds(self.host, destination) as (here, there):
            vm = DomainSubject(self.domain, here, there)
            return await make_plan(vm, destination, options, intent, began_s=began_s, for_s=look_s)

    async def migrate(
        self,
        destination: Host,
        options: "MigrationOptions",
        emit: "Emit",
        forecast: Mapping[str, Any] | None = None,
    ) -> "MigrationReport":
        """Have libvirt migrate it live, or as it is off.

        Raises RefusedError if it does not run, and a standby may have it.
        """
        if self.domain.state != "running":
            await self._require_decided("migrate")
        if options.offline:
            from vmckpt.migrate.domains.offline import move_off

            return await move_off(self.domain, destination, options, emit)
        from vmckpt.migrate.domains.migration import migrate

        return await migrate(self.domain, destination, options, emit, forecast)

    async def measure(self, for_s: float) -> "DirtyRate":
        """How fast it dirties its memory, measured for that long."""
        from vmckpt.forecast.measure.domains import measure_domain

        return await measure_domain(self.domain, for_s)

    async def checkpoint(
        self,
        store: str | None,
        options: "TakeOptions",
        tell: Callable[[str], None],
        key: "KeySource | None",
    ) -> "TakenCheckpoint":
        """Take a checkpoint while it runs, through libvirt's monitor of its QEMU."""
        from vmckpt.checkpoint.domains.operate import create

        return await create(self.domain, store, options, tell, key)

    async def taking(
        self, store: str | None, options: "TakeOptions", key: "KeySource | None"
    ) -> "StoreJob[Take, TakenCheckpoint]":
        """See `Driver`."""
        from vmckpt.checkpoint.domains.operate import taking

        return await taking(self.domain, store, options, key)

    async def replicate(
        self, standby: Host, options: "ReplicationOptions", run: str
    ) -> "ReplicationOutcome":
        """Have `standby` protect it; returns once it does."""
        from vmckpt.replicate.domains.describing import start_domain

        return await start_domain(self.domain, standby, options, run)

    async def home(self) -> "Vm":
        """See `Driver`."""
        from vmckpt.replicate.domains.describing import home_of

        return await home_of(self.domain)

    def group_notes(self) -> list[str]:
        """See `Driver`."""
        from vmckpt.vm.domains.monitor import TAINTED

        paused = "is paused until all others are: the output of a domain cannot be held"
        return [f"{self.name}: {TAINTED}", f"{self.name} {paused}"]

    async def require_replaceable(self, what: str) -> None:
        """See `Driver`."""
        from vmckpt.preflight.domains.replaceable import require_replaceable

        await require_replaceable(self.domain, what)

    async def restore_is_cut_off(self) -> bool:
        """Whether a restore of it was interrupted, and is not settled yet."""
        from vmckpt.checkpoint.domains.loading.missing import paging_files
        from vmckpt.sequence.steps import all_of
        from vmckpt.vm.domains.running import domain_dir
        from vmckpt.vm.paths import lock_path

        uuid = self.domain.uuid
        marks = domain_dir(self.host, uuid).restoring, paging_files(self.host, uuid).missing
        if not any(await all_of(self.host.exists(mark) for mark in marks)):
            return False
        return await self.host.lock_owner(lock_path(self.host.state_dir, self.name)) is None

    async def save(self, name: str, emit: "Emit") -> VmSnapshot:
        """Have libvirt take a snapshot; it reports no progress."""
        from vmckpt.checkpoint import domain_snapshots

        return _snapshot(await domain_snapshots.save(self.domain, name))

    async def load(self, name: str, emit: "Emit") -> VmSnapshot:
        """Have libvirt return to a snapshot."""
        from vmckpt.checkpoint import domain_snapshots

        return _snapshot(await domain_snapshots.load(self.domain, name))

    async def snapshots(self) -> list[VmSnapshot]:
        """Its snapshots, oldest first."""
        from vmckpt.checkpoint import domain_snapshots

        return [_snapshot(taken) for taken in await domain_snapshots.list_all(self.domain)]

    async def delete(self, name: str, emit: "Emit") -> None:
        """Have libvirt delete a snapshot."""
        from vmckpt.checkpoint import domain_snapshots

        await domain_snapshots.delete(self.domain, name)


def not_for_domains(domain: Driver, use: "OwnOnly") -> RefusedError:
    """The error for what vmckpt does only with VMs that it runs, and what to use with a domain."""
    why, instead = _INSTEAD[use]
    what = {"name": quote(domain.name), "host": domain.host.name}
    return RefusedError(
        f"'{domain.name}' is a libvirt domain", why=why, remedy=instead.format(**what)
    )


async def info(domain: "Domain") -> VmInfo:
    """The VmInfo of a domain as it was found, with its current operation."""
    from vmckpt.migrate.domains.journal import DomainJournal
    from vmckpt.vm.paths import lock_path
    from vmckpt.vm.spec.spec import Placement

    owner = await domain.host.lock_owner(lock_path(domain.host.state_dir, domain.name))
    journals = await DomainJournal.all_of(domain.name)
    what = domain.description
    return VmInfo(
        name=domain.name,
        host=domain.host.name,
        driver="libvirt",
        state=domain.state,
        ended=None,
        adopted=False,
        started_by="libvirt",
        cannot=(),
        operation=owner.action if owner else None,
        migration_cut_off=owner is None and any(one.uuid == domain.uuid for one in journals),
        guest_agent=what.guest_agent,
        vcpus=what.vcpus,
        memory_bytes=what.memory_bytes,
        machine=what.machine,
        accel=what.accel_word,
        cpu=what.cpu,
        placement=Placement(),
        disks=tuple(_disks(domain)),
        uuid=domain.uuid,
        persistent=domain.seen.persistent,
    )


def _disks(domain: "Domain") -> list[str]:
    return [str(disk.path) for disk in domain.description.disks if disk.path]


def _snapshot(taken: "LibvirtSnapshot") -> VmSnapshot:
    facts = {**taken._asdict(), "id": taken.name, "state_bytes": None, "guest_clock_s": None}
    return VmSnapshot(taken.name, taken.taken_unix_s, None, None, facts)
