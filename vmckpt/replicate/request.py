"""What a replication is asked to do, and the files by which its services are spoken with.

STATE/replicas/VM on both hosts: request.json, status.json (as it last was), control.sock, and what
the processes there say besides.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from vmckpt.errors import NotFoundError
from vmckpt.foreign import parse
from vmckpt.hosts.entries import fields_to_json, parse_fields
from vmckpt.hosts.host import Entry, Host
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.remote.tls import Place
from vmckpt.replicate.disks.copies import CopiedDisk
from vmckpt.vm.paths import file_name

FORMAT = 2
DIRECTORY = "replicas"
COPY, SHARED = "copy", "shared"
# What a standby's status says when it has taken the guest over.
PROMOTED = "promoted"
# What a service's status says when nothing of it is left to be done.
ENDED = ("ended", PROMOTED)


def has_left(status: Mapping[str, Any]) -> bool:
    """Whether a primary's last word is that its standby may have the guest, or has it."""
    return status.get("ending") in ("yours", "replaced")


def is_settled(status: Mapping[str, Any]) -> bool:
    """Whether a primary's last word is that no standby may have the guest any more."""
    return status.get("ending") in ("stopped", "alone", "guest_off", "lost")


@dataclass(frozen=True, slots=True)
class Options:
    """What the operator wishes. `epoch_s` of None adapts itself.

    `arbiter` is where the leases are (`arbiter.py`), `credentials` the path of a file with what it
    wants to know us by, on each of both hosts ("": nothing); `fence` the command line of an agent
    (`fencing/agent.py`), empty where the standby kills by itself, or waits. `holds_output`: nothing
    that the guest sends leaves before the standby has the state that sent it. `lease_s`: how long a
    silent primary is waited for where it is not fenced. `disks`: COPY, the standby has copies of
    those that can be written; SHARED, both hosts see the same files.
    """

    arbiter: str
    fence: tuple[str, ...] = ()
    epoch_s: float | None = 0.025
    max_pause_s: float = 0.010
    holds_output: bool = True
    lease_s: float = 3.0
    credentials: str = ""
    disks: str = COPY


@dataclass(frozen=True, slots=True)
class Files:
    """What a service has below a host's state directory."""

    path: Path

    @classmethod
    def of(cls, host: Host | Entry, vm: str) -> Self:
        """Those of a VM on a host. Raises UsageError: it is no name."""
        return cls(host.state_dir / DIRECTORY / file_name(vm, "VM"))

    @property
    def request(self) -> Path:
        """What is to be done."""
        return self.path / "request.json"

    @property
    def status(self) -> Path:
        """How it was when the service last wrote it down; at its end: why it ended."""
        return self.path / "status.json"

    @property
    def room(self) -> Path:
        """Room for `status`, had beforehand: a disk may be full by then."""
        return self.path / "room"

    @property
    def control(self) -> Path:
        """Where the service is spoken with."""
        return self.path / "control.sock"

    @property
    def log(self) -> Path:
        """What the service says besides."""
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
class Request:
    """One replication, as both services are told of it.

    `one_machine`: both hosts' processes are this kernel's, so that each side can see and kill the
    other's. `qemu_id` is of the primary's QEMU. `disks` are those that can be written. `place` is
    where the standby listens; only the primary is told. `identity`: which VM it is (an older vmckpt
    did not say).
    """

    run: str
    vm: str
    spec: str
    platform: Mapping[str, str]
    primary: LocalHost
    standby: LocalHost
    options: Options
    one_machine: bool
    qemu_id: str
    disks: tuple[CopiedDisk, ...] = ()
    place: Place | None = None
    identity: str = ""

    @property
    def shares_disks(self) -> bool:
        """Whether the disks that can be written are the same files on both hosts."""
        return self.options.disks == SHARED

    def is_standbys(self, holder: str) -> bool:
        """Whether that is its standby's service, or what acts for it after its death."""
        standby = f"{self.standby.name}/{self.run}"
        return holder == standby or holder.startswith(f"{standby}/")

    def to_json(self) -> dict[str, Any]:
        """For its file."""
        return {
            "format": FORMAT,
            "run": self.run,
            "vm": self.vm,
            "spec": self.spec,
            "platform": dict(self.platform),
            "primary": {"name": self.primary.name, **fields_to_json(self.primary)},
            "standby": {"name": self.standby.name, **fields_to_json(self.standby)},
            "options": asdict(self.options),
            "one_machine": self.one_machine,
            "qemu_id": self.qemu_id,
            "disks": [asdict(disk) for disk in self.disks],
            "place": asdict(self.place) if self.place else None,
            "identity": self.identity,
        }

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Of its file. Raises ValueError, KeyError or TypeError."""
        return cls.from_json(parse(text))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The inverse. Raises ValueError, KeyError or TypeError."""
        if data["format"] != FORMAT:
            raise ValueError("written by another version of vmckpt")
        return cls(
            run=data["run"],
            vm=data["vm"],
            spec=data["spec"],
            platform=data["platform"],
            primary=_host(data["primary"]),
            standby=_host(data["standby"]),
            options=Options(**data["options"] | {"fence": tuple(data["options"]["fence"])}),
            one_machine=data["one_machine"],
            qemu_id=data["qemu_id"],
            disks=tuple(CopiedDisk(**disk) for disk in data["disks"]),
            place=Place(**data["place"]) if data["place"] else None,
            identity=data.get("identity", ""),
        )


def read_request(directory: Path) -> Request:
    """The request below a service's directory. Raises NotFoundError."""
    path = Files(directory).request
    try:
        return Request.from_text(path.read_text())
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise NotFoundError(
            "nothing is to be replicated here",
            why=f"{path}: {exc}",
            remedy="see `vmckpt replicate status`",
        ) from exc


def stop_command(vm: str) -> str:
    """What ends the replication of a VM."""
    return f"vmckpt replicate stop {vm}"


def as_itself(host: Host) -> LocalHost:
    """A host as a service that runs there has it."""
    return LocalHost(host.name, **parse_fields(fields_to_json(host)))


def _host(data: Mapping[str, Any]) -> LocalHost:
    return LocalHost(data["name"], **parse_fields(data))
