"""A host that answers over a session. Each call is sent unchanged; see `Host`."""

import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar, cast

from vmckpt.events.trace import trace_process
from vmckpt.hosts.grants import Grant
from vmckpt.hosts.host import (
    COMMAND_TIMEOUT_S,
    Allocation,
    Completed,
    Executable,
    Fingerprint,
    FreeMemory,
    Host,
    HostEntry,
    Promise,
    Queues,
)
from vmckpt.hosts.lock import Owner
from vmckpt.hosts.processes.process import ProcessId
from vmckpt.hosts.remote.session import Session
from vmckpt.hosts.remote.values import bind, unpack_answer
from vmckpt.hosts.uids import Uids

P = ParamSpec("P")
T = TypeVar("T")

# These must not be executed twice.
_ONCE = frozenset({"run", "spawn"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteHost(HostEntry):
    """A host reached through `vmckpt serve` there."""

    session: Session = field(repr=False, compare=False)

    @property
    def is_this_machine(self) -> bool:
        """Data sent to it leaves this machine."""
        return False

    async def require_up(self) -> None:
        """Raises HostDownError unless commands can be run on the host."""
        await self._ask(Host.require_up)

    async def run(self, argv: Sequence[str], timeout_s: float = COMMAND_TIMEOUT_S) -> Completed:
        """Run a command to its end. Raises OutcomeUnknownError too."""
        trace_process(self.name, argv)
        return await self._ask(Host.run, argv, timeout_s)

    async def spawn(self, argv: Sequence[str], stderr_path: Path) -> ProcessId:
        """Start a process that outlives this one. Raises OutcomeUnknownError too."""
        trace_process(self.name, argv)
        return await self._ask(Host.spawn, argv, stderr_path)

    async def is_alive(self, which: ProcessId) -> bool:
        """Whether exactly this process still runs on the host."""
        return await self._ask(Host.is_alive, which)

    async def interrupt(self, which: ProcessId) -> bool:
        """SIGTERM to exactly this process; False when it has ended."""
        return await self._ask(Host.interrupt, which)

    async def kill(self, which: ProcessId, *, wait_s: float = 5.0) -> bool:
        """SIGKILL exactly this process and wait for its end; True when it is gone."""
        return await self._ask(Host.kill, which, wait_s=wait_s)

    async def stop_for_good(self, which: ProcessId) -> bool:
        """SIGKILL exactly this process; True once none of it runs, even if memory is not freed
        yet.
        """
        return await self._ask(Host.stop_for_good, which)

    async def find_processes(self, argument: str, *, of_anyone: bool = False) -> list[ProcessId]:
        """Processes whose command line contains `argument`: vmckpt's user's and root's, or
        anyone's.
        """
        return await self._ask(Host.find_processes, argument, of_anyone=of_anyone)

    async def find_processes_of(self, uid: int) -> list[ProcessId]:
        """Processes on the host that run as this user."""
        return await self._ask(Host.find_processes_of, uid)

    async def connect(self, path: Path, *, of_anyone: bool = True) -> socket.socket:
        """A connected stream to a Unix socket on the host."""
        return await self.session.connect(path, of_anyone=of_anyone)

    @asynccontextmanager
    async def lock(self, path: Path, owner: Owner) -> AsyncIterator[None]:
        """Hold an exclusive lock for a block; the host frees it when the connection ends."""
        async with self.session.lock(path, owner):
            yield

    async def lock_owner(self, path: Path) -> Owner | None:
        """The holder of the lock, None if it is free."""
        return await self._ask(Host.lock_owner, path)

    async def exists(self, path: Path) -> bool:
        """Whether `path` exists."""
        return await self._ask(Host.exists, path)

    async def await_path(self, path: Path, within_s: float) -> bool:
        """Wait up to `within_s` until `path` exists; returns whether it does."""
        return await self._ask(Host.await_path, path, within_s)

    async def resolve(self, path: Path) -> Path:
        """The real path, links followed; a missing path is returned unchanged."""
        return await self._ask(Host.resolve, path)

    async def is_block_device(self, path: Path) -> bool:
        """Whether `path` is a block device, links followed."""
        return await self._ask(Host.is_block_device, path)

    async def readable(self, path: Path) -> bool:
        """Whether this user may read `path`."""
        return await self._ask(Host.readable, path)

    async def usable(self, path: Path) -> bool:
        """Whether this user may read and write `path`."""
        return await self._ask(Host.usable, path)

    async def may_write_below(self, directory: Path) -> bool:
        """Whether this user may create files in a directory, which may not exist yet."""
        return await self._ask(Host.may_write_below, directory)

    async def find_executable(self, name: str) -> Executable | None:
        """The file that a shell would run for this command name; None: none."""
        return await self._ask(Host.find_executable, name)

    async def fingerprint(self, path: Path) -> Fingerprint | None:
        """A file's size and content, for comparison; None if it cannot be read."""
        return await self._ask(Host.fingerprint, path)

    async def allocation(self, path: Path) -> Allocation | None:
        """A file's length and allocation; None if it is missing."""
        return await self._ask(Host.allocation, path)

    async def read_text(self, path: Path) -> str | None:
        """A whole file; None if it is missing. Invalid UTF-8 becomes U+FFFD."""
        return await self._ask(Host.read_text, path)

    async def read_from(self, path: Path, offset_bytes: int) -> bytes:
        """A file's content from an offset on, at most 1 MiB; empty if the file is missing."""
        return await self._ask(Host.read_from, path, offset_bytes)

    async def write_text(self, path: Path, text: str) -> None:
        """Replace a file (mode 0600) atomically and durably. Raises StorageError."""
        await self._ask(Host.write_text, path, text)

    async def make_dir(self, path: Path) -> None:
        """Create a directory for its owner only, with its parents. Raises StorageError."""
        await self._ask(Host.make_dir, path)

    async def make_private_dir(self, path: Path) -> None:
        """Create a directory of this user's in one that others may write to. Raises
        StorageError.
        """
        await self._ask(Host.make_private_dir, path)

    async def grant(self, grants: Sequence[Grant], uids: Uids) -> list[int]:
        """Grant files to one of these users. Raises RefusedError, StorageError."""
        return await self._ask(Host.grant, grants, uids)

    async def bind_taps(self, which: ProcessId) -> None:
        """Have the process's taps removed when it ends."""
        await self._ask(Host.bind_taps, which)

    async def list_dir(self, path: Path) -> list[str]:
        """Sorted names in a directory; empty if it is missing."""
        return await self._ask(Host.list_dir, path)

    async def remove(self, path: Path) -> None:
        """Remove a file or a whole directory; it may be missing. Raises StorageError."""
        await self._ask(Host.remove, path)

    async def free_bytes(self, directory: Path) -> int:
        """Bytes this user can still write below `directory`."""
        return await self._ask(Host.free_bytes, directory)

    async def available_memory_bytes(self) -> int:
        """The kernel's estimate of memory that new processes can take without swapping."""
        return await self._ask(Host.available_memory_bytes)

    async def memory_room(self, directory: Path) -> FreeMemory:
        """Memory for files below `directory` that is neither used nor reserved, in bytes."""
        return await self._ask(Host.memory_room, directory)

    async def promise_memory(self, promise: Promise, *, overcommit: bool) -> FreeMemory:
        """Reserve free memory, or with `overcommit` any."""
        return await self._ask(Host.promise_memory, promise, overcommit=overcommit)

    async def unix_time_s(self) -> float:
        """The host's clock."""
        return await self._ask(Host.unix_time_s)

    async def listening_ports(self, address: str) -> frozenset[int]:
        """TCP ports in use at `address`."""
        return await self._ask(Host.listening_ports, address)

    async def socket_queues(self, which: ProcessId, port: int) -> Queues:
        """The queues of the process's TCP connections with local or remote `port`."""
        return await self._ask(Host.socket_queues, which, port)

    async def user_id(self) -> int:
        """The user that commands run as; 0 is root."""
        return await self._ask(Host.user_id)

    async def cpu_flags(self) -> frozenset[str]:
        """Flags of the host's first processor."""
        return await self._ask(Host.cpu_flags)

    async def page_tracking(self) -> str:
        """How the host detects pages that a process has written: a `kernel.PageTracking`."""
        return await self._ask(Host.page_tracking)

    async def own_command(self) -> list[str]:
        """The command line that runs vmckpt on the host."""
        return await self._ask(Host.own_command)

    async def close(self) -> None:
        """Close the connection; the next call opens another."""
        await self.session.close()

    async def _ask(
        self,
        question: Callable[Concatenate[Host, P], Awaitable[T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        name = question.__name__
        arguments = bind(question, *args, **kwargs)
        answer = await self.session.ask(name, arguments, again=name not in _ONCE)
        return cast("T", unpack_answer(question, answer))
