"""The QEMU that waits on the standby, its memory the replica's; and how it takes the guest over."""

import asyncio
import os
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from vmckpt.errors import OperationFailedError
from vmckpt.hosts.local import LocalHost
from vmckpt.memory.ram_file import open_fd
from vmckpt.qemu import commands
from vmckpt.qemu.monitor import Monitor, MonitorLostError
from vmckpt.sequence.in_thread import in_thread
from vmckpt.sequence.steps import finish
from vmckpt.vm.argv import Platform
from vmckpt.vm.paths import VmDir, vm_dir
from vmckpt.vm.spec import Spec
from vmckpt.vm.start import Qemu, Replaced, end_qemu, new_qemu_id, plug_taps, start_qemu

LOAD_TIMEOUT_S = 10.0
# How often it is looked at, and when it is given up.
LOOK_S, SILENT_S = 0.5, 5.0
_FD_NAME = "vmckpt-state"
_SETTINGS = {"x-ignore-shared": True, "events": True, "return-path": False}


class Warm:
    """A QEMU that waits for the guest. Its NICs are plugged in: it sends nothing before it runs."""

    def __init__(self, host: LocalHost, spec: Spec, qemu: Qemu, monitor: Monitor) -> None:
        self._host, self._spec, self.qemu, self._monitor = host, spec, qemu, monitor

    @classmethod
    async def start(cls, host: LocalHost, spec: Spec, platform: Platform) -> "Warm":
        """Raises as `start_qemu` and `plug_taps` do; then nothing of it is left."""
        directory = vm_dir(host.state_dir, spec.name)
        files = directory.qemu(new_qemu_id())
        qemu, monitor = await start_qemu(host, spec, platform, files, incoming=True)
        try:
            await plug_taps(host, spec, files)
            await commands.migrate_set_capabilities(monitor, _SETTINGS)
        except BaseException:
            await monitor.close()
            await finish(end_qemu(host, spec.ram_dir, files))
            raise
        return cls(host, spec, qemu, monitor)

    @property
    def directory(self) -> VmDir:
        """The VM's files on this host."""
        return vm_dir(self._host.state_dir, self._spec.name)

    async def load(self, device_state: bytes) -> None:
        """Give it the guest, whose memory it has: it stands still, ready to run.

        Raises OperationFailedError; then this QEMU is of no use any more.
        """
        reader, writer = os.pipe()
        feeding = asyncio.ensure_future(in_thread(partial(_feed, writer, device_state)))
        with open_fd(reader):
            await self._monitor.give_fd(_FD_NAME, reader)
        with self._monitor.events("MIGRATION") as events:
            await commands.migrate_incoming(self._monitor, f"fd:{_FD_NAME}")
            while event := await events.next(LOAD_TIMEOUT_S):
                data: Any = event["data"]
                if data["status"] == "completed":
                    await feeding
                    return
                if data["status"] == "failed":
                    break
        raise OperationFailedError(
            f"the standby's QEMU does not take '{self._spec.name}' over",
            why=f"it cannot load the state of its devices: see {self.qemu.files.stderr}",
            remedy="the primary's VM, if it is alive, is not touched: see `vmckpt vm list`",
        )

    async def settle_here(self, replaced: Replaced) -> None:
        """The VM is at home here, and what `replaced` was is stale. Raises StorageError."""
        here = replace(self.qemu, replaces=replaced)
        await self._host.write_text(self.directory.current, here.to_json())

    async def run(self) -> None:
        """Let the guest run."""
        await commands.cont(self._monitor)

    async def announce(self) -> None:
        """Tell the network that it is here, and make this QEMU one like any other."""
        await commands.announce_self(self._monitor)
        # Left on, the next migration would leave its memory behind.
        await commands.migrate_set_capabilities(self._monitor, {"x-ignore-shared": False})

    async def close(self) -> None:
        """Let go of it; what it is doing it goes on doing."""
        await self._monitor.close()

    async def end(self) -> None:
        """End it, with all that this host has of the VM."""
        await self._monitor.close()
        await end_qemu(self._host, self._spec.ram_dir, self.qemu.files)
        await self._host.remove(self.directory.path)

    async def ended(self) -> str:
        """Return when it is of no use any more, and why: its process has ended, or stands still."""
        while await self._host.is_alive(self.qemu.process):
            await asyncio.sleep(LOOK_S)
            try:
                await commands.query_status(self._monitor, SILENT_S)
            except MonitorLostError as exc:
                if await self._host.is_alive(self.qemu.process):
                    return f"does not answer: {exc.why}"
        return "has ended"


def _feed(writer: int, data: bytes) -> None:
    """Write it all into a pipe, as far as somebody reads, and close it."""
    with open_fd(writer), suppress(BrokenPipeError):  # who reads says why it stopped
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(writer, rest) :]
