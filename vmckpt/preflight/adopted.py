"""Whether an adopted QEMU is still as it was when it was adopted."""

from vmckpt.preflight.finding import REFUSE, Finding
from vmckpt.qemu.monitor import Monitor
from vmckpt.vm.inventory import Vm


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
