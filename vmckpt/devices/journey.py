"""The devices of one VM during an operation that excludes them: out, and back.

Out: quiesce, lock, checkpoint, release, unplug. Back, on the host that has the guest then: plug,
reattach, restore, resume. A failure on the way out is undone where the guest is.
"""

import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from vmckpt.devices.contract import PHASES_BACK, PHASES_OUT, HookPhase
from vmckpt.devices.hook import GuestHook, HookFailedError
from vmckpt.errors import (
    HostDownError,
    OperationFailedError,
    OutcomeUnknownError,
    RefusedError,
    VmckptError,
)
from vmckpt.hosts.host import Host
from vmckpt.qemu import hotplug
from vmckpt.qemu.hotplug import UnplugRefusedError
from vmckpt.qemu.monitor import Monitor
from vmckpt.sequence.steps import Step
from vmckpt.vm.passthrough.passthrough import Passthrough, Strategy
from vmckpt.vm.paths import QemuDir

UNPLUG_TIMEOUT_S = 30.0
# On the return only a retry is possible.
TRIES = 3
UNPLUG, PLUG = "unplug", "plug"
HOOK = "hook-"
# The steps of an operation, in order.
STEPS_OUT = (*(f"{HOOK}{phase}" for phase in PHASES_OUT), UNPLUG)
BRING_BACK = "bring-back"


class QemuAccess(Protocol):
    """A QEMU, and access to its monitor."""

    @property
    def host(self) -> Host:
        """Where it runs."""

    @property
    def files(self) -> QemuDir:
        """Its files."""

    async def monitor(self) -> Monitor:
        """A session. Raises HostDownError."""


