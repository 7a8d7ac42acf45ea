"""The state of a VM's devices by a migration to this process, RAM in a named file left out."""

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

from vmckpt.errors import OperationFailedError
from vmckpt.memory.ram_file import open_fd
from vmckpt.qemu import commands
from vmckpt.qemu.monitor import Events, Monitor
from vmckpt.sequence.steps import finish

# RAM that is a named shared file is left out of what `migrate` writes.
CAPABILITIES = {"x-ignore-shared": True, "events": True, "return-path": False}
# What is left, ROMs and devices, is written at once, in one round.
PARAMETERS = {"max-bandwidth": 1 << 40, "downtime-limit": 2_000_000}
# The proof that its vCPUs ran: of a VM that runs it is in the log, which has no room for all of it.
VCPU_TRACE = "vm_state_notify"
# The state of an ordinary machine's devices fits.
PIPE_BYTES = 1 << 20
STATE_TIMEOUT_S = 10.0
_FD_NAME = "vmckpt-epoch"


@asynccontextmanager
async def saving(
    monitor: Monitor, wished: Mapping[str, bool], limits: Mapping[str, int]
) -> AsyncIterator[None]:
    """QEMU's settings for saving its state, for the block; then they are as they were.

    With `x-ignore-shared` left on, the next migration would leave its memory behind; what an
    earlier migration left on (multifd) would have QEMU refuse a pipe.
    """
    capabilities = await commands.query_migrate_capabilities(monitor)
    parameters = await commands.query_migrate_parameters(monitor)
    wanted = {name: False for name, on in capabilities.items() if on} | dict(wished)
    try:
        await commands.trace(monitor, VCPU_TRACE, enabled=False)
        await commands.migrate_set_capabilities(monitor, wanted)
        await commands.migrate_set_parameters(monitor, limits)
        yield
    finally:
        if monitor.is_open:
            await finish(commands.trace(monitor, VCPU_TRACE, enabled=True))
            before = {name: capabilities[name] for name in wanted}
            await finish(commands.migrate_set_capabilities(monitor, before))
            values = {name: parameters[name] for name in limits}
            await finish(commands.migrate_set_parameters(monitor, values))


class DeviceMigration:
    """One that is to be begun in a pause."""

    def __init__(self, monitor: Monitor, events: Events, came: "asyncio.Future[bytes]") -> None:
        self._monitor, self._events, self._came = monitor, events, came

    def begin(self) -> Coroutine[Any, Any, None]:
        """The command, to be given while the VM is paused."""
        return commands.migrate(self._monitor, f"fd:{_FD_NAME}")

    async def state(self) -> bytes:
        """All of it. QEMU closes the pipe when it lets the guest run again: `cont` is refused
        before that, for a moment longer than it has said that it is done.

        Raises OperationFailedError.
        """
        try:
            async with asyncio.timeout(STATE_TIMEOUT_S):
                state = await self._came
        except TimeoutError as exc:
            raise self._gives_none(f"its pipe is open after {STATE_TIMEOUT_S:g} s") from exc
        await self._require_completed()
        return state

    async def _require_completed(self) -> None:
        while event := await self._events.next(STATE_TIMEOUT_S):
            data: Any = event["data"]
            if data["status"] == "completed":
                return
            if data["status"] in ("failed", "cancelled"):
                break
        status = await commands.query_migrate(self._monitor)
        raise self._gives_none(status.error or f"migration to a descriptor is {status.status}")

    def _gives_none(self, why: str) -> OperationFailedError:
        return OperationFailedError(
            f"{self._monitor.label} does not give the state of its devices",
            why=why,
            remedy="look at the VM's stderr.log",
        )


@asynccontextmanager
async def device_migration(monitor: Monitor) -> AsyncIterator[DeviceMigration]:
    """One, with a pipe that QEMU has been given, for the block."""
    with _received() as (writer, came):
        with open_fd(writer):
            await monitor.give_fd(_FD_NAME, writer)
        with monitor.events("MIGRATION") as events:
            yield DeviceMigration(monitor, events, came)


@contextmanager
def _received() -> Iterator[tuple[int, "asyncio.Future[bytes]"]]:
    """The writing end of a pipe, to be closed by the caller, and all that comes until it closes."""
    loop = asyncio.get_running_loop()
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    with suppress(PermissionError):  # then QEMU waits for us now and then
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    came: list[bytes] = []
    everything: asyncio.Future[bytes] = loop.create_future()

    def read() -> None:
        came.append(os.read(reader, PIPE_BYTES))
        if not came[-1]:
            loop.remove_reader(reader)
            if not everything.done():  # cancelled meanwhile
                everything.set_result(b"".join(came))

    with open_fd(reader):
        loop.add_reader(reader, read)
        try:
            yield writer, everything
        finally:
            loop.remove_reader(reader)
