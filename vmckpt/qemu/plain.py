"""Reset a QEMU to the state before any migration."""

import operator

from vmckpt.deadlines import poll
from vmckpt.errors import OperationFailedError
from vmckpt.qemu import commands
from vmckpt.qemu.monitor import Monitor

CLEANED_UP_S, POLL_S = 5.0, 0.01


async def switch_off_capabilities(monitor: Monitor) -> None:
    """Switch off every migration capability that is on.

    QEMU keeps them for its lifetime, and one set for a migration also affects unrelated commands:
    with `multifd`, 10.0 dies of a savevm, and a plain `migrate` hangs or fails. Raises
    OperationFailedError when a migration has not been cleaned up: without its capability QEMU would
    never end what it began (channels, their threads), and would refuse the next one.
    """
    capabilities = await commands.query_migrate_capabilities(monitor)
    if left_on := [name for name, on in capabilities.items() if on]:
        await _cleaned_up(monitor)
        await commands.migrate_set_capabilities(monitor, dict.fromkeys(left_on, False))


async def _cleaned_up(monitor: Monitor) -> None:
    # QEMU reports "failed" before it cleans up; yankable objects disappear last.
    async def has_channels() -> bool:
        items = await commands.query_yank(monitor, oob=False)
        return any(item["type"] == "migration" for item in items)

    if await poll(has_channels, operator.not_, every_s=POLL_S, within_s=CLEANED_UP_S):
        raise OperationFailedError(
            f"{monitor.label} has a migration that does not end",
            why=f"{CLEANED_UP_S:.0f} s after it was over it still holds its channels",
            remedy="see the VM's stderr.log, and try again",
        )
