"""A machine that VMs live on: what its inventory entry says, and what can be asked of it."""

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
# What `read_from` reads at once.
MOST_READ_BYTES = 1 << 20
# A QEMU that was broken into makes its log as large as it likes.
MOST_TEXT_BYTES = 8 << 20
# Of each stream of a command, whose words may be a guest's (a hook, by SSH).
MOST_SAID_BYTES = 64 << 20


class Completed(NamedTuple):
    """How a command on a host ended."""

    returncode: int
    stdout: str
    stderr: str


class Fingerprint(NamedTuple):
    """What a file holds, for comparing: its size and its SHA-256, as hex digits."""

    size_bytes: int
    sha256: str


class Allocation(NamedTuple):
    """How long a file is, and how much of that its file system has given it."""

    size_bytes: int
    allocated_bytes: int


class Promise(NamedTuple):
    """Memory that a process may come to have: `file` as it is touched, or its own (`is_private`).

    It is written down in `record` and counts while a process runs whose command line has `holder`;
    "": while the process runs that asks. Its own memory is in no file (`file` is None).
    """

    record: Path
    size_bytes: int
    file: Path | None
    is_private: bool
    holder: str


class FreeMemory(NamedTuple):
    """Memory that can still be promised; others were promised, and have not taken yet, so much."""

    free_bytes: int
    promised_bytes: int
    is_given: bool


class Queues(NamedTuple):
    """What the other side has not acknowledged of what was sent, and what was not read yet."""

    unsent_bytes: int
    unread_bytes: int


