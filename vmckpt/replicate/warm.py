"""The QEMU that waits on the standby, its memory the replica's; and how it takes the guest over."""

import asyncio
from dataclasses import replace

from vmckpt.epoch.load import SETTINGS, load_devices
from vmckpt.hosts.local import LocalHost
from vmckpt.qemu import commands
from vmckpt.qemu.monitor import Monitor, MonitorLostError
from vmckpt.sequence.steps import finish
from vmckpt.vm.argv import Platform
from vmckpt.vm.paths import VmDir, vm_dir
from vmckpt.vm.spec import Spec
from vmckpt.vm.start import Qemu, Replaced, end_qemu, new_qemu_id, plug_taps, start_qemu

# How often it is looked at, and when it is given up.
LOOK_S, SILENT_S = 0.5, 5.0


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
            await commands.migrate_set_capabilities(monitor, SETTINGS)
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
        await load_devices(self._monitor, device_state)

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
