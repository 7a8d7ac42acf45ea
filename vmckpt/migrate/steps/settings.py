"""Settings of both QEMUs for a migration, and their removal from the one that has the VM."""

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from vmckpt.errors import HostDownError, OperationFailedError, OutcomeUnknownError
from vmckpt.migrate.outcome.ends import End, Pair
from vmckpt.qemu import commands
from vmckpt.qemu.abilities import (
    SENDING_SPEED,
    SWITCHOVER_SPEED,
    USUAL_SPEED,
    ZERO_COPY,
    Agreement,
)
from vmckpt.qemu.monitor import CommandRefusedError, Monitor
from vmckpt.qemu.plain import switch_off_capabilities
from vmckpt.sequence.steps import all_of, both


async def set_source(pair: Pair, agreement: Agreement) -> None:
    """Set capabilities and parameters, and read them back.

    Raises OperationFailedError if a value is not applied.
    """
    await _set(pair.source, agreement.capabilities, agreement.source_parameters)


async def set_destination(pair: Pair, agreement: Agreement) -> None:
    """Do the same on the destination."""
    await _set(pair.destination, agreement.capabilities, agreement.target_parameters)


async def _set(end: End, capabilities: Mapping[str, bool], parameters: Mapping[str, Any]) -> None:
    monitor = await end.monitor()
    settings: list[Coroutine[Any, Any, Any]] = [
        commands.migrate_set_capabilities(monitor, capabilities),
        commands.migrate_set_parameters(monitor, parameters),
    ]
    if capabilities.get(ZERO_COPY):
        # Refused while a setting of an earlier migration compresses; otherwise it must come first.
        settings.reverse()
    # Different channel counts hang both QEMUs permanently, and without a return path a failed
    # destination leaves the source "completed": neither would ever report it. All is sent at once;
    # QEMU executes it in order.
    *_, has, is_set_to = await all_of(
        (
            *settings,
            commands.query_migrate_capabilities(monitor),
            commands.query_migrate_parameters(monitor),
        )
    )
    found: dict[str, Any] = {**has, **is_set_to}
    wanted = {**capabilities, **parameters}
    if wrong := [name for name, value in wanted.items() if found.get(name) != value]:
        raise OperationFailedError(
            f"{end.label} did not apply {', '.join(wrong)}",
            why="it reported no error, but still has another value",
            remedy="report this; the migration would not behave as requested",
        )


async def leave_plain(end: End, note: Callable[[str], None]) -> None:
    """Reset the QEMU that has the VM now, for the next migration or snapshot.

    Remaining settings are reported; vmckpt itself checks them before every operation.
    """
    try:
        monitor = await end.monitor()
        await both(switch_off_capabilities(monitor), _give_speeds_back(monitor))
    except (
        CommandRefusedError,
        HostDownError,
        OperationFailedError,
        OutcomeUnknownError,
    ) as exc:
        note(f"{end.label} keeps what it was set to for the migration: {exc}")


async def _give_speeds_back(monitor: Monitor) -> None:
    plain = {SENDING_SPEED: USUAL_SPEED, SWITCHOVER_SPEED: 0}
    known = await commands.query_migrate_parameters(monitor)
    await commands.migrate_set_parameters(
        monitor, {name: value for name, value in plain.items() if name in known}
    )