class Executable(NamedTuple):
    """A program on a host; another build of it has another time or size."""

    path: Path
    mtime_ns: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class HostEntry:
    """A host as the inventory has it. Paths are the host's own.

    All of its state is under `state_dir`; `bridge` is where guests' taps go, `heartbeats` the
    socket of an observer of guests' heartbeats: None where the host has none. Migrations come in on
    a port of `migration_ports`, first and last (the kernel's choice when None), and only on
    `migration_address`. `libvirt` is the socket of the libvirtd whose domains count as VMs too.
    `second_address` is where other hosts reach it if its network at the first one is lost: another
    network's, or None. With `vm_uids` each VM's QEMU runs as a user of its own, else as vmckpt's.
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
                raise ValueError(f"'{path}' has to be an absolute path")
        if self.migration_ports is not None:
            first, last = self.migration_ports
            if not 0 < first <= last < 65536:
                raise ValueError(f"migration_ports {first}-{last} have to be from 1 to 65535")
        if self.vm_uids is not None:
            make_uids(*self.vm_uids)


def entry_fields(host: "HostEntry | Host") -> dict[str, Any]:
    """What every kind of host has, as arguments of its class."""
    return {field.name: getattr(host, field.name) for field in fields(HostEntry)}


class Host(Protocol):
    """A host that answers. Whatever it is asked, HostDownError means that it gave no answer."""

    @property
    def name(self) -> str:
        """In the inventory."""

    @property
    def state_dir(self) -> Path:
        """Where all of its state is."""

    @property
    def migration_address(self) -> str:
        """The one address that migrations come in on."""

    @property
    def qemu(self) -> str:
        """The QEMU to start there."""

    @property
    def bridge(self) -> str | None:
        """Where guests' taps go."""

    @property
    def heartbeats(self) -> Path | None:
        """The socket of an observer of guests' heartbeats."""

    @property
    def migration_ports(self) -> tuple[int, int] | None:
        """First and last port that a migration may come in on; None: the kernel chooses."""

    @property
    def libvirt(self) -> Path | None:
        """The socket of its libvirtd; None: vmckpt does not ask it for domains."""

    @property
    def second_address(self) -> str | None:
        """An address of another network's, by which it is reached too; None: it has none."""

    @property
    def vm_uids(self) -> Uids | None:
        """The users that its VMs' QEMUs run as; None: as vmckpt's own user."""

    @property
    def is_this_machine(self) -> bool:
        """Whether what is sent to the host never leaves this machine."""

    async def require_up(self) -> None:
        """Raises HostDownError unless commands can be run on the host."""

    async def run(self, argv: Sequence[str], timeout_s: float = COMMAND_TIMEOUT_S) -> Completed:
        """Run a command to its end.

        Raises HostDownError when it cannot be started or outlasts `timeout_s`, OutcomeUnknownError
        when the connection to a host elsewhere is lost meanwhile.
        """

    async def spawn(self, argv: Sequence[str], stderr_path: Path) -> ProcessId:
        """Start a process that outlives this one, in a session of its own.

        Its output is appended to `stderr_path`, whose directory has to be there. Raises
        HostDownError, OutcomeUnknownError as `run` does.
        """

    async def is_alive(self, which: ProcessId) -> bool:
        """Whether exactly this process still runs on the host."""

    async def interrupt(self, which: ProcessId) -> bool:
        """SIGTERM to exactly this process; False when it has ended."""

    async def kill(self, which: ProcessId, *, wait_s: float = 5.0) -> bool:
        """SIGKILL exactly this process and wait for its end; True when it is gone."""

    async def stop_for_good(self, which: ProcessId) -> bool:
        """SIGKILL exactly this process; True when nothing of it runs, freed or not."""

    async def find_processes(self, argument: str, *, of_anyone: bool = False) -> list[ProcessId]:
        """Processes on the host whose command line holds `argument`.

        What anyone has written there proves nothing: only those count that are vmckpt's user there,
        or root; with `of_anyone` all.
        """

    async def find_processes_of(self, uid: int) -> list[ProcessId]:
        """Processes on the host that are this user's."""

    async def connect(self, path: Path, *, of_anyone: bool = True) -> socket.socket:
        """A connected stream to a Unix socket on the host.

        Without `of_anyone` one at which another user than vmckpt's or root listens is refused.
        """

    def lock(self, path: Path, owner: Owner) -> AbstractAsyncContextManager[None]:
        """Hold an exclusive lock for a block; see hosts.lock. Raises BusyError."""

    async def lock_owner(self, path: Path) -> Owner | None:
        """Who holds the lock, None when it is free."""

    async def exists(self, path: Path) -> bool:
        """Whether there is something at `path`."""

    async def await_path(self, path: Path, within_s: float) -> bool:
        """Wait until there is something at `path`, for so long at most; whether there is."""

    async def resolve(self, path: Path) -> Path:
        """Where `path` really is, links followed; what is not there stays as it is."""

    async def is_block_device(self, path: Path) -> bool:
        """Whether `path` is a block device, links followed."""

    async def readable(self, path: Path) -> bool:
        """Whether this user may read `path`."""

    async def usable(self, path: Path) -> bool:
        """Whether this user may read and write what is at `path`."""

    async def may_write_below(self, directory: Path) -> bool:
        """Whether this user may make files in a directory, which need not be there yet."""

    async def find_executable(self, name: str) -> Executable | None:
        """The file that a command's name stands for, found as the shell would; None: none."""

    async def fingerprint(self, path: Path) -> Fingerprint | None:
        """A file's size and content, for comparing; None when it cannot be read."""

    async def allocation(self, path: Path) -> Allocation | None:
        """How much of a file is there; None when there is none."""

    async def read_text(self, path: Path) -> str | None:
        """A whole file; None when there is none. Bytes that are no UTF-8 become U+FFFD.

        Of one that is larger than MOST_TEXT_BYTES its two ends.
        """

    async def read_from(self, path: Path, offset_bytes: int) -> bytes:
        """What a file has from an offset on, 1 MiB at most; nothing when there is none."""

    async def write_text(self, path: Path, text: str) -> None:
        """Replace a file (mode 0600) in one step: a reader sees the old one or the new one.

        The new one is on the disk when this returns. Raises StorageError.
        """

    async def make_dir(self, path: Path) -> None:
        """A directory that only its owner may enter, parents included. Raises StorageError."""

    async def make_private_dir(self, path: Path) -> None:
        """A directory of this user's alone (mode 0700), in one that others may write to.

        Raises StorageError, also when there is something at `path` that others may enter, or that
        belongs to another user.
        """

    async def grant(self, grants: Sequence[Grant], uids: Uids) -> list[int]:
        """Grant files to one of these users, see hosts.grants; the groups of devices among them.

        Raises RefusedError, StorageError.
        """

    async def bind_taps(self, which: ProcessId) -> None:
        """The taps that the process holds go when it ends. Raises HostDownError."""

    async def list_dir(self, path: Path) -> list[str]:
        """Sorted names in a directory; empty when there is none."""

    async def remove(self, path: Path) -> None:
        """Remove a file or a whole directory; nothing there is no error. Raises StorageError.

        It does not come back after a power cut.
        """

    async def free_bytes(self, directory: Path) -> int:
        """Bytes this user can still write below `directory`."""

    async def available_memory_bytes(self) -> int:
        """The kernel's estimate of memory that new processes can take without swapping."""

    async def memory_room(self, directory: Path) -> FreeMemory:
        """Memory for files below `directory` that is neither used nor reserved, in bytes."""

    async def promise_memory(self, promise: Promise, *, overcommit: bool) -> FreeMemory:
        """Promise memory that is free, or with `overcommit` any; see hosts.promises.

        The directory of its record is there.
        """

    async def unix_time_s(self) -> float:
        """What the host's clock says."""

    async def listening_ports(self, address: str) -> frozenset[int]:
        """TCP ports in use at `address`."""

    async def socket_queues(self, which: ProcessId, port: int) -> Queues:
        """What waits in the process's TCP connections that have `port` at either end."""

    async def user_id(self) -> int:
        """The user that commands run as; 0 is root."""

    async def cpu_flags(self) -> frozenset[str]:
        """Flags of the host's first processor."""

    async def page_tracking(self) -> str:
        """How the host finds the pages that a process has written: a `kernel.PageTracking`."""

    async def own_command(self) -> list[str]:
        """The command line that runs vmckpt on the host."""
