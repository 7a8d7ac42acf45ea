"""libvirt's monitor of a domain's QEMU, for the machine that it runs on.

Commands go by `virDomainQemuMonitorCommandWithFiles`, events by `qemuMonitorEvent`. The guest is
paused and resumed by libvirt itself, so that its state, its events and its disk locks stay true. A
file marks that a pause is ours: what ends an interrupted operation then resumes the guest.

libvirt marks a domain whose monitor was used as tainted (`custom-monitor`) until it is off.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from vmckpt.errors import HostDownError, NotFoundError, RefusedError, VmckptError
from vmckpt.hosts.host import Host
from vmckpt.installing import Need, advice_here
from vmckpt.qemu.monitor import Json
from vmckpt.qemu.relayed import Receive, RelayedMonitor
from vmckpt.state.durable import storage_errors
from vmckpt.vm.domains.connection import LibvirtConnection, is_installed
from vmckpt.vm.domains.faults import LibvirtRefusedError
from vmckpt.vm.domains.flags import DomainState, ErrorCode

DONE = '{"return": {}}'
TAINT = "custom-monitor"
TAINTED = (
    f"libvirt marks it as tainted ({TAINT}) until it is off, because vmckpt uses its QEMU's monitor"
)
# libvirt's word for a domain that is off.
_NOT_RUNNING = "not running"


class DomainRelay(LibvirtConnection):
    """A session with this machine's libvirtd, for one domain. Raises as `LibvirtConnection`."""

    def __init__(self, uri: str, host: Host, uuid: str, pause_mark: Path) -> None:
        super().__init__(uri, host)
        self._uuid, self._mark = uuid, pause_mark
        self._events: int | None = None
        self._receive: Receive | None = None
        self._handle: Any = None

    @property
    def is_open(self) -> bool:
        """Whether libvirtd still serves this session."""
        import libvirt

        with suppress(libvirt.libvirtError):
            return bool(self._connection.isAlive())
        return False

    async def execute(
        self, command: str, arguments: Json | None, fd: int | None, timeout_s: float | None
    ) -> str:
        """See `Relay`."""
        try:
            if command == "stop":
                await self.pause(timeout_s)
            elif command == "cont":
                await self.resume(timeout_s)
            else:
                return await self._execute(command, arguments, fd, timeout_s)
        except NotFoundError as exc:  # a transient domain goes with its QEMU
            raise _ended(exc) from exc
        except LibvirtRefusedError as exc:
            if exc.code == ErrorCode.OPERATION_INVALID and _NOT_RUNNING in exc.why:
                raise _ended(exc) from exc
            raise
        return DONE

    async def _execute(
        self, command: str, arguments: Json | None, fd: int | None, timeout_s: float | None
    ) -> str:
        words = json.dumps({"execute": command, "arguments": arguments or {}})
        files = [] if fd is None else [fd]

        def work() -> str:
            import libvirt_qemu

            reply, returned = libvirt_qemu.qemuMonitorCommandWithFiles(self._domain(), words, files)
            for file in returned:
                file.close()
            return str(reply)

        return await self._ask(f"have its QEMU execute {command}", work, timeout_s)

    async def pause(self, timeout_s: float | None) -> None:
        """Pause the guest, marked as ours."""
        with storage_errors(f"write {self._mark}"):
            self._mark.touch()
        await self._ask("pause the domain", lambda: self._domain().suspend(), timeout_s)

    async def resume(self, timeout_s: float | None) -> None:
        """Resume the guest if it is paused."""

        def work() -> None:
            import libvirt

            try:
                self._domain().resume()
            except libvirt.libvirtError:
                if self._domain().state()[0] != DomainState.RUNNING:
                    raise

        await self._ask("resume the domain", work, timeout_s)
        self._mark.unlink(missing_ok=True)

    async def subscribe(self, receive: Receive) -> None:
        """Have `receive` called, in this thread, with the name and data of QEMU's events."""
        loop, self._receive = asyncio.get_running_loop(), receive

        def told(_c: Any, _d: Any, name: str, _s: int, _us: int, data: str, _: None) -> None:
            with suppress(RuntimeError):  # the event loop has closed meanwhile
                loop.call_soon_threadsafe(receive, name, data)

        def work() -> int:
            import libvirt_qemu

            register = libvirt_qemu.qemuMonitorEventRegister
            return int(register(self._connection, self._domain(), None, told, None))

        self._events = await self._ask("report its QEMU's events", work)

    async def reopen(self) -> None:
        """See `Relay`."""
        self._handle = self._events = None
        await self.open()
        if self._receive is not None:
            await self.subscribe(self._receive)

    async def close(self) -> None:
        """Close the session."""
        import libvirt_qemu

        self._handle = None
        if (number := self._events) is not None:
            forget = libvirt_qemu.qemuMonitorEventDeregister
            with suppress(VmckptError):
                await self._ask("report no more", lambda: forget(self._connection, number), 1.0)
        await super().close()

    def _domain(self) -> Any:
        if self._handle is None:  # asked for once: a pause is short
            self._handle = self._connection.lookupByUUIDString(self._uuid)
        return self._handle


def _ended(exc: VmckptError) -> HostDownError:
    """What a closed monitor of its own would say."""
    return HostDownError("its QEMU has ended", why=exc.why, remedy="see `vmckpt vm list`")


@asynccontextmanager
async def domain_monitor(
    host: Host, uuid: str, label: str, pause_mark: Path
) -> AsyncIterator[RelayedMonitor]:
    """Libvirt's monitor of a domain on this machine, for the block.

    `pause_mark` exists while the guest is paused by it. Raises RefusedError: libvirt-python or the
    libvirtd is missing; HostDownError: it does not answer.
    """
    relay = relay_to(host, uuid, pause_mark)
    await relay.open()
    try:
        monitor = RelayedMonitor(relay, label)
        await relay.subscribe(monitor.receive)
        yield monitor
    finally:
        await relay.close()


async def resume_paused(host: Host, uuid: str, pause_mark: Path) -> None:
    """Resume a domain of this machine that `domain_monitor` has paused. Raises as that."""
    relay = relay_to(host, uuid, pause_mark)
    await relay.open()
    try:
        await relay.resume(None)
    finally:
        await relay.close()


def relay_to(host: Host, uuid: str, pause_mark: Path) -> DomainRelay:
    """A session for one domain, not yet opened. Raises RefusedError, as `domain_monitor`."""
    if host.libvirt is None or not is_installed():
        missing = "its inventory entry names no libvirtd"
        raise RefusedError(
            f"the monitor of a domain on {host.name} cannot be used",
            why=missing if host.libvirt is None else "vmckpt has no libvirt-python there",
            remedy=f"vmckpt host set {host.name} --libvirt /run/libvirt/libvirt-sock"
            if host.libvirt is None
            else f"on {host.name}: {advice_here(Need.LIBVIRT_SOURCES)} && "
            "python3 -m pip install libvirt-python, where vmckpt is installed",
        )
    mode = "session" if host.libvirt.is_relative_to("/run/user") else "system"
    return DomainRelay(f"qemu+unix:///{mode}?socket={host.libvirt}", host, uuid, pause_mark)
