"""What a replication is asked to do, and the files by which its services are spoken with.

STATE/replicas/VM on both hosts: request.json, status.json (as it last was), control.sock, and what
the processes there say besides.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from vmckpt.errors import NotFoundError, RefusedError, StorageError, UsageError
from vmckpt.hosts.host import Entry, Host, entry_fields
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.remote.tls import Place
from vmckpt.replicate.disks.copies import CopiedDisk
from vmckpt.state.documents import Schema
from vmckpt.units import format_duration
from vmckpt.vm.argv import Platform
from vmckpt.vm.paths import file_name

DIRECTORY = "replicas"
COPY, SHARED = "copy", "shared"
# Of an epoch, and of a pause.
SHORTEST_S, LONGEST_EPOCH_S, LONGEST_PAUSE_S = 0.001, 3600.0, 10.0
# Nobody waits longer for each answer: with longer epochs output is let out, and by name only.
LONGEST_HELD_S = 1.0
# A shorter lease would end, and pause the guest, when one question to the arbiter gets no answer; a
# standby that has taken the term is waited for no longer than a longer one might take
# (`keeper.GIVEN_UP_S`). Tests hold both to the constants that they follow from.
SHORTEST_LEASE_S, LONGEST_LEASE_S = 2.5, 10.0
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

    def require_sense(self, *, one_machine: bool) -> None:
        """Raises UsageError: a time is out of its bounds; RefusedError: output would be held for
        too long, or an agent is named between hosts of one machine.
        """
        if self.epoch_s is not None:
            _require_within("--epoch 25ms", self.epoch_s, SHORTEST_S, LONGEST_EPOCH_S)
        _require_within("--max-pause 25ms", self.max_pause_s, SHORTEST_S, LONGEST_PAUSE_S)
        _require_within(
            "--lease-time 5s", self.lease_s, SHORTEST_LEASE_S, LONGEST_LEASE_S,
            because=": a shorter one ends when the arbiter leaves one question unanswered, which "
            "pauses the guest; a longer one is more than a primary waits for a standby that took "
            "the term",
            otherwise=", or use --fence: it waits for no lease",
        )  # fmt: skip
        if self.fence and one_machine:
            raise RefusedError(
                "an agent has nothing to do between hosts of one machine",
                why="the standby kills the primary's processes by itself, and sees that they are "
                "gone",
                remedy="leave out --fence",
            )
        if self.holds_output and self.epoch_s is not None and self.epoch_s > LONGEST_HELD_S:
            epoch = format_duration(self.epoch_s)
            raise RefusedError(
                f"epochs of {epoch} would hold back what the guest sends for as long",
                why=f"nothing leaves before the standby has the state that sent it: up to {epoch} "
                "and more for each answer",
                remedy="choose epochs of 1 s at most, or let output out at once, by name: "
                "--unsafe-no-output-commit. Then a failover takes the guest back by up to an "
                "epoch, and what it has told others meanwhile it does not know any more",
            )


def _require_within(
    example: str, given_s: float, shortest_s: float, longest_s: float, *,
    because: str = "", otherwise: str = "",
) -> None:  # fmt: skip
    if not shortest_s <= given_s <= longest_s:
        raise UsageError(
            f"{example.split(maxsplit=1)[0]} {format_duration(given_s)} cannot be kept",
            why=f"it is from {shortest_s:g} s to {longest_s:g} s{because}",
            remedy=f"write e.g. {example}{otherwise}",
        )


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
    platform: Platform
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


# Its directory is the VM's.
REQUEST = Schema(Request, "end the replication: vmckpt replicate stop {directory.name}", version=2)


def read_request(directory: Path) -> Request:
    """The request below a service's directory. Raises NotFoundError."""
    path = Files(directory).request
    try:
        return REQUEST.decode(path.read_bytes(), path)
    except (OSError, StorageError) as exc:
        raise NotFoundError(
            "nothing is to be replicated here",
            why=str(exc),
            remedy="see `vmckpt replicate status`",
        ) from exc


def stop_command(vm: str) -> str:
    """What ends the replication of a VM."""
    return f"vmckpt replicate stop {vm}"


def as_itself(host: Host) -> LocalHost:
    """A host as a service that runs there has it."""
    return LocalHost(**entry_fields(host))
