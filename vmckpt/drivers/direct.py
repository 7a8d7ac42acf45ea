"""A VM that vmckpt runs itself: it started or adopted the QEMU."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from vmckpt.drivers.driver import RemovedVm, Started, VmInfo, VmSnapshot
from vmckpt.hosts.host import Host

if TYPE_CHECKING:
    from pathlib import Path

    from vmckpt.checkpoint.jobs import Take
    from vmckpt.checkpoint.operate import StoreJob
    from vmckpt.checkpoint.requests import TakenCheckpoint, TakeOptions
    from vmckpt.events.types import Emit
    from vmckpt.forecast.measure.dirty_rate import DirtyRate
    from vmckpt.forecast.model.choose import Intent
    from vmckpt.forecast.planner import MigrationPlan
    from vmckpt.migrate.outcome.recover import Recovery
    from vmckpt.migrate.report import MigrationReport
    from vmckpt.options.migration import MigrationOptions
    from vmckpt.options.replication import ReplicationOptions
    from vmckpt.preflight.finding import Examined
    from vmckpt.qemu.agent import GuestAgent
    from vmckpt.qemu.replies import Snapshot
    from vmckpt.replicate.status import ReplicationOutcome
    from vmckpt.store.sealing.keys import KeySource
    from vmckpt.vm.inventory import Vm, VmStatus


class DirectVm(NamedTuple):
    """One VM."""

    vm: "Vm"

    @property
    def name(self) -> str:
        """The VM's name."""
        return self.vm.name

    @property
    def host(self) -> Host:
        """The host that it is on."""
        return self.vm.host

    async def inspect(self) -> VmInfo:
        """Its current state."""
        from vmckpt.vm.inventory import inspect

        return info(await inspect(self.vm))

    async def console(self) -> "Path":
        """The socket of its serial console, on its host. Raises RefusedError: it has none."""
        from vmckpt.vm.inventory import require_console

        await require_console(self.vm)
        return self.vm.qemu.files.console

    @asynccontextmanager
    async def agent(self) -> AsyncIterator["GuestAgent"]:
        """A session with the agent in its guest, for a block. Raises AgentSilentError."""
        from vmckpt.qemu.agent import GuestAgent
        from vmckpt.sequence.steps import finish

        session = await GuestAgent.connect(await self.host.connect(self.vm.qemu.files.agent))
        try:
            yield session
        finally:
            await finish(session.close())

    async def start(self) -> Started:
        """Start it on its host. Raises RefusedError while a standby may take it over."""
        from vmckpt.vm.lifecycle import start_vm

        await self._require_decided()
        return started(await start_vm(self.vm))

    async def pause(self) -> None:
        """Pause its guest; one that is paused is left alone. Raises RefusedError if it is off."""
        from vmckpt.vm.lifecycle import pause_vm

        await pause_vm(self.vm)

    async def resume(self) -> None:
        """Resume its guest; one that runs is left alone.

        Raises RefusedError if it is off, or while a standby may take it over: a primary that loses
        the right to run is paused.
        """
        from vmckpt.vm.lifecycle import resume_vm

        await self._require_free("vm resume")
        await self._require_decided()
        await resume_vm(self.vm)

    async def reboot(self, *, force: bool, timeout_s: float) -> None:
        """Power it off by its button and start it again; with `force` reset it at once.

        Raises RefusedError as `resume` does.
        """
        from vmckpt.vm.lifecycle import reboot_vm

        await self._require_free("vm reboot")
        await self._require_decided()
        await reboot_vm(self.vm, force=force, timeout_s=timeout_s)

    async def stop(self, *, force: bool, timeout_s: float) -> None:
        """Press its power button and wait until it is off; with `force` end it at once."""
        from vmckpt.vm.lifecycle import stop_vm

        await stop_vm(self.vm, force=force, timeout_s=timeout_s)

    async def remove(self, *, with_state: bool = False) -> RemovedVm:
        """Forget the VM; return what remains."""
        from vmckpt.vm.lifecycle import remove_vm

        return RemovedVm(goes_on_as_pid=await remove_vm(self.vm), disks=_disks(self.vm))

    def own_images(self) -> "list[Path]":
        """The paths of the disks that it writes, and of UEFI variables that were made for it."""
        from vmckpt.vm.paths import images_dir

        spec, state_dir = self.vm.spec, self.host.state_dir
        disks = [disk.on(state_dir) for disk in spec.disks if not disk.read_only]
        variables = [spec.firmware.vars] if spec.firmware else []
        return [*disks, *(path for path in variables if path.parent == images_dir(state_dir))]

    async def examine(self, destination: Host, options: "MigrationOptions") -> "Examined":
        """Check whether it can be migrated, and what would be copied; changes nothing."""
        from vmckpt.preflight.finding import Examined
        from vmckpt.preflight.migration.checks import busy, preflight

        if options.offline:
            from vmckpt.migrate.offline import examine_off

            await self._require_decided()
            off = await examine_off(self.vm, destination, options)
            return Examined(off.checks, sum(copy.allocated_bytes for copy in off.copies))
        found = await preflight(self.vm, destination, options)
        held = await busy(self.vm)
        checks = found.checks if held is None else (held, *found.checks)
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
        from vmckpt.forecast.subjects.own import OwnVm

        vm, look_s = OwnVm(self.vm), MEASURE_S if for_s is None else for_s
        return await make_plan(vm, destination, options, intent, began_s=began_s, for_s=look_s)

    async def migrate(
        self,
        destination: Host,
        options: "MigrationOptions",
        emit: "Emit",
        forecast: Mapping[str, Any] | None = None,
    ) -> "MigrationReport | Recovery":
        """Migrate it; between two remote hosts a job on the source does the work.

        Raises RefusedError if it is off, or paused, and a standby may take it over.
        """
        if options.offline:
            await self._require_decided()
        elif self.vm.qemu.replaces is not None or await self.host.exists(self.vm.directory.claim):
            await self.require_own()
        if not (self.host.is_this_machine or destination.is_this_machine):
            from vmckpt.migrate.elsewhere.delegate import migrate_there

            return await migrate_there(self.vm, destination, options, emit, forecast)
        from vmckpt.migrate.run import migrate

        return await migrate(self.vm, destination, options, emit, forecast=forecast)

    async def require_own(self) -> None:
        """Return if its guest runs here, or may: so it may be moved, or another put in its place.

        Raises RefusedError if a standby has it, or may take it over. If an operation holds the VM,
        that is for the operation's own lock to say.
        """
        from vmckpt.vm.paths import lock_path

        if await self.host.exists(self.vm.directory.claim):
            if await self.host.lock_owner(lock_path(self.host.state_dir, self.name)) is None:
                await self._require_decided()
        elif (await self.inspect()).state != "running":
            await self._require_decided()

    async def _require_free(self, action: str) -> None:
        """Raises BusyError if an operation holds it, which says more than its undecided end."""
        from vmckpt.vm.lifecycle import owner
        from vmckpt.vm.paths import lock_path

        async with self.host.lock(lock_path(self.host.state_dir, self.name), owner(action)):
            return

    async def _require_decided(self) -> None:
        from vmckpt.replicate.operator.operate import require_decided

        await require_decided(self.vm)

    async def measure(self, for_s: float) -> "DirtyRate":
        """How fast it dirties its memory, measured for that long."""
        from vmckpt.forecast.measure.dirty_rate import measure
        from vmckpt.forecast.measure.own import MeasuredVm

        return await measure(MeasuredVm(self.vm), for_s)

    async def checkpoint(
        self,
        store: str | None,
        options: "TakeOptions",
        tell: Callable[[str], None],
        key: "KeySource | None",
    ) -> "TakenCheckpoint":
        """Take a checkpoint while it runs, into that store or its host's own."""
        from vmckpt.checkpoint.operate import create

        return await create(self.vm, store, options, tell, key)

    async def taking(
        self, store: str | None, options: "TakeOptions", key: "KeySource | None"
    ) -> "StoreJob[Take, TakenCheckpoint]":
        """See `Driver`."""
        from vmckpt.checkpoint.operate import taking

        return await taking(self.vm, store, options, key)

    async def replicate(
        self, standby: Host, options: "ReplicationOptions", run: str
    ) -> "ReplicationOutcome":
        """Have `standby` protect it; returns once it does."""
        from vmckpt.replicate.operator.begin import start

        return await start(self.vm, standby, options, run)

    async def home(self) -> "Vm":
        """See `Driver`."""
        return self.vm

    def group_notes(self) -> list[str]:
        """See `Driver`."""
        if self.vm.spec.nics:
            return []
        return [f"{self.name} has no network: there is no output to hold"]

    async def require_replaceable(self, what: str) -> None:
        """See `Driver`."""
        from vmckpt.preflight.checkpoint import require_replaceable

        disks = [disk for disk in self.vm.spec.disks if not disk.read_only]
        written = [(disk.on(self.host.state_dir), disk.format) for disk in disks]
        await require_replaceable(self.host, self.name, written, what)

    async def restore_is_cut_off(self) -> bool:
        """Whether a restore or a checkpoint of it was interrupted, and is not settled yet."""
        from vmckpt.vm.lifecycle import restore_is_cut_off

        return await restore_is_cut_off(self.vm)

    async def save(self, name: str, emit: "Emit") -> VmSnapshot:
        """Take a snapshot."""
        from vmckpt.checkpoint import savevm

        return _snapshot(await savevm.save(self.vm, name, emit))

    async def load(self, name: str, emit: "Emit") -> VmSnapshot:
        """Return to a snapshot."""
        from vmckpt.checkpoint import savevm

        return _snapshot(await savevm.load(self.vm, name, emit))

    async def snapshots(self) -> list[VmSnapshot]:
        """Its snapshots, oldest first."""
        from vmckpt.checkpoint import savevm

        return [_snapshot(snapshot) for snapshot in await savevm.list_all(self.vm)]

    async def delete(self, name: str, emit: "Emit") -> None:
        """Delete a snapshot."""
        from vmckpt.checkpoint import savevm

        await savevm.delete(self.vm, name, emit)


