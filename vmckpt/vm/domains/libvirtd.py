"""A session with one host's libvirtd. The one module that imports libvirt.

libvirt's calls block: each runs in a thread of its own, which ends with the process however long
the call takes.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

from vmckpt.errors import (
    HostDownError,
    NotFoundError,
    OutcomeUnknownError,
    RefusedError,
    VmckptError,
)
from vmckpt.hosts.host import Host
from vmckpt.sequence.in_thread import in_thread
from vmckpt.units import MIB
from vmckpt.vm.domains.faults import LibvirtRefusedError, remedy_for
from vmckpt.vm.domains.flags import (
    DirtyRateStatus,
    ErrorCode,
    EventId,
    State,
    Stats,
    Undefine,
    Xml,
)
from vmckpt.vm.domains.forward import forwarded
from vmckpt.vm.domains.job import Job, parse_job
from vmckpt.vm.domains.told import Condition, DiskSize, DomainSnapshot, Event, Seen

T = TypeVar("T")

OPEN_TIMEOUT_S = 10.0
ASK_TIMEOUT_S, CLOSE_TIMEOUT_S = 10.0, 1.0
# A libvirtd that is silent for 15 s is given up.
KEEPALIVE_EVERY_S, KEEPALIVE_MISSED = 5, 3
_LOST = frozenset(
    {ErrorCode.INTERNAL_ERROR, ErrorCode.RPC, ErrorCode.INVALID_CONN, ErrorCode.SYSTEM_ERROR}
)
_RIGHTS = frozenset({ErrorCode.AUTH_FAILED, ErrorCode.AUTH_CANCELLED, ErrorCode.AUTH_UNAVAILABLE})


@asynccontextmanager
async def libvirtd(host: Host) -> AsyncIterator["Libvirtd"]:
    """A session with the host's libvirtd for the block.

    Raises RefusedError: the inventory names none, or libvirt-python is missing; HostDownError: it
    does not answer, or this user may not use it.
    """
    if host.libvirt is None:
        raise RefusedError(
            f"{host.name} has no libvirtd",
            why="its inventory entry names no socket of one",
            remedy="name it: vmckpt host add --libvirt /run/libvirt/libvirt-sock",
        )
    if find_spec("libvirt") is None:
        raise RefusedError(
            f"libvirtd on {host.name} cannot be asked",
            why="this vmckpt has no libvirt-python",
            remedy="install it: apt-get install gcc libvirt-dev pkg-config python3-dev; "
            "pip install libvirt-python",
        )
    async with forwarded(host, host.libvirt) as near:
        mode = "session" if host.libvirt.is_relative_to("/run/user") else "system"
        session = Libvirtd(f"qemu+unix:///{mode}?socket={near}", host)
        await session.open()
        try:
            yield session
        finally:
            await session.close()


def load_ahead() -> None:
    """Have libvirt's client loaded while something else is waited for."""
    if find_spec("libvirt") is not None:
        threading.Thread(target=import_module, args=("libvirt",), daemon=True).start()


def _open(uri: str) -> Any:
    import libvirt

    connection = libvirt.open(uri)
    try:
        connection.setKeepAlive(KEEPALIVE_EVERY_S, KEEPALIVE_MISSED)
    except libvirt.libvirtError as exc:
        if exc.get_error_code() != ErrorCode.NO_SUPPORT:  # not every driver of libvirt's has it
            raise
    return connection


@cache
def _event_loop() -> threading.Thread:
    """The thread of libvirt's events and keep-alives, for as long as this process lives."""
    import libvirt

    libvirt.registerErrorHandler(lambda *_: None, None)  # else it prints what is raised here
    libvirt.virEventRegisterDefaultImpl()

    def turn() -> None:
        while True:
            libvirt.virEventRunDefaultImpl()

    thread = threading.Thread(target=turn, name="libvirt-events", daemon=True)
    thread.start()
    return thread


