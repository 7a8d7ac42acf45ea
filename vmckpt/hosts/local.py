"""This machine as a host, or a part of it (a network namespace)."""

import asyncio
import os
import socket
import stat
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from io import BufferedReader
from pathlib import Path

from vmckpt.deadlines import poll
from vmckpt.errors import HostDownError, RefusedError, StorageError
from vmckpt.events.trace import trace_process
from vmckpt.hosts.grants import Grant, grant
from vmckpt.hosts.host import (
    COMMAND_TIMEOUT_S,
    MOST_READ_BYTES,
    MOST_TEXT_BYTES,
    Allocation,
    Completed,
    Executable,
    Fingerprint,
    FreeMemory,
    HostEntry,
    Promise,
    Queues,
)
from vmckpt.hosts.lock import Owner, held, read_owner
from vmckpt.hosts.ownership import trusted_users
from vmckpt.hosts.processes import kernel, memory, process, promises
from vmckpt.hosts.processes.child import TooMuchSaidError, end_of
from vmckpt.hosts.processes.other_user import leave_session
from vmckpt.hosts.processes.process import ProcessId, own_command
from vmckpt.hosts.sockets.tcp_table import listening_ports
from vmckpt.hosts.sockets.unix_socket import connected, listens_as
from vmckpt.hosts.uids import Uids
from vmckpt.sequence.in_thread import NoThreadError, in_thread
from vmckpt.state.durable import (
    make_dir_durably,
    remove_durably,
    replace,
    storage_errors,
    sync_directory,
)

PATH_POLL_S = 0.005
REMOVE_TRIES = 4
# The unit of block counts in stat(2), whatever the file system's block size.
_BLOCK_BYTES = 512
_PIECE_BYTES = 64 << 10
# The right of a VM's own group on a private directory: to traverse it; see hosts.grants.
PASSED_THROUGH = 0o010


