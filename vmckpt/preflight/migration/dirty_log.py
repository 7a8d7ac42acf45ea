"""QEMU's dirty log under TCG misses writes: for which VMs, and with what effect.

QEMU before 8 clears the log without making the vCPUs notice their next write to a page. From 8 on
they notice only those to the first block of RAM (migration/ram.c ignores the block's offset), so
any pre-copy damages a guest with several blocks, as with NUMA nodes.
"""

from collections.abc import Iterator
from typing import NamedTuple

from vmckpt.options.migration import Method, MigrationOptions
from vmckpt.preflight.finding import REFUSE, WARN, Finding
from vmckpt.qemu.replies import QemuVersion
from vmckpt.vm.inventory import Vm

CODE = "tcg-dirty-log"
_BACK_END = "memory-backend-"
_SOUND_FROM = 8


class Loss(NamedTuple):
    """Why a source loses pages that its guest writes meanwhile; `always`, or sometimes."""

    reason: str
    always: bool


def loss(vm: Vm, version: QemuVersion) -> Loss | None:
    """What a source of that version loses of the VM's writes; None: nothing."""
    arguments = vm.spec.adopted.arguments if vm.spec.adopted else ()
    back_ends = sum(_BACK_END in argument for argument in arguments)
    return loss_of(vm.qemu.platform.accel, version, back_ends)


def loss_of(accel: str, version: QemuVersion, back_ends: int) -> Loss | None:
    """The same, from the facts that decide it. Pure."""
    if accel != "tcg":
        return None
    if version.major < _SOUND_FROM:
        return Loss(f"QEMU {version} as a source under TCG loses dirty pages", always=False)
    if back_ends > 1:
        reason = "QEMU under TCG tracks writes to the first memory back end alone, the VM has more"
        return Loss(reason, always=True)
    return None


def checks(found: Loss, options: MigrationOptions) -> Iterator[Finding]:
    """The checks of a method that relies on the log."""
    if options.method is Method.STOP:
        return
    remedy = "use --method stop, which needs no dirty tracking, or run it under a newer QEMU"
    if found.always:
        remedy = "use --method stop, which needs no dirty tracking"
        yield Finding(CODE, REFUSE, f"{found.reason}: the guest is damaged", remedy)
    elif options.may_postcopy:
        reason = f"{found.reason}: post-copy destroys the guest"
        yield Finding(CODE, REFUSE, reason, remedy)
    else:
        risk = "now and then: the guest may be damaged although QEMU says 'completed'"
        yield Finding(CODE, WARN, f"{found.reason} {risk}", remedy)
