"""The guard's command line; `guard.py` itself imports nothing of vmckpt's."""

import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from vmckpt.epoch import guard
from vmckpt.errors import HostDownError, OutcomeUnknownError
from vmckpt.lease.clock import boottime_s
from vmckpt.qemu import commands
from vmckpt.qemu.monitor import Monitor
from vmckpt.sequence.steps import finish
from vmckpt.vm.record import Qemu
from vmckpt.vm.users.users import made_by

# No pause takes longer, unless the process responsible for it is stuck.
STUCK_S = 30.0


def guard_command(qemu: Qemu, holds: Sequence[str] = ()) -> list[str]:
    """The command line of a QEMU's guard; no other process has it.

    `holds` are objects that hold the guest's output for the process that takes epochs; the guard
    removes them with it.
    """
    program, rescue = str(Path(guard.__file__)), str(made_by(qemu.files, qemu.files.rescue.name))
    return [sys.executable, "-I", "-S", program, rescue, str(qemu.process.pid), *holds]


@asynccontextmanager
async def guest_paused(monitor: Monitor, tell_guard: Callable[[str], None]) -> AsyncIterator[None]:
    """Pause a running guest for the block; if this process dies or is stuck, it is resumed."""
    if not (await commands.query_status(monitor)).running:
        yield
        return
    dead = suppress(OSError)  # a dead guard does nothing: then only this process does
    with dead:
        tell_guard(f"free {boottime_s() + STUCK_S}")
    try:
        await commands.stop(monitor)
        yield
    finally:
        with suppress(HostDownError, OutcomeUnknownError):  # its QEMU has ended
            await finish(commands.cont(monitor))
            with dead:
                tell_guard("free inf")
