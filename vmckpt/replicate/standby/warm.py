"""The standby's waiting QEMU, whose memory is the replica's, and how it takes the guest over."""

import asyncio
import fcntl
import os
from contextlib import suppress
from functools import partial
from pathlib import Path

from vmckpt.deadlines import poll, retry
from vmckpt.epoch.load import SETTINGS, feed, has_loaded
from vmckpt.errors import OperationFailedError
from vmckpt.hosts.local import LocalHost
from vmckpt.memory.ram_file import open_fd
from vmckpt.qemu import commands
from vmckpt.qemu.monitor import CommandRefusedError, Monitor, MonitorLostError
from vmckpt.sequence.in_thread import in_thread_at_last
from vmckpt.sequence.steps import finish
from vmckpt.state.durable import sync_directory
from vmckpt.vm.paths import VmDir, new_qemu_id, vm_dir
from vmckpt.vm.record import Platform, Qemu, Replaced
from vmckpt.vm.spec.spec import Spec
from vmckpt.vm.start import end_qemu, plug_taps, start_qemu

# Large enough for the state of an ordinary machine's devices.
PIPE_BYTES = 1 << 20
# How often QEMU is probed, and after what silence it is given up.
CHECK_S, SILENT_S = 0.5, 5.0
# How long, and how often, resuming the guest is retried.
RUN_S, RUN_POLL_S = 5.0, 0.01
_FD_NAME = "vmckpt-state"


class Warm:
    """A `WaitingGuest` of vmckpt's own. Its NICs are plugged in: it sends nothing."""

    def __init__(
        self, host: LocalHost, spec: Spec, qemu: Qemu, monitor: Monitor, writer: int
    ) -> None:
        self._host, self._spec, self.qemu, self._monitor = host, spec, qemu, monitor
        self._writer, self._pipe_bytes = writer, fcntl.fcntl(writer, fcntl.F_GETPIPE_SZ)

    @classmethod
    async def start(
        cls, host: LocalHost, spec: Spec, platform: Platform, replaces: Replaced
    ) -> "Warm":
        """Raises as `start_qemu` and `plug_taps` do; then nothing of it is left."""
        directory = vm_dir(host.state_dir, spec.name)
        files = directory.qemu(new_qemu_id())
        qemu, monitor = await start_qemu(host, spec, platform, files, incoming=True)
        try:
            await plug_taps(host, spec, files)
            await commands.migrate_set_capabilities(monitor, SETTINGS)
            # Written beforehand: at the takeover the disk may be full.
            home = qemu._replace(replaces=replaces)
            await host.write_text(_ready(directory), home.to_json())
            writer = await _incoming(monitor)
        except BaseException:
            await monitor.close()
            await finish(end_qemu(host, spec.ram_dir, files))
            raise
        return cls(host, spec, qemu, monitor, writer)

    @property
    def directory(self) -> VmDir:
        """The VM's files on this host."""
        return vm_dir(self._host.state_dir, self._spec.name)

    async def load(self, device_state: bytes) -> None:
        """Load the guest, whose memory it has; it stays paused, ready to run.

        Raises OperationFailedError; then this QEMU is no longer usable.
        """
        with self._monitor.events("MIGRATION") as events:
            feeding = self._feed(device_state)
            if await has_loaded(self._monitor, events):
                await feeding
                return
        raise OperationFailedError(
            f"the standby's QEMU does not take '{self._spec.name}' over",
            why=f"it cannot load the state of its devices: see {self.qemu.files.stderr}",
            remedy="the primary's VM, if it is alive, is not affected: see `vmckpt vm list`",
        )

    def _feed(self, device_state: bytes) -> "asyncio.Future[None]":
        """Write it into the pipe that QEMU already reads; done when all of it is in there."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        writer, self._writer = self._writer, -1
        if len(device_state) > self._pipe_bytes:
            return asyncio.ensure_future(in_thread_at_last(partial(feed, writer, device_state)))
        feed(writer, device_state)
        done.set_result(None)
        return done

    def settle_here(self) -> None:
        """The VM is at home here, and its former home is stale. Raises OSError."""
        _ready(self.directory).rename(self.directory.current)
        with suppress(OSError):  # it protects against a power cut, which takes the guest as well
            sync_directory(self.directory.path)

    async def run(self) -> None:
        """Resume the guest as soon as the old holder has released its disks' locks.

        Raises OperationFailedError: it is intact, and paused.
        """
        try:
            await retry(
                lambda: commands.cont(self._monitor),
                CommandRefusedError,
                every_s=RUN_POLL_S,
                within_s=RUN_S,
            )
        except CommandRefusedError as exc:
            raise OperationFailedError(
                f"'{self._spec.name}' is on {self._host.name} and is paused",
                why=exc.description,
                remedy=f"fix that, then: vmckpt vm start {self._spec.name}",
            ) from exc

    async def announce(self) -> None:
        """Announce the guest to the network, and make this QEMU an ordinary one."""
        await commands.announce_self(self._monitor)
        # Left on, the next migration would leave its memory behind.
        await commands.migrate_set_capabilities(self._monitor, {"x-ignore-shared": False})

    async def conclude(self) -> None:
        """Nothing remains."""

    async def close(self) -> None:
        """Disconnect; what QEMU is doing continues."""
        await self._monitor.close()
        if self._writer >= 0:
            os.close(self._writer)
            self._writer = -1

    async def end(self) -> None:
        """End it, and remove all that this host has of the VM."""
        await self.close()
        await end_qemu(self._host, self._spec.ram_dir, self.qemu.files)
        await self._host.remove(self.directory.path)

    async def ended(self) -> str:
        """Return when it is no longer usable, and why: its process has ended, or hangs."""
        return await poll(self.lack, every_s=CHECK_S)

    async def lack(self) -> str:
        """Why it could not run the guest now; empty if it answers."""
        try:
            await commands.query_status(self._monitor, SILENT_S)
        except MonitorLostError as exc:
            is_alive = await self._host.is_alive(self.qemu.process)
            return f"does not answer: {exc.why}" if is_alive else "has ended"
        return ""


async def _incoming(monitor: Monitor) -> int:
    """Make QEMU read from a pipe now, so that it needs no command later; returns the writing end.

    If this process dies, QEMU reads the pipe's end instead of a guest, and exits.
    """
    reader, writer = os.pipe()
    try:
        with open_fd(reader):
            with suppress(PermissionError):  # then a thread feeds it
                fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
            await monitor.give_fd(_FD_NAME, reader)
            await commands.migrate_incoming(monitor, f"fd:{_FD_NAME}")
    except BaseException:
        os.close(writer)
        raise
    return writer


def _ready(directory: VmDir) -> Path:
    """The VM's future home here."""
    return directory.current.with_name(".vm.json.ready")