def started(vm: "Vm") -> Started:
    """A VM that has been started."""
    platform = vm.qemu.platform
    return Started(vm.qemu.process.pid, platform.accel, platform.machine, platform.cpu)


def _cannot(vm: "Vm") -> tuple[str, ...]:
    """What its memory rules out: elsewhere than where vmckpt puts it, or in several blocks."""
    if not vm.ram_names:
        return ("checkpoint", "fork", "group", "replicate")
    return ("replicate",) if len(vm.ram_names) > 1 else ()


def info(inspected: "VmStatus") -> VmInfo:
    """The VmInfo of an inspected VM."""
    vm, platform = inspected.vm, inspected.vm.qemu.platform
    return VmInfo(
        name=vm.name,
        host=vm.host.name,
        driver="qemu",
        state=inspected.state,
        ended=inspected.ended or None,
        adopted=vm.spec.adopted is not None,
        started_by="another program" if vm.qemu.is_foreign else "vmckpt",
        cannot=_cannot(vm),
        operation=inspected.owner.action if inspected.owner else None,
        migration_cut_off=inspected.migrating and inspected.owner is None,
        guest_agent=vm.spec.guest_agent,
        vcpus=vm.spec.vcpus,
        memory_bytes=vm.spec.memory_bytes,
        machine=platform.machine,
        accel=platform.accel,
        cpu=platform.cpu,
        placement=vm.spec.placement,
        autostart=vm.spec.autostart,
        pid=vm.qemu.process.pid if inspected.state != "stopped" else None,
        disks=tuple(_disks(vm)),
        console_log=str(vm.qemu.files.console_log),
        qmp_socket=str(vm.qemu.files.onlooker),
    )


def _disks(vm: "Vm") -> list[str]:
    return [str(disk.on(vm.host.state_dir)) for disk in vm.spec.disks]


def _snapshot(snapshot: "Snapshot") -> VmSnapshot:
    return VmSnapshot(
        snapshot.name,
        snapshot.taken_unix_s,
        snapshot.state_bytes,
        snapshot.guest_clock_s,
        snapshot._asdict(),
    )
