"""A connection to a host's libvirtd. With `monitor.py` the only module that imports libvirt.

libvirt's calls block: each runs in a thread of its own, which ends with the process however long
the call takes.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

from vmckpt.errors import HostDownError, NotFoundError, OutcomeUnknownError, VmckptError
from vmckpt.events.trace import trace_command
from vmckpt.hosts.host import Host
from vmckpt.sequence.in_thread import NoThreadError, in_thread
from vmckpt.vm.domains.faults import LibvirtRefusedError, remedy_for
from vmckpt.vm.domains.flags import ErrorCode

T = TypeVar("T")

OPEN_TIMEOUT_S = 10.0
ASK_TIMEOUT_S, CLOSE_TIMEOUT_S = 10.0, 1.0
# libvirtd starts QEMUs for these answers, of which it may have several.
PROBE_TIMEOUT_S = 60.0
# A connection to a libvirtd that is silent for 15 s is closed.
KEEPALIVE_EVERY_S, KEEPALIVE_MISSED = 5, 3
_LOST = frozenset(
    {ErrorCode.INTERNAL_ERROR, ErrorCode.RPC, ErrorCode.INVALID_CONN, ErrorCode.SYSTEM_ERROR}
)
_RIGHTS = frozenset({ErrorCode.AUTH_FAILED, ErrorCode.AUTH_CANCELLED, ErrorCode.AUTH_UNAVAILABLE})


def is_installed() -> bool:
    """Whether libvirt-python is installed."""
    return find_spec("libvirt") is not None


def client_knows(name: str) -> bool:
    """Whether this version of libvirt's client has a constant of that name."""
    return is_installed() and hasattr(import_module("libvirt"), name)


def load_ahead() -> None:
    """Load libvirt's client while waiting for something else."""
    if is_installed():
        threading.Thread(target=import_module, args=("libvirt",), daemon=True).start()


def _open(uri: str) -> Any:
    import libvirt

    connection = libvirt.open(uri)
    try:
        connection.setKeepAlive(KEEPALIVE_EVERY_S, KEEPALIVE_MISSED)
    except libvirt.libvirtError as exc:
        if exc.get_error_code() != ErrorCode.NO_SUPPORT:  # not every libvirt driver supports it
            raise
    return connection


@cache
def _event_loop() -> threading.Thread:
    """The thread for libvirt's events and keep-alives; it lives as long as this process."""
    import libvirt

    libvirt.registerErrorHandler(lambda *_: None, None)  # else libvirt prints errors too
    libvirt.virEventRegisterDefaultImpl()

    def turn() -> None:
        while True:
            libvirt.virEventRunDefaultImpl()

    thread = threading.Thread(target=turn, name="libvirt-events", daemon=True)
    thread.start()
    return thread


class LibvirtConnection:
    """One libvirt connection, with one call at a time.

    Without an answer, queries raise HostDownError and changes raise OutcomeUnknownError.
    LibvirtRefusedError: libvirt refused; NotFoundError: no such domain.
    """

    def __init__(self, uri: str, host: Host) -> None:
        self._uri, self.host = uri, host
        self._connection: Any = None
        # libvirt's client before 10.0 may miss the answer to one of two concurrent calls until the
        # next keep-alive, and crashes if two lose their connection. Held until a call has ended,
        # even if its caller was cancelled.
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
        except (libvirt.libvirtError, TimeoutError, NoThreadError) as exc:
            code = exc.get_error_code() if isinstance(exc, libvirt.libvirtError) else None
            raise HostDownError(
                f"the libvirtd of {self.host.name} does not answer",
                why=str(exc) or f"no answer within {OPEN_TIMEOUT_S:g} s",
                remedy="let this user use it: usermod -a -G libvirt USER"
                if code in _RIGHTS
                else "start it there: systemctl restart libvirtd",
            ) from exc

    async def close(self) -> None:
        """Close the session; operations of libvirtd continue."""
        # Ending the forwarder cuts off calls that a silent libvirtd has not answered; the
        # connection itself is closed only with its last reference.
        with suppress(VmckptError):
            await self._ask("hang up", self._connection.close, CLOSE_TIMEOUT_S)

    @property
    def is_sound(self) -> bool:
        """Whether it is usable: connected, with no unanswered call."""
        import libvirt

        with suppress(libvirt.libvirtError):
            return not self._one_call.locked() and bool(self._connection.isAlive())
        return False

    async def _ask(
        self, what: str, work: Callable[[], T], timeout_s: float | None = ASK_TIMEOUT_S
    ) -> T:
        import libvirt

        trace_command(f"libvirt on {self.host.name}", what)
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
        except NoThreadError as exc:
            raise self._silent(what, f"{exc.strerror}: it was not asked") from exc

    def _call_ended(self, call: "asyncio.Future[Any]") -> None:
        self._one_call.release()
        if not call.cancelled():
            call.exception()  # its caller may be cancelled

    async def _tell(self, what: str, work: Callable[[], T], timeout_s: float | None = None) -> T:
        try:
            return await self._ask(what, work, timeout_s)
        except HostDownError as exc:
            raise OutcomeUnknownError(
                exc.what,
                why=f"{exc.why}; it is unknown whether it was done",
                remedy="see what the domain does: vmckpt vm list",
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
            f"the libvirtd of {self.host.name} did not answer when asked to {what}",
            why=why,
            remedy="see on the host: systemctl status libvirtd",
        )


@contextmanager
def gone_meanwhile() -> Iterator[None]:
    """Ignore errors caused by a domain that ended while it was examined."""
    import libvirt

    try:
        yield
    except libvirt.libvirtError as exc:
        if exc.get_error_code() != ErrorCode.NO_DOMAIN:
            raise
