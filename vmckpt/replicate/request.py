"""The request of a replication, and the files through which its services are controlled.

STATE/replicas/VM on both hosts: request.json, status.json (the last one), control.sock, and the
output of the processes there.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from vmckpt.errors import NotFoundError, StorageError
from vmckpt.hosts.host import Host, HostEntry, entry_fields
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.remote.tls import TlsEndpoint
from vmckpt.lease.rule import acts_for
from vmckpt.options.replication import SHARED, ReplicationOptions
from vmckpt.replicate.disks.copies import CopiedDisk
from vmckpt.replicate.domains.facts import ReplicatedDomain
from vmckpt.state.documents import Schema
from vmckpt.vm.paths import file_name
from vmckpt.vm.record import Platform

DIRECTORY = "replicas"


@dataclass(frozen=True, slots=True)
class ServiceFiles:
    """A service's files below a host's state directory."""

    path: Path

    @classmethod
    def of(cls, host: Host | HostEntry, vm: str) -> Self:
        """The files of a VM's service on a host. Raises UsageError: invalid name."""
        return cls(host.state_dir / DIRECTORY / file_name(vm, "VM"))

    @property
    def request(self) -> Path:
        """The request."""
        return self.path / "request.json"

    @property
    def beginning(self) -> Path:
        """The lock of the command that starts a replication of the VM."""
        return self.path.parent.with_name("replica-starts") / self.path.name

    @property
    def status(self) -> Path:
        """The status as last written; at its end: why it ended."""
        return self.path / "status.json"

    @property
    def room(self) -> Path:
        """Space for `status`, reserved beforehand: a disk may be full by then."""
        return self.path / "room"

    @property
    def control(self) -> Path:
        """The control socket."""
        return self.path / "control.sock"

    @property
    def log(self) -> Path:
        """The service's other output."""
        return self.path / "link.log"

    @property
    def guard_log(self) -> Path:
        """What the guard did (primary)."""
        return self.path / "guard.log"

    @property
    def recovery_log(self) -> Path:
        """What the dead-man's switch did (primary)."""
        return self.path / "recovery.log"


@dataclass(frozen=True, slots=True)
class ReplicationRequest:
    """One replication: the request of both services.

    `one_machine`: both hosts are on this kernel, so that each side can see and kill the other's
    processes. `qemu_id`: the primary's QEMU. `disks`: the writable ones. `place`: where the standby
    listens, for the primary only. `identity`: the VM's ("" from an older vmckpt). `domain`: what
    libvirt has of it, if it is a domain.
    """

    run: str
    vm: str
    spec: str
    platform: Platform
    primary: LocalHost
    standby: LocalHost
    options: ReplicationOptions
    one_machine: bool
    qemu_id: str
    disks: tuple[CopiedDisk, ...] = ()
    place: TlsEndpoint | None = None
    identity: str = ""
    domain: ReplicatedDomain | None = None

    @property
    def shares_disks(self) -> bool:
        """Whether the disks that can be written are the same files on both hosts."""
        return self.options.disks == SHARED

    @property
    def replica(self) -> str:
        """Its standby's service, by its name with the arbiter."""
        return f"{self.standby.name}/{self.run}"

    def is_standbys(self, holder: str) -> bool:
        """Whether that is its standby's service, or what acts for it after its death."""
        return acts_for(self.replica, holder)


# Its directory is the VM's.
REQUEST = Schema(
    ReplicationRequest, "end the replication: vmckpt replicate stop {directory.name}", version=2
)


def read_request(directory: Path) -> ReplicationRequest:
    """The request below a service's directory. Raises NotFoundError."""
    path = ServiceFiles(directory).request
    try:
        return REQUEST.decode(path.read_bytes(), path)
    except (OSError, StorageError) as exc:
        raise NotFoundError(
            "there is no replication here",
            why=str(exc),
            remedy="see `vmckpt replicate status`",
        ) from exc


def release_mark(directory: Path, *, standby_is_dead: bool) -> str:
    """What the command line has of a process that takes the term for the primary's host."""
    return f"replica\0release\0{directory}\0" + "--standby-is-dead\0" * standby_is_dead


def stop_command(vm: str) -> str:
    """The command that ends the replication of a VM."""
    return f"vmckpt replicate stop {vm}"


def as_itself(host: Host) -> LocalHost:
    """A host as seen by a service that runs on it."""
    return LocalHost(**entry_fields(host))
