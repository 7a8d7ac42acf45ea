"""Work on a VM, on one host, without its devices: they are removed before and return after it."""

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple, TypeVar

from vmckpt.devices.journey import STEPS_OUT, Journey
from vmckpt.errors import JobHeldError, RefusedError, VmckptError
from vmckpt.hosts.host import Host
from vmckpt.qemu.monitor import Monitor, session
from vmckpt.sequence.steps import Step, UndoFailure, run_steps, to_the_end
from vmckpt.vm.inventory import Vm, require_alive
from vmckpt.vm.lifecycle import held
from vmckpt.vm.paths import QemuDir

T = TypeVar("T")
WORK = "work"


class OpenQemu(NamedTuple):
    """A QEMU with a session that is already open."""

    host: Host
    files: QemuDir
    session: Monitor

    async def monitor(self) -> Monitor:
        """The session."""
        return self.session


async def without_devices(
    vm: Vm,
    monitor: Monitor,
    run: str,
    tell: Callable[[str], None],
    work: Callable[[], Coroutine[Any, Any, T]],
) -> T:
    """Do `work` while no passthrough device is in the guest; returns its result.

    For the holder of the VM's lock. After any failure the devices come back and their jobs resume.
    Raises what `work` does, HookFailedError and the errors of an unplug (nothing has changed),
    JobHeldError (the work is done, or it failed and a device did not come back).
    """
    journey = Journey(vm.spec.passthrough, run, lambda _, text: tell(text))
    if not journey.has_devices:
        return await work()
    here = OpenQemu(vm.host, vm.qemu.files, monitor)
    given: list[T] = []
    not_undone: list[UndoFailure] = []

    async def do() -> None:
        given.append(await work())

    async def started(step: Step) -> None:
        await vm.host.write_text(vm.directory.away, step.name)
        if step.name != WORK:
            tell(f"{vm.name}: {step.name}")

    def undo_failed(failure: UndoFailure) -> None:
        tell(f"undoing '{failure.step}' failed: {failure.error}")
        not_undone.append(failure)

    try:
        steps = (*journey.steps_out(here), Step(WORK, do))
        try:
            await run_steps(steps, started=started, undo_failed=undo_failed)
        except VmckptError as exc:
            if not_undone:
                raise _held_after(exc, not_undone[0], vm) from exc
            raise
        await to_the_end(_told_if_held(journey.bring_back(here), vm))
    finally:
        # A second try would not bring back what failed now.
        await to_the_end(vm.host.remove(vm.directory.away))
    return given[0]


async def plug_in(vm: Vm, monitor: Monitor) -> None:
    """Plug in the devices of a guest that never ran with them. Raises RefusedError and others."""
    await _journey(vm, "restore").plug(OpenQemu(vm.host, vm.qemu.files, monitor))


async def bring_back(vm: Vm, monitor: Monitor, run: str) -> list[str]:
    """Give devices to a guest whose state was taken without them; returns the failures as text."""
    journey = _journey(vm, run)
    if not journey.has_devices:
        return []
    try:
        await _told_if_held(journey.bring_back(OpenQemu(vm.host, vm.qemu.files, monitor)), vm)
    except JobHeldError as exc:
        return [str(exc)]
    return []


def _journey(vm: Vm, run: str) -> Journey:
    return Journey(vm.spec.passthrough, run, lambda _code, _text: None)


async def recover_devices(vm: Vm) -> None:
    """Recovery after the unplugging process died: plug them in and resume their jobs.

    The caller holds the lock. Raises JobHeldError.
    """
    journey = _journey(vm, "recover")
    # Without this file no guest was asked to release a device.
    step = await vm.host.read_text(vm.directory.away) or STEPS_OUT[0]
    try:
        if journey.has_devices and await vm.is_alive():
            connected = await vm.host.connect(vm.qemu.files.operator)
            async with session(connected, vm.name) as monitor:
                here = OpenQemu(vm.host, vm.qemu.files, monitor)
                await _told_if_held(journey.recover(here, step), vm)
    finally:
        await vm.host.remove(vm.directory.away)


async def recover_now(vm: Vm) -> None:
    """Recover the devices at the operator's request.

    Raises RefusedError (it has no devices, or is off), BusyError, JobHeldError.
    """
    async with held(vm, "device recover") as now:
        await require_alive(now)
        if not _journey(now, "recover").has_devices:
            raise RefusedError(
                f"'{now.name}' has no device that vmckpt unplugs",
                why="its spec has no [[passthrough]] with a hook",
                remedy="there is nothing to do",
            )
        await recover_devices(now)


def _held_after(exc: VmckptError, failure: UndoFailure, vm: Vm) -> JobHeldError:
    return JobHeldError(
        f"{exc.what}: {exc.why}; and jobs that used a device of '{vm.name}' were not resumed",
        why=f"undoing '{failure.step}' failed: {failure.error}",
        remedy=f"vmckpt device recover {vm.name}",
    )


async def _told_if_held(back: Awaitable[None], vm: Vm) -> None:
    try:
        await back
    except VmckptError as exc:
        raise JobHeldError(
            f"jobs that used a device of '{vm.name}' were not resumed: {exc.what}",
            why=exc.why,
            remedy=f"{exc.remedy}; then: vmckpt device recover {vm.name}",
        ) from exc
