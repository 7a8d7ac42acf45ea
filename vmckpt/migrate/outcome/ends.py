"""The two QEMUs of a migration: query both, and act until one host has the guest."""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from vmckpt.errors import HostDownError, OperationFailedError, OutcomeUnknownError, VmckptError
from vmckpt.hosts.host import Host
from vmckpt.migrate.outcome.ownership import MigrationEnd, OwnershipView
from vmckpt.qemu import block, commands
from vmckpt.qemu.monitor import Monitor, MonitorLostError
from vmckpt.qemu.replies import MigrationStatus, RunState
from vmckpt.vm.ended import last_lines
from vmckpt.vm.paths import QemuDir
from vmckpt.vm.start import end_qemu, processes

QUERY_TIMEOUT_S = 3.0
# Prefix of all jobs, nodes and exports of copies.
COPY_PREFIX = "copy-"
# QEMU's trace line for vCPUs starting, logged before the first guest instruction.
RAN_MARK = "vm_state_notify running 1"


class End:
    """One QEMU of the pair, reached through its operator monitor; reconnects if that is lost."""

    def __init__(self, host: Host, files: QemuDir, *, certainly_ran: bool = False) -> None:
        self.host, self.files = host, files
        self._certainly_ran = certainly_ran
        self._monitor: Monitor | None = None
        self._rescue: Monitor | None = None
        self._shares_monitor = False

    @property
    def label(self) -> str:
        """Its name in errors."""
        return f"{self.files.vm_name} on {self.host.name}"

    async def alive(self) -> bool:
        """Whether its process runs."""
        return bool(await processes(self.host, self.files))

    async def ever_ran(self) -> bool:
        """Whether its vCPUs have ever run, by its log, which outlives it, or by the journal."""
        return self._certainly_ran or RAN_MARK in (
            await self.host.read_text(self.files.stderr) or ""
        )

    async def last_lines(self) -> str:
        """The end of its stderr; empty also if that cannot be read."""
        with suppress(VmckptError, OSError):  # the caller may ask because its host is gone
            return await last_lines(self.host, self.files.stderr)
        return ""

    async def monitor(self) -> Monitor:
        """The open session.

        Raises HostDownError if QEMU cannot be reached, as MonitorLostError if it has ended.
        """
        if self._monitor is None or not self._monitor.is_open:
            await self._drop_monitor()
            self._monitor = await self._session(self.files.operator)
        return self._monitor

    async def _session(self, path: Path) -> Monitor:
        try:
            sock = await self.host.connect(path)
        except HostDownError as exc:
            if await self.host.exists(path) and not await self.alive():
                raise MonitorLostError(
                    f"the QEMU of {self.label} has ended", why=exc.why, remedy=exc.remedy
                ) from exc
            raise
        return await Monitor.connect(sock, self.label, QUERY_TIMEOUT_S)

    def adopt(self, monitor: Monitor) -> None:
        """Take over an open session instead of opening one."""
        self._monitor = monitor

    async def close(self) -> None:
        """Drop the sessions; the guest is not affected."""
        await self._drop_monitor()
        await self._drop_rescue()

    async def _drop_rescue(self) -> None:
        if self._rescue is not None:
            rescue, self._rescue = self._rescue, None
            await rescue.close()

    async def _drop_monitor(self) -> None:
        if self._monitor is not None:
            monitor, self._monitor = self._monitor, None
            await monitor.close()

    async def inspect(self) -> MigrationEnd:
        """The state of this end, by its monitor, its process and its log.

        A dead QEMU is an answer, and so is a silent host.
        """
        run: RunState | None = None
        migration: MigrationStatus | None = None
        try:
            monitor = await self.monitor()
            run = await commands.query_status(monitor, QUERY_TIMEOUT_S)
            migration = await commands.query_migrate(monitor, QUERY_TIMEOUT_S)
        except HostDownError:
            # A shared one is the only way to reach a stuck QEMU, which would not greet again.
            if not (self._shares_monitor and self._monitor and self._monitor.is_open):
                await self._drop_monitor()
            run = migration = None
        try:
            alive = run is not None or await self.alive()
            return MigrationEnd(alive, run, migration, await self.ever_ran())
        except HostDownError:
            return MigrationEnd(True, run, migration, silent=True)

    async def rescue(self) -> Monitor:
        """A session for out-of-band commands, which work while QEMU is stuck.

        It must be open before QEMU is stuck: the greeting needs the main loop. An adopted QEMU may
        have no monitor for it; then the operator's is used, which accepts such commands too. Raises
        as `monitor` does.
        """
        if self._rescue is None or not self._rescue.is_open:
            await self._drop_rescue()
            try:
                self._rescue = await self._session(self.files.rescue)
            except HostDownError:
                if await self.host.exists(self.files.rescue):
                    raise
                self._shares_monitor = True
                return await self.monitor()
        return self._rescue

    async def yank(self) -> bool:
        """Cut the sockets of the migration and its disks.

        False if there is no migration, or no answer.
        """
        try:
            rescue = await self.rescue()
            # A QEMU that stops its guest also waits for writes in flight to a silent destination.
            await block.yank_nodes(rescue, COPY_PREFIX)
            return await commands.yank_migration(rescue)
        except (HostDownError, OutcomeUnknownError):
            return False


class Pair(NamedTuple):
    """Source and destination of one migration. `ram_dir`: the directory of the destination's RAM
    file.

    For `stopped` and `stays` see `OwnershipView`.
    """

    source: End
    destination: End
    was_running: bool
    ram_dir: Path
    stopped: bool = False
    stays: bool = False

    async def view(self) -> OwnershipView:
        """Both ends, queried concurrently."""
        source, destination = await asyncio.gather(
            self.source.inspect(), self.destination.inspect()
        )
        return OwnershipView(source, destination, self.was_running, self.stopped, self.stays)

    async def close(self) -> None:
        """Drop both sessions."""
        await asyncio.gather(self.source.close(), self.destination.close())


async def kill(end: End) -> None:
    """Make sure that a QEMU has ended; keep its files (its log says whether it ever ran)."""
    for process in await processes(end.host, end.files):
        await end.host.kill(process)


async def discard(end: End, ram_dir: Path, *, await_freed: bool = True) -> None:
    """End a QEMU whose guest is elsewhere, and remove its files; see `end_qemu`."""
    await end.close()
    await end_qemu(end.host, ram_dir, end.files, await_freed=await_freed)


async def with_last_lines(exc: VmckptError, destination: End) -> OperationFailedError:
    """The error with the messages of the destination's QEMU, if those can be read."""
    words = await destination.last_lines()
    why = f"{exc.why}; the destination said: {words}" if words else exc.why
    return OperationFailedError(exc.what, why=why, remedy=exc.remedy)