class Journey:
    """The devices that are unplugged for an operation. For a VM without any, nothing is done."""

    def __init__(
        self, devices: tuple[Passthrough, ...], run: str, note: Callable[[str, str], None]
    ) -> None:
        self._devices = [device for device in devices if device.strategy.detaches]
        self._paired = [device for device in devices if device.strategy is Strategy.FAILOVER]
        self._run, self._note = run, note
        self._refused = False
        self._took_s: dict[str, float] = {}
        self.device_bytes = 0

    @property
    def has_devices(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._devices)

    @property
    def absent_ids(self) -> frozenset[str]:
        """The ids of all functions that a destination's QEMU does not have, or show, beforehand."""
        return self.ids | {device.function_id(n) for device in self._paired for n in range(8)}

    @property
    def ids(self) -> frozenset[str]:
        """The ids of all functions that are removed and return."""
        return frozenset(device.function_id(n) for device in self._devices for n in range(8))

    @property
    def out_s(self) -> float:
        """How long the way out took."""
        return self._sum(*PHASES_OUT, UNPLUG)

    @property
    def back_s(self) -> float:
        """How long the return took."""
        return self._sum(PLUG, *PHASES_BACK)

    def _sum(self, *phases: str) -> float:
        return round(sum(self._took_s.get(phase, 0.0) for phase in phases), 4)

    def _took(self, phase: str, began_s: float) -> None:
        self._took_s[phase] = self._took_s.get(phase, 0.0) + time.monotonic() - began_s

    def steps_out(self, source: QemuAccess) -> tuple[Step, ...]:
        """The way out as steps; each one's undo finds the guest running on the source."""
        if not self._devices:
            return ()
        return (
            *(self._hook_step(source, phase, back) for phase, back in PHASES_OUT.items()),
            Step(UNPLUG, lambda: self.unplug(source), lambda: self.plug_back(source)),
        )

    def _hook_step(self, source: QemuAccess, phase: HookPhase, back: HookPhase) -> Step:
        return Step(
            f"{HOOK}{phase}",
            lambda: self.phase(source, phase),
            lambda: self.phase(source, back, tries=TRIES),
        )

    async def phase(self, access: QemuAccess, phase: HookPhase, *, tries: int = 1) -> None:
        """Run a phase in every hook, one after another: a guest's agent has one client at a time.

        Raises HookFailedError for the first that fails; on the return the others run it all the
        same.
        """
        began_s, failed = time.monotonic(), list[HookFailedError]()
        for device in self._devices:
            try:
                await self._one(access, device, phase, tries)
            except HookFailedError as exc:
                if phase in PHASES_OUT:
                    raise
                failed.append(exc)
        if failed:
            raise failed[0]
        self._took(phase, began_s)

    async def _one(
        self, access: QemuAccess, device: Passthrough, phase: HookPhase, tries: int
    ) -> None:
        answer = await GuestHook(access.host, access.files, device, self._run).do(
            phase, tries=tries
        )
        if phase is HookPhase.CHECKPOINT:
            self.device_bytes += answer.device_bytes
        for job in answer.restarted:
            self._note("job-restarted", f"{job} could not be brought back: it was restarted")
        for text in answer.notes:
            self._note(f"hook-{device.id}", text)

    async def unplug(self, source: QemuAccess) -> None:
        """Remove all devices from the guest. Raises OperationFailedError, TimedOutError."""
        from vmckpt.vm.passthrough import plug

        began_s, self._refused = time.monotonic(), False
        try:
            monitor = await source.monitor()
            for device in self._devices:
                host, files = source.host, source.files
                await plug.unplug(host, files, monitor, device, UNPLUG_TIMEOUT_S)
        except UnplugRefusedError:
            self._refused = True
            raise
        except (OutcomeUnknownError, HostDownError) as exc:
            # The source has the guest, whatever became of the device, which is looked up again.
            raise OperationFailedError(exc.what, why=exc.why, remedy=exc.remedy) from exc
        self._took(UNPLUG, began_s)

    async def plug(self, access: QemuAccess) -> None:
        """Plug in every device. Raises RefusedError, OperationFailedError.

        The error is the first one's that cannot be plugged in; the others are, all the same.
        """
        from vmckpt.vm.passthrough import plug

        began_s, failed = time.monotonic(), list[VmckptError]()
        for device in self._devices:
            try:
                await plug.plug(access.host, access.files, await access.monitor(), [device])
            except (RefusedError, OperationFailedError) as exc:
                failed.append(exc)
            except (OutcomeUnknownError, HostDownError) as exc:
                failed.append(OperationFailedError(exc.what, why=exc.why, remedy=exc.remedy))
        if failed:
            raise failed[0]
        self._took(PLUG, began_s)

    async def plug_back(self, access: QemuAccess) -> None:
        """Plug in every device, once no request to the guest to release one is pending.

        A silent guest that was asked may release the device at any time: it is given time for that.
        """
        if not self._refused:
            try:
                await self.unplug(access)
            except VmckptError as exc:
                self._note("unplug", f"{exc.what}: {exc.why}")
        await self._persist(lambda: self.plug(access))

    async def recover(self, access: QemuAccess, step: str) -> None:
        """Recovery after a process died in `step`: plug the devices in and resume their jobs.

        A guest that was asked to release a device may do so at any time. So the unplugging is
        completed first, which is safe at any stage of the return. Raises as `abort` does.
        """
        if step not in STEPS_OUT[:-1] and await self._any_plugged(access):
            try:
                for phase in PHASES_OUT:
                    await self.phase(access, phase)
                await self.unplug(access)
            except VmckptError as exc:
                self._note("unplug", f"{exc.what}: {exc.why}")
        await self.abort(access)

    async def _any_plugged(self, access: QemuAccess) -> bool:
        return bool(self.ids & await hotplug.plugged(await access.monitor()))

    async def bring_back(self, access: QemuAccess) -> None:
        """Plug, reattach, restore, resume: whatever is left to do.

        If a hook cannot, it is asked to abort, which resumes the jobs by any means. Raises
        HookFailedError, RefusedError, OperationFailedError: the jobs do not run.
        """
        await self._persist(lambda: self.plug(access))
        try:
            for phase in PHASES_BACK:
                await self.phase(access, phase, tries=TRIES)
        except HookFailedError as exc:
            self._note("hook", f"{exc.what}: {exc.why}; the hook is asked to abort")
            await self.abort(access)

    async def abort(self, access: QemuAccess) -> None:
        """Plug in what is missing; the hooks resume the jobs, however far they had come."""
        await self._persist(lambda: self.plug(access))
        await self.phase(access, HookPhase.ABORT, tries=TRIES)

    @staticmethod
    async def _persist(act: Callable[[], Coroutine[Any, Any, None]]) -> None:
        for _ in range(TRIES - 1):
            try:
                return await act()
            except (OperationFailedError, HostDownError):
                continue
        return await act()
