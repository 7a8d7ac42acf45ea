"""The interface of a machine that runs VMs: its inventory entry, and operations on it."""

import socket
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from vmckpt.hosts.grants import Grant
from vmckpt.hosts.lock import Owner
from vmckpt.hosts.processes.process import ProcessId
from vmckpt.hosts.uids import Uids, make_uids

COMMAND_TIMEOUT_S = 30.0
# The most that `read_from` reads at once.
MOST_READ_BYTES = 1 << 20
# A compromised QEMU can make its log as large as it likes.
MOST_TEXT_BYTES = 8 << 20
# Per output stream of a command, which may be under a guest's control (a hook, by SSH).
MOST_SAID_BYTES = 64 << 20


class Completed(NamedTuple):
    """The result of a command on a host."""

    returncode: int
    stdout: str
    stderr: str


class Fingerprint(NamedTuple):
    """A file's size and SHA-256 (hex), for comparison."""

    size_bytes: int
    sha256: str


class Allocation(NamedTuple):
    """A file's length, and how much its file system has allocated."""

    size_bytes: int
    allocated_bytes: int


class Promise(NamedTuple):
    """A memory reservation for a process: `file` as it is touched, or private memory
    (`is_private`).

    It is recorded in `record` and counts while a process with `holder` in its command line runs;
    "": while the requesting process runs. Private memory is in no file (`file` is None).
    """

    record: Path
    size_bytes: int
    file: Path | None
    is_private: bool
    holder: str


class FreeMemory(NamedTuple):
    """Memory that can still be reserved, and memory that others have reserved but not used yet."""

    free_bytes: int
    promised_bytes: int
    is_given: bool


class Queues(NamedTuple):
    """Bytes that were sent but not acknowledged, and bytes received but not read."""

    unsent_bytes: int
    unread_bytes: int


class Executable(NamedTuple):
    """A program on a host; another build of it has another time or size."""

    path: Path
    mtime_ns: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class HostEntry:
    """A host's inventory entry. Paths are on the host.

    All of its state is under `state_dir`; `bridge` is the bridge for guests' taps, `heartbeats` the
    socket of an observer of guests' heartbeats: None if the host has none. Migrations come in on a
    port of `migration_ports`, first and last (None: the kernel chooses), and only on
    `migration_address`. `libvirt` is the socket of the libvirtd whose domains count as VMs too.
    `second_address`: where other hosts reach it if the network of its first address fails, on
    another network; or None. With `vm_uids` each VM's QEMU runs as its own user, else as vmckpt's.
    """

    name: str
    state_dir: Path
    migration_address: str
    qemu: str = "qemu-system-x86_64"
    bridge: str | None = None
    heartbeats: Path | None = None
    migration_ports: tuple[int, int] | None = None
    libvirt: Path | None = None
    second_address: str | None = None
    vm_uids: Uids | None = None

    def __post_init__(self) -> None:
        for path in (self.state_dir, self.heartbeats, self.libvirt):
            if path is not None and not path.is_absolute():
                raise ValueError(f"'{path}' must be an absolute path")
        if self.migration_ports is not None:
            first, last = self.migration_ports
            if not 0 < first <= last < 65536:
                raise ValueError(f"migration_ports {first}-{last} must be from 1 to 65535")
        if self.vm_uids is not None:
            make_uids(*self.vm_uids)


def entry_fields(host: "HostEntry | Host") -> dict[str, Any]:
    """The fields common to every kind of host, as arguments of its class."""
    return {field.name: getattr(host, field.name) for field in fields(HostEntry)}