class Libvirtd:
    """One session.

    What only asks raises HostDownError when no answer comes; what changes something raises
    OutcomeUnknownError then. LibvirtRefusedError: libvirt says no; NotFoundError: no such domain.
    """

    def __init__(self, uri: str, host: Host) -> None:
        self._uri, self.host = uri, host
        self._connection: Any = None
        # libvirt's client before 10.0 may sleep through the answer to one of two calls at a time
        # until the next keep-alive, and dies of two whose connection is lost. Held until a call
        # has ended, whoever still waits for it.
        self._one_call = asyncio.Lock()

    async def open(self) -> None:
        """Connect. Raises HostDownError."""
        self._connection = await self._connect()

    async def _connect(self) -> Any:
        import libvirt

        _event_loop()
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                return await in_thread(lambda: _open(self._uri))
        except (libvirt.libvirtError, TimeoutError) as exc:
            code = exc.get_error_code() if isinstance(exc, libvirt.libvirtError) else None
            raise HostDownError(
                f"the libvirtd of {self.host.name} does not answer",
                why=str(exc) or f"no answer within {OPEN_TIMEOUT_S:g} s",
                remedy="let this user use it: usermod -a -G libvirt USER"
                if code in _RIGHTS
                else "start it there: systemctl restart libvirtd",
            ) from exc

    async def close(self) -> None:
        """End the session; nothing that libvirtd does ends with it."""
        # The forwarder's end cuts whatever a silent libvirtd leaves unanswered; its connection is
        # closed only by whoever drops it last then.
        with suppress(VmckptError):
            await self._ask("hang up", self._connection.close, CLOSE_TIMEOUT_S)

    # -- calling -----------------------------------------------------------------------------

    async def _ask(
        self, what: str, work: Callable[[], T], timeout_s: float | None = ASK_TIMEOUT_S
    ) -> T:
        import libvirt

        try:
            async with asyncio.timeout(timeout_s):
                await self._one_call.acquire()
                call = asyncio.ensure_future(in_thread(work))
                call.add_done_callback(self._call_ended)
                return await asyncio.shield(call)
        except libvirt.libvirtError as exc:
            raise self._meaning(what, exc) from exc
        except TimeoutError as exc:
            raise self._silent(what, f"no answer within {timeout_s:g} s") from exc

    def _call_ended(self, call: "asyncio.Future[Any]") -> None:
        self._one_call.release()
        if not call.cancelled():
            call.exception()  # nobody may be waiting any more

    async def _tell(self, what: str, work: Callable[[], T], timeout_s: float | None = None) -> T:
        try:
            return await self._ask(what, work, timeout_s)
        except HostDownError as exc:
            raise OutcomeUnknownError(
                exc.what,
                why=f"{exc.why}; nobody knows whether it was done",
                remedy="ask again what the domain does: vmckpt vm list",
            ) from exc

    def _meaning(self, what: str, exc: Any) -> VmckptError:
        code, text = exc.get_error_code(), exc.get_error_message() or str(exc)
        if code in _LOST and not self._connection.isAlive():
            return self._silent(what, text)
        if code == ErrorCode.NO_DOMAIN:
            return NotFoundError(
                f"{self.host.name} has no such domain", why=text, remedy="see `vmckpt vm list`"
            )
        return LibvirtRefusedError(
            f"libvirt on {self.host.name} did not {what}",
            why=text,
            remedy=remedy_for(text),
            code=code,
        )

    def _silent(self, what: str, why: str) -> HostDownError:
        return HostDownError(
            f"the libvirtd of {self.host.name} gave no answer when asked to {what}",
            why=why,
            remedy="see on the host: systemctl status libvirtd",
        )

    def _domain(self, uuid: str) -> Any:
        return self._connection.lookupByUUIDString(uuid)

    # -- what there is -----------------------------------------------------------------------

    async def domains(self) -> list[Seen]:
        """Every domain, running or defined."""

        def work() -> list[Seen]:
            found = []
            for domain in self._connection.listAllDomains(0):
                with _gone_meanwhile():
                    found.append(_seen(domain))
            return found

        return await self._ask("list its domains", work)

    async def find(self, uuid: str) -> Seen | None:
        """The domain, None when there is none of that UUID."""
        try:
            return await self._ask("look for a domain", lambda: _seen(self._domain(uuid)))
        except NotFoundError:
            return None

    async def condition(self, uuid: str) -> Condition | None:
        """What the domain does, None when there is none; told of a domain that is locked, too.

        Its XML, and so `find`, waits for the lock.
        """

        def work() -> Condition:
            state, reason = self._domain(uuid).state()
            return Condition(State(state), reason)

        try:
            return await self._ask("tell what a domain does", work)
        except NotFoundError:
            return None

    async def capabilities(self) -> str:
        """The host's capabilities, XML."""
        return await self._ask("tell what it can", lambda: str(self._connection.getCapabilities()))

    async def domain_capabilities(self, emulator: str, arch: str, machine: str, accel: str) -> str:
        """What domains of that kind can have there, XML; LibvirtRefusedError when none can be."""
        return await self._ask(
            f"offer {machine}",
            lambda: str(
                self._connection.getDomainCapabilities(emulator or None, arch, machine, accel)
            ),
        )

    async def qemu_version(self) -> tuple[int, int, int]:
        """Of the host's QEMU."""
        number = await self._ask("tell its QEMU's version", self._connection.getVersion)
        return number // 10**6, number // 1000 % 1000, number % 1000

    async def has_network(self, name: str) -> bool:
        """Whether a virtual network of that name is active."""

        def work() -> bool:
            return bool(self._connection.networkLookupByName(name).isActive())

        try:
            return await self._ask("look for a network", work)
        except LibvirtRefusedError:
            return False  # none of that name, or a libvirtd without networks

    async def disk_size(self, uuid: str, target: str) -> DiskSize:
        """The size of one disk's image."""

        def work() -> DiskSize:
            virtual, allocated, _ = self._domain(uuid).blockInfo(target)
            return DiskSize(virtual, allocated)

        return await self._ask(f"measure disk {target}", work)

    # -- a domain's life ---------------------------------------------------------------------

    async def start(self, uuid: str) -> None:
        """Start a defined domain."""
        await self._tell("start the domain", lambda: self._domain(uuid).create())

    async def press_power_button(self, uuid: str) -> None:
        """Ask the guest to power off."""
        await self._tell("shut the domain down", lambda: self._domain(uuid).shutdown())

    async def destroy(self, uuid: str) -> None:
        """End it at once, like a power cut."""
        await self._tell("end the domain", lambda: self._domain(uuid).destroy())

    async def definition(self, uuid: str) -> str:
        """What it is when it starts the next time, XML, secrets included."""
        flags = Xml.SECURE | Xml.INACTIVE
        return await self._ask(
            "show the domain's definition", lambda: str(self._domain(uuid).XMLDesc(flags))
        )

    async def define(self, xml: str) -> None:
        """Keep the domain, whether or not it runs."""
        await self._tell("keep the domain", lambda: self._connection.defineXML(xml))

    async def undefine(self, uuid: str) -> None:
        """Forget a stopped domain and its snapshots; its files stay."""
        flags = Undefine.SNAPSHOTS_METADATA | Undefine.KEEP_NVRAM
        await self._tell("forget the domain", lambda: self._domain(uuid).undefineFlags(flags))

    # -- snapshots ---------------------------------------------------------------------------

    async def snapshots(self, uuid: str) -> list[DomainSnapshot]:
        """The domain's snapshots."""
        return await self._ask(
            "list the domain's snapshots",
            lambda: [
                DomainSnapshot(snapshot.getName(), snapshot.getXMLDesc())
                for snapshot in self._domain(uuid).listAllSnapshots(0)
            ],
        )

    async def save_snapshot(self, uuid: str, xml: str) -> DomainSnapshot:
        """Save memory, devices and disks; the guest stands still meanwhile."""

        def work() -> DomainSnapshot:
            made = self._domain(uuid).snapshotCreateXML(xml, 0)
            return DomainSnapshot(made.getName(), made.getXMLDesc())

        return await self._tell("save the snapshot", work)

    async def load_snapshot(self, uuid: str, name: str) -> None:
        """Put the domain back to a snapshot."""

        def work() -> None:
            domain = self._domain(uuid)
            domain.revertToSnapshot(domain.snapshotLookupByName(name))

        await self._tell("load the snapshot", work)

    async def delete_snapshot(self, uuid: str, name: str) -> None:
        """Delete a snapshot."""
        await self._tell(
            "delete the snapshot",
            lambda: self._domain(uuid).snapshotLookupByName(name).delete(0),
        )

    # -- migrating ---------------------------------------------------------------------------

    async def migrate(
        self, uuid: str, to_libvirtd: str, parameters: Mapping[str, Any], flags: int
    ) -> None:
        """Move a running domain, as its own libvirtd's work; returns when it has ended.

        Other calls may be made meanwhile. A cancellation leaves it under way: `abort` it.
        """
        beside = Libvirtd(self._uri, self.host)
        await beside.open()
        try:
            await beside._tell(
                "migrate the domain",
                lambda: beside._domain(uuid).migrateToURI3(to_libvirtd, dict(parameters), flags),
            )
        finally:
            await beside.close()

    async def job(self, uuid: str) -> Job:
        """The job that the domain is in; not active when there is none."""
        return await self._ask(
            "tell how far it is", lambda: parse_job(self._domain(uuid).jobStats())
        )

    async def abort(self, uuid: str) -> None:
        """Give the domain's job up."""
        await self._tell("give the job up", lambda: self._domain(uuid).abortJob(), ASK_TIMEOUT_S)

    async def start_postcopy(self, uuid: str) -> None:
        """Let the guest run on the target at once; its memory follows."""
        await self._tell(
            "switch to post-copy",
            lambda: self._domain(uuid).migrateStartPostCopy(0),
            ASK_TIMEOUT_S,
        )

    async def set_max_downtime(self, uuid: str, downtime_ms: int) -> None:
        """How long the guest may stand still at the end of the migration under way."""
        await self._tell(
            "set the downtime",
            lambda: self._domain(uuid).migrateSetMaxDowntime(downtime_ms, 0),
            ASK_TIMEOUT_S,
        )

    async def set_max_speed(self, uuid: str, mib_per_s: int) -> None:
        """How fast memory may go in the migration under way."""
        await self._tell(
            "set the bandwidth",
            lambda: self._domain(uuid).migrateSetMaxSpeed(mib_per_s, 0),
            ASK_TIMEOUT_S,
        )

    async def begin_dirty_rate(self, uuid: str, seconds: int) -> None:
        """Have QEMU sample for so long (1 to 60 s) which pages change."""
        await self._tell(
            "measure the dirty rate",
            lambda: self._domain(uuid).startDirtyRateCalc(seconds, 0),
            ASK_TIMEOUT_S,
        )

    async def dirty_rate(self, uuid: str) -> float | None:
        """What came of it, bytes a second; None while it is measured."""

        def work() -> Mapping[str, Any]:
            listed = self._connection.domainListGetStats([self._domain(uuid)], Stats.DIRTYRATE)
            return dict(listed[0][1]) if listed else {}

        stats = await self._ask("tell the dirty rate", work)
        if stats.get("dirtyrate.calc_status") != DirtyRateStatus.MEASURED:
            return None
        return float(stats["dirtyrate.megabytes_per_second"]) * MIB

    @asynccontextmanager
    async def events(self, uuid: str) -> AsyncIterator[asyncio.Queue[Event]]:
        """For the block: what libvirt tells of the domain, as it comes."""
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Event] = asyncio.Queue()

        def put(event: Event) -> None:
            with suppress(RuntimeError):  # the program has ended meanwhile
                loop.call_soon_threadsafe(queue.put_nowait, event)

        def told(_connection: Any, _domain: Any, *details: Any) -> None:
            event_id = EventId(details[-1])
            job = parse_job(details[0]) if event_id is EventId.JOB_COMPLETED else None
            put(Event(event_id, job))

        def register() -> list[int]:
            domain = self._domain(uuid)
            return [
                self._connection.domainEventRegisterAny(domain, event_id, told, event_id)
                for event_id in EventId
            ]

        numbers = await self._ask("tell of events", register)
        try:
            yield queue
        finally:
            with suppress(VmckptError):  # they end with the session at the latest
                await self._ask("end events", lambda: self._deregister(numbers), 1.0)

    def _deregister(self, numbers: list[int]) -> None:
        for number in numbers:
            self._connection.domainEventDeregisterAny(number)


def _seen(domain: Any) -> Seen:
    state, reason = domain.state()
    return Seen(
        domain.UUIDString(),
        domain.name(),
        State(state),
        reason,
        bool(domain.isPersistent()),
        domain.XMLDesc(0),
    )


@contextmanager
def _gone_meanwhile() -> Iterator[None]:
    """Drop what is raised because a domain ended while it was looked at."""
    import libvirt

    try:
        yield
    except libvirt.libvirtError as exc:
        if exc.get_error_code() != ErrorCode.NO_DOMAIN:
            raise
