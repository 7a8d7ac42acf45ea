"""Adopted QEMUs: whether one is as it was when it was adopted, and who else may start it."""

from collections.abc import AsyncIterator, Iterator

from vmckpt.preflight.finding import REFUSE, Finding
from vmckpt.qemu.monitor import Monitor
from vmckpt.vm.inventory import Vm
from vmckpt.vm.spec.spec import Spec


async def adopted_changes(vm: Vm, monitor: Monitor) -> list[Finding]:
    """A refusal if what was plugged in or out since then would be missing from a later QEMU.

    Raises as `Monitor.ask` does.
    """
    if not vm.qemu.is_foreign:
        return []
    # Only adopted VMs need the extra time.
    from vmckpt.vm.adopted.adopt import changes

    if (changed := await changes(vm, monitor)) is None:
        return []
    reason = f"since it was adopted the VM has changed: {changed}"
    remedy = f"adopt it again: vmckpt vm rm {vm.name} (its QEMU goes on), then vm adopt"
    return [Finding("adopted", REFUSE, reason, remedy)]


async def restarted_by_others(vm: Vm) -> AsyncIterator[Finding]:
    """A refusal if a service may start its QEMU again when its guest has failed over."""
    if not vm.qemu.is_foreign:
        return
    from vmckpt.vm.adopted.adopt import supervisor

    if (unit := await supervisor(vm.host, vm.qemu.process)) is not None:
        reason = (
            f"its QEMU runs in {unit}, which may start it again after a failover: the guest would "
            "run twice"
        )
        remedy = f"disable {unit}, and migrate the VM, there and back: then its QEMU is vmckpt's"
        yield Finding("supervisor", REFUSE, reason, remedy)


def based_disks(spec: Spec) -> Iterator[Finding]:
    """A refusal if its command line says of a disk what is not true of a copy of it."""
    if spec.adopted is None:
        return
    from vmckpt.vm.adopted.copies.whole_images import on_whole_images

    formats = {n: disk.format for n, disk in enumerate(spec.disks) if not disk.read_only}
    arguments = spec.adopted.arguments
    if on_whole_images(arguments, formats).arguments != arguments:
        reason = "its command line bases a disk on another image, or on a part of one"
        remedy = "restore it from a checkpoint first: then its images stand alone"
        yield Finding("disk-nodes", REFUSE, reason, remedy)
