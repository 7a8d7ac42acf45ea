"""Gets the state of a VM's devices by a migration to this process, without RAM in a named file."""

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
from vmckpt.units import format_size

# `migrate` omits RAM that is a named shared file.
CAPABILITIES = {"x-ignore-shared": True, "events": True, "return-path": False}
# The rest, ROMs and devices, is written at once, in one round.
PARAMETERS = {"max-bandwidth": 1 << 40, "downtime-limit": 2_000_000}
# The proof that its vCPUs ran. A VM that runs has it in its log already, which lacks the space for
# more.
VCPU_TRACE = "vm_state_notify"
# Large enough for the state of an ordinary machine's devices.
PIPE_BYTES = 1 << 20
STATE_TIMEOUT_S = 10.0
# More than any devices have, a graphics card's memory included.
MOST_STATE_BYTES = 1 << 30
_FD_NAME = "vmckpt-epoch"


@asynccontextmanager
async def saving(
    monitor: Monitor, requested: Mapping[str, bool], limits: Mapping[str, int]
) -> AsyncIterator[None]:
    """QEMU's settings for saving its state, for the block; restored afterwards.

    With `x-ignore-shared` left on, the next migration would leave its memory behind; what an
    earlier migration left on (multifd) would make QEMU refuse a pipe.
    """
    capabilities = await commands.query_migrate_capabilities(monitor)
    parameters = await commands.query_migrate_parameters(monitor)
    wanted = {name: False for name, on in capabilities.items() if on} | dict(requested)
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
    """A migration to be started in a pause."""

    def __init__(self, monitor: Monitor, events: Events, came: "asyncio.Future[bytes]") -> None:
        self._monitor, self._events, self._came = monitor, events, came

    def begin(self) -> Coroutine[Any, Any, None]:
        """The command, to be sent while the VM is paused."""
        return commands.migrate(self._monitor, f"fd:{_FD_NAME}")

    async def state(self) -> bytes:
        """All of the state. QEMU closes the pipe when it lets the guest run again: before that, for
        a moment longer than it has reported completion, `cont` is refused.

        Raises OperationFailedError.
        """
        try:
            async with asyncio.timeout(STATE_TIMEOUT_S):
                state = await self._came
        except TimeoutError as exc:
            raise self._gives_none(f"its pipe is open after {STATE_TIMEOUT_S:g} s") from exc
        require_bounded(self._monitor, len(state))
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
        return _no_state(self._monitor, why)


def require_bounded(monitor: Monitor, state_bytes: int) -> None:
    """Require that a state has a plausible size: a compromised QEMU could fill this host's
    memory. Raises OperationFailedError.
    """
    if state_bytes > MOST_STATE_BYTES:
        raise _no_state(monitor, f"it is larger than {format_size(MOST_STATE_BYTES)}")


def _no_state(monitor: Monitor, why: str) -> OperationFailedError:
    return OperationFailedError(
        f"{monitor.label} did not deliver the state of its devices",
        why=why,
        remedy="see the VM's stderr.log",
    )


@asynccontextmanager
async def device_migration(monitor: Monitor) -> AsyncIterator[DeviceMigration]:
    """A migration, with a pipe that QEMU has received, for the block."""
    with _received() as (writer, came):
        with open_fd(writer):
            await monitor.give_fd(_FD_NAME, writer)
        with monitor.events("MIGRATION") as events:
            yield DeviceMigration(monitor, events, came)


@contextmanager
def _received() -> Iterator[tuple[int, "asyncio.Future[bytes]"]]:
    """The writing end of a pipe, which the caller closes, and all data received until then."""
    loop = asyncio.get_running_loop()
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    with suppress(PermissionError):  # then QEMU sometimes waits for us
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    came: list[bytes] = []
    came_bytes = 0
    everything: asyncio.Future[bytes] = loop.create_future()

    def read() -> None:
        nonlocal came_bytes
        came.append(os.read(reader, PIPE_BYTES))
        came_bytes += len(came[-1])
        if came[-1] and came_bytes <= MOST_STATE_BYTES:
            return
        loop.remove_reader(reader)
        if not everything.done():  # it was cancelled meanwhile
            everything.set_result(b"".join(came))

    with open_fd(reader):
        loop.add_reader(reader, read)
        try:
            yield writer, everything
        finally:
            loop.remove_reader(reader)