@dataclass(frozen=True, slots=True)
class LocalHost(HostEntry):
    """This machine, or a part of it that commands enter by a prefix (a namespace).

    `enter` is prepended to every command's argv.
    """

    enter: tuple[str, ...] = ()

    @property
    def is_this_machine(self) -> bool:
        """Data sent to it never leaves this machine."""
        return True

    async def run(self, argv: Sequence[str], timeout_s: float = COMMAND_TIMEOUT_S) -> Completed:
        """Run a command to its end.

        Raises HostDownError if it cannot be started, exceeds `timeout_s`, or prints too much.
        """
        trace_process(self.name, argv)
        try:
            leave_session(argv)
            child = await asyncio.create_subprocess_exec(
                *self.enter,
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as exc:
            raise self._cannot_run(argv[0], str(exc)) from exc
        try:
            stdout, stderr = await end_of(child, timeout_s)
        except TimeoutError as exc:
            raise self._cannot_run(argv[0], f"no end within {timeout_s:g} s") from exc
        except TooMuchSaidError as exc:
            raise self._cannot_run(argv[0], str(exc)) from exc
        return Completed(
            child.returncode or 0, stdout.decode(errors="replace"), stderr.decode(errors="replace")
        )

    async def require_up(self) -> None:
        """Raises HostDownError unless commands can be run on the host."""
        if not self.enter:
            return
        done = await self.run(["true"])
        if done.returncode:
            raise HostDownError(
                f"host {self.name} is down",
                why=done.stderr.strip() or f"its prefix exited with {done.returncode}",
                remedy="if it is a lab host: `vmckpt lab down`, then `vmckpt lab up`",
            )

    async def spawn(self, argv: Sequence[str], stderr_path: Path) -> ProcessId:
        """Start a process that outlives this one, in its own session.

        Its output is appended to `stderr_path`. The prefix `enter` must exec, so that the pid is
        the command's own.
        """
        trace_process(self.name, argv)
        try:
            leave_session(argv)
            return process.spawn([*self.enter, *argv], stderr_path)
        except OSError as exc:
            raise self._cannot_run(argv[0], exc.strerror or str(exc)) from exc

    async def is_alive(self, which: ProcessId) -> bool:
        """Whether exactly this process still runs on the host."""
        return process.is_alive(which)

    async def interrupt(self, which: ProcessId) -> bool:
        """SIGTERM to exactly this process; False when it has ended."""
        return process.interrupt(which)

    async def kill(self, which: ProcessId, *, wait_s: float = 5.0) -> bool:
        """SIGKILL exactly this process and wait for its end; True when it is gone."""
        return await _signalling(which, partial(process.kill, which, wait_s=wait_s))

    async def stop_for_good(self, which: ProcessId) -> bool:
        """SIGKILL exactly this process; True once none of it runs, even if memory is not freed
        yet.
        """
        return await _signalling(which, partial(process.stop_for_good, which))

    async def find_processes(self, argument: str, *, of_anyone: bool = False) -> list[ProcessId]:
        """Processes whose command line contains `argument`: vmckpt's user's and root's, or
        anyone's.
        """
        return process.find_by_argument(argument, None if of_anyone else trusted_users())

    async def find_processes_of(self, uid: int) -> list[ProcessId]:
        """Processes on the host that run as this user."""
        return process.find_by_user(uid)

    async def connect(self, path: Path, *, of_anyone: bool = True) -> socket.socket:
        """A connected stream to a Unix socket on the host. Raises HostDownError, RefusedError."""
        try:
            sock = connected(path)
            if of_anyone or (user := listens_as(sock)) in trusted_users():
                return sock
            sock.close()
        except OSError as exc:
            remedy = "check that the process that owns the socket runs"
            if isinstance(exc, PermissionError):
                remedy = "let this user use the socket: add it to the group that owns it"
            raise HostDownError(
                f"cannot connect to {path} on {self.name}",
                why=exc.strerror or str(exc),
                remedy=remedy,
            ) from exc
        raise RefusedError(
            f"another user (uid {user}) listens at {path} on {self.name}",
            why="its answers would be trusted as if they came from this user",
            remedy="name a socket of this user, or, if you trust that user: --trust",
        )

    @asynccontextmanager
    async def lock(self, path: Path, owner: Owner) -> AsyncIterator[None]:
        """Hold an exclusive lock for a block; see hosts.lock. Raises BusyError, StorageError."""
        await self.make_dir(path.parent)
        with ExitStack() as stack:
            try:
                stack.enter_context(held(path, owner))
            except OSError as exc:
                raise self._cannot_write(path, exc) from exc
            yield

    async def lock_owner(self, path: Path) -> Owner | None:
        """The holder of the lock, None if it is free."""
        with self._readable(path):
            return read_owner(path)

    async def exists(self, path: Path) -> bool:
        """Whether `path` exists."""
        with self._readable(path):
            return path.exists()

    async def await_path(self, path: Path, within_s: float) -> bool:
        """Wait up to `within_s` until `path` exists; returns whether it does."""
        with self._readable(path):
            return await poll(path.exists, every_s=PATH_POLL_S, within_s=within_s)

    async def resolve(self, path: Path) -> Path:
        """The real path, links followed; a missing path is returned unchanged."""
        with self._readable(path):
            return path.resolve()

    async def is_block_device(self, path: Path) -> bool:
        """Whether `path` is a block device, links followed."""
        with self._readable(path):
            return path.is_block_device()

    async def readable(self, path: Path) -> bool:
        """Whether this user may read `path` on the host."""
        return os.access(path, os.R_OK)

    async def usable(self, path: Path) -> bool:
        """Whether this user may read and write `path`."""
        return os.access(path, os.R_OK | os.W_OK)

    async def find_executable(self, name: str) -> Executable | None:
        """The file that a shell would run for this command name; None: none."""
        directories = [""] if "/" in name else os.environ.get("PATH", os.defpath).split(":")
        for directory in directories:
            path = Path(directory) / name
            if os.access(path, os.X_OK) and path.is_file():
                found = path.stat()
                return Executable(path, found.st_mtime_ns, found.st_size)
        return None

    async def may_write_below(self, directory: Path) -> bool:
        """Whether this user may create files in a directory, which may not exist yet."""
        while not directory.exists():
            directory = directory.parent
        return directory.is_dir() and os.access(directory, os.W_OK | os.X_OK)

    async def fingerprint(self, path: Path) -> Fingerprint | None:
        """A file's size and content, for comparison; None if it cannot be read."""
        return await asyncio.to_thread(_fingerprint, path)

    async def allocation(self, path: Path) -> Allocation | None:
        """A file's length and allocation; None if it is missing."""
        with self._readable(path):
            try:
                found = path.stat()
            except (FileNotFoundError, NotADirectoryError):
                return None
        return Allocation(found.st_size, found.st_blocks * _BLOCK_BYTES)

    async def read_text(self, path: Path) -> str | None:
        """A whole file; None if it is missing. Invalid UTF-8 becomes U+FFFD."""
        with self._readable(path):
            try:
                return _text(path)
            except (FileNotFoundError, NotADirectoryError, ProcessLookupError):
                return None

    async def read_from(self, path: Path, offset_bytes: int) -> bytes:
        """A file's content from an offset on, at most 1 MiB; empty if the file is missing."""
        with self._readable(path):
            try:
                with path.open("rb") as file:
                    file.seek(offset_bytes)
                    return file.read(MOST_READ_BYTES)
            except (FileNotFoundError, NotADirectoryError):
                return b""

    async def write_text(self, path: Path, text: str) -> None:
        """Replace a file (mode 0600) atomically and durably. Raises StorageError."""
        try:
            replace(path, text)
        except OSError as exc:
            raise self._cannot_write(path, exc) from exc

    async def make_dir(self, path: Path) -> None:
        """Create a directory for its owner only, with its parents. Raises StorageError."""
        try:
            make_dir_durably(path)
        except OSError as exc:
            raise self._cannot_write(path, exc) from exc

    async def make_private_dir(self, path: Path) -> None:
        """Create a directory of this user's in one that others may write to. Raises
        StorageError.
        """
        try:
            with suppress(FileExistsError):
                path.mkdir(mode=0o700)
            found = path.lstat()
        except OSError as exc:
            raise self._cannot_write(path, exc) from exc
        is_open = stat.S_IMODE(found.st_mode) & ~(0o700 | PASSED_THROUGH)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or is_open:
            raise StorageError(
                f"{path} on {self.name} is not private",
                why=f"another user (uid {found.st_uid}) made it, or others may enter it",
                remedy="find out who put it there, remove it, and try again",
            )

    async def grant(self, grants: Sequence[Grant], uids: Uids) -> list[int]:
        """Grant files to one of these users. Raises RefusedError, StorageError."""
        try:
            return grant(grants, uids)
        except OSError as exc:
            raise StorageError(
                f"cannot make a VM's own user the owner of {exc.filename or 'a file'} on "
                f"{self.name}",
                why=exc.strerror or str(exc),
                remedy="run vmckpt as root there, on a file system that keeps owners; or: "
                f"vmckpt host set {self.name} --vm-uids none",
            ) from exc

    async def bind_taps(self, which: ProcessId) -> None:
        """Have the process's taps removed when it ends. Raises HostDownError."""
        from vmckpt.hosts.sockets.taps import bind_to

        try:
            bind_to(which.pid)
        except OSError as exc:
            raise self._cannot_run("QEMU", f"its taps: {exc.strerror or exc}") from exc

    async def list_dir(self, path: Path) -> list[str]:
        """Sorted names in a directory; empty if it is missing."""
        with self._readable(path):
            try:
                return sorted(entry.name for entry in path.iterdir())
            except FileNotFoundError:
                return []

    async def remove(self, path: Path) -> None:
        """Remove a file or a whole directory; it may be missing. Raises StorageError."""
        try:
            if path.is_dir() and not path.is_symlink():
                import shutil

                with suppress(RecursionError):
                    shutil.rmtree(path, ignore_errors=True)
                # Deeper than Python's recursion limit (rm(1) has none), or still being written to.
                tries, output = REMOVE_TRIES, ""
                while path.exists():
                    if not (tries := tries - 1):
                        raise OSError(output or "new files keep appearing in it")
                    output = (await self.run(["rm", "-rf", "--", str(path)])).stderr.strip()
                with suppress(FileNotFoundError):  # its parent was removed too
                    sync_directory(path.parent)
            else:
                remove_durably(path)
        except OSError as exc:
            raise StorageError(
                f"cannot remove {path} on {self.name}",
                why=exc.strerror or str(exc),
                remedy="fix the permissions of the directory, and remove it",
            ) from exc

    async def free_bytes(self, directory: Path) -> int:
        """Bytes this user can still write below `directory`."""
        with self._readable(directory):
            found = os.statvfs(directory)
        return found.f_bavail * found.f_frsize

    async def available_memory_bytes(self) -> int:
        """The kernel's estimate of memory that new processes can take without swapping."""
        with self._readable(Path("/proc/meminfo")):
            return memory.available_bytes(self.name)

    async def memory_room(self, directory: Path) -> FreeMemory:
        """Memory for files below `directory` that is neither used nor reserved, in bytes."""
        with self._readable(promises.RECORDS_DIR):
            return promises.room(directory, memory.available_bytes(self.name))

    async def promise_memory(self, promise: Promise, *, overcommit: bool) -> FreeMemory:
        """Reserve free memory, or with `overcommit` any."""
        available = partial(memory.available_bytes, self.name)
        give = partial(promises.promise, promise, available, overcommit=overcommit)
        with self._readable(promises.RECORDS_DIR):
            return await asyncio.to_thread(give)

    async def unix_time_s(self) -> float:
        """The host's clock."""
        return time.time()

    async def listening_ports(self, address: str) -> frozenset[int]:
        """TCP ports in use at `address`. Raises HostDownError."""
        tables = "/proc/net/tcp", "/proc/net/tcp6"
        if self.enter:
            present = (await self.run(["cat", *tables])).stdout
        else:
            present = "".join([await self.read_text(Path(table)) or "" for table in tables])
        return listening_ports(present, address)

    async def socket_queues(self, which: ProcessId, port: int) -> Queues:
        """The queues of the process's TCP connections with local or remote `port`."""
        from vmckpt.hosts.sockets.socket_queues import queues

        return queues(which.pid, port) if process.is_alive(which) else Queues(0, 0)

    async def user_id(self) -> int:
        """The user that commands run as; 0 is root."""
        return os.geteuid()

    async def cpu_flags(self) -> frozenset[str]:
        """Flags of the host's first processor."""
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return frozenset(line.partition(":")[2].split())
        return frozenset()

    async def page_tracking(self) -> str:
        """How the host detects pages that a process has written: a `kernel.PageTracking`."""
        return kernel.page_tracking()

    async def own_command(self) -> list[str]:
        """The command line that runs vmckpt on the host."""
        return own_command()

    def _readable(self, path: Path) -> AbstractContextManager[None]:
        """For a block that reads there: a failed read counts as this host's error, like any
        host's.
        """
        return storage_errors(f"read {path} on {self.name}")

    def _cannot_write(self, path: Path, exc: OSError) -> StorageError:
        return StorageError(
            f"cannot write {path} on {self.name}",
            why=exc.strerror or str(exc),
            remedy="free space there, or fix the permissions of the directory",
        )

    def _cannot_run(self, what: str, why: str) -> HostDownError:
        return HostDownError(
            f"cannot run {what} on {self.name}",
            why=why,
            remedy=f"run `vmckpt host check {self.name}`; if it is a lab host, `vmckpt lab status`",
        )


async def _signalling(which: ProcessId, work: Callable[[], bool]) -> bool:
    """The result of signalling a process. Raises OutcomeUnknownError, also if no thread starts for
    it: then nothing was sent.
    """
    try:
        return await in_thread(work)
    except NoThreadError as exc:
        raise process.unknown(which.pid, exc) from exc


def _text(path: Path) -> str:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        is_long = size > MOST_TEXT_BYTES
        data = _read(file, MOST_TEXT_BYTES // 2 if is_long else MOST_TEXT_BYTES)
        if is_long:
            file.seek(size - MOST_TEXT_BYTES // 2)
            data += _read(file, MOST_TEXT_BYTES // 2)
    return data.decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n")


def _read(file: BufferedReader, most_bytes: int) -> bytes:
    """Like `read`, which would allocate `most_bytes` first; a file may grow meanwhile."""
    parts, left = [], most_bytes
    while left and (part := file.read(min(left, _PIECE_BYTES))):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _fingerprint(path: Path) -> Fingerprint | None:
    import hashlib  # costs 1 ms

    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return Fingerprint(file.tell(), digest)
    except OSError:
        return None