class Host(Protocol):
    """A host. Any method raises HostDownError if the host does not answer."""

    @property
    def name(self) -> str:
        """Its name in the inventory."""

    @property
    def state_dir(self) -> Path:
        """The directory with all of its state."""

    @property
    def migration_address(self) -> str:
        """The only address that accepts migrations."""

    @property
    def qemu(self) -> str:
        """The QEMU binary to use there."""

    @property
    def bridge(self) -> str | None:
        """The bridge for guests' taps."""

    @property
    def heartbeats(self) -> Path | None:
        """The socket of an observer of guests' heartbeats."""

    @property
    def migration_ports(self) -> tuple[int, int] | None:
        """First and last port for incoming migrations; None: the kernel chooses."""

    @property
    def libvirt(self) -> Path | None:
        """The socket of its libvirtd; None: vmckpt does not ask it for domains."""

    @property
    def second_address(self) -> str | None:
        """An address on another network; None: it has none."""

    @property
    def vm_uids(self) -> Uids | None:
        """The users that run its VMs' QEMUs; None: vmckpt's own user."""

    @property
    def is_this_machine(self) -> bool:
        """Whether data sent to the host never leaves this machine."""

    async def require_up(self) -> None:
        """Raises HostDownError unless commands can be run on the host."""

    async def run(self, argv: Sequence[str], timeout_s: float = COMMAND_TIMEOUT_S) -> Completed:
        """Run a command to its end.

        Raises HostDownError if it cannot be started or exceeds `timeout_s`, OutcomeUnknownError if
        the connection to a remote host is lost meanwhile.
        """

    async def spawn(self, argv: Sequence[str], stderr_path: Path) -> ProcessId:
        """Start a process that outlives this one, in its own session.

        Its output is appended to `stderr_path`, whose directory must exist. Raises HostDownError,
        OutcomeUnknownError as `run` does.
        """

    async def is_alive(self, which: ProcessId) -> bool:
        """Whether exactly this process still runs on the host."""

    async def interrupt(self, which: ProcessId) -> bool:
        """SIGTERM to exactly this process; False when it has ended."""

    async def kill(self, which: ProcessId, *, wait_s: float = 5.0) -> bool:
        """SIGKILL exactly this process and wait for its end; True when it is gone."""

    async def stop_for_good(self, which: ProcessId) -> bool:
        """SIGKILL exactly this process; True once none of it runs, even if memory is not freed
        yet.
        """

    async def find_processes(self, argument: str, *, of_anyone: bool = False) -> list[ProcessId]:
        """Processes on the host whose command line contains `argument`.

        Any user can put it there, so only processes of root and of vmckpt's user count; with
        `of_anyone` all.
        """

    async def find_processes_of(self, uid: int) -> list[ProcessId]:
        """Processes on the host that run as this user."""

    async def connect(self, path: Path, *, of_anyone: bool = True) -> socket.socket:
        """A connected stream to a Unix socket on the host.

        Without `of_anyone` a socket of a user other than vmckpt's and root is refused.
        """

    def lock(self, path: Path, owner: Owner) -> AbstractAsyncContextManager[None]:
        """Hold an exclusive lock for a block; see hosts.lock. Raises BusyError."""

    async def lock_owner(self, path: Path) -> Owner | None:
        """The holder of the lock, None if it is free."""

    async def exists(self, path: Path) -> bool:
        """Whether `path` exists."""

    async def await_path(self, path: Path, within_s: float) -> bool:
        """Wait up to `within_s` until `path` exists; returns whether it does."""

    async def resolve(self, path: Path) -> Path:
        """The real path, links followed; a missing path is returned unchanged."""

    async def is_block_device(self, path: Path) -> bool:
        """Whether `path` is a block device, links followed."""

    async def readable(self, path: Path) -> bool:
        """Whether this user may read `path`."""

    async def usable(self, path: Path) -> bool:
        """Whether this user may read and write `path`."""

    async def may_write_below(self, directory: Path) -> bool:
        """Whether this user may create files in a directory, which may not exist yet."""

    async def find_executable(self, name: str) -> Executable | None:
        """The file that a shell would run for this command name; None: none."""

    async def fingerprint(self, path: Path) -> Fingerprint | None:
        """A file's size and content, for comparison; None if it cannot be read."""

    async def allocation(self, path: Path) -> Allocation | None:
        """A file's length and allocation; None if it is missing."""

    async def read_text(self, path: Path) -> str | None:
        """A whole file; None if it is missing. Invalid UTF-8 becomes U+FFFD.

        Of a file larger than MOST_TEXT_BYTES only both ends.
        """

    async def read_from(self, path: Path, offset_bytes: int) -> bytes:
        """A file's content from an offset on, at most 1 MiB; empty if the file is missing."""

    async def write_text(self, path: Path, text: str) -> None:
        """Replace a file (mode 0600) atomically and durably.

        A reader sees the old or the new one. Raises StorageError.
        """

    async def make_dir(self, path: Path) -> None:
        """Create a directory for its owner only, with its parents. Raises StorageError."""

    async def make_private_dir(self, path: Path) -> None:
        """Create a directory of this user's (mode 0700), in one that others may write to.

        Raises StorageError, also if `path` exists and others may enter it, or it is another
        user's.
        """

    async def grant(self, grants: Sequence[Grant], uids: Uids) -> list[int]:
        """Grant files to one of these users, see hosts.grants; returns the devices' groups.

        Raises RefusedError, StorageError.
        """

    async def bind_taps(self, which: ProcessId) -> None:
        """Have the process's taps removed when it ends. Raises HostDownError."""

    async def list_dir(self, path: Path) -> list[str]:
        """Sorted names in a directory; empty if it is missing."""

    async def remove(self, path: Path) -> None:
        """Remove a file or a whole directory durably; it may be missing. Raises StorageError."""

    async def free_bytes(self, directory: Path) -> int:
        """Bytes this user can still write below `directory`."""

    async def available_memory_bytes(self) -> int:
        """The kernel's estimate of memory that new processes can take without swapping."""

    async def memory_room(self, directory: Path) -> FreeMemory:
        """Memory for files below `directory` that is neither used nor reserved, in bytes."""

    async def promise_memory(self, promise: Promise, *, overcommit: bool) -> FreeMemory:
        """Reserve free memory, or with `overcommit` any; see hosts.promises.

        The directory of its record must exist.
        """

    async def unix_time_s(self) -> float:
        """The host's clock."""

    async def listening_ports(self, address: str) -> frozenset[int]:
        """TCP ports in use at `address`."""

    async def socket_queues(self, which: ProcessId, port: int) -> Queues:
        """The queues of the process's TCP connections with local or remote `port`."""

    async def user_id(self) -> int:
        """The user that commands run as; 0 is root."""

    async def cpu_flags(self) -> frozenset[str]:
        """Flags of the host's first processor."""

    async def page_tracking(self) -> str:
        """How the host detects pages that a process has written: a `kernel.PageTracking`."""

    async def own_command(self) -> list[str]:
        """The command line that runs vmckpt on the host."""
