"""A VM as commands work on it, whoever runs it."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from vmckpt.events.types import Emit
from vmckpt.hosts.host import Host

if TYPE_CHECKING:
    from pathlib import Path

    from vmckpt.migrate.options import Options
    from vmckpt.migrate.recover import Recovery
    from vmckpt.migrate.report import Report
    from vmckpt.vm.check import Check, Examined
    from vmckpt.vm.dirty_rate import DirtyRate


class Row(NamedTuple):
    """A VM in `vm list`."""

    name: str
    host: str
    state: str
    vcpus: int
    memory_bytes: int
    machine: str
    facts: dict[str, Any]


class Started(NamedTuple):
    """A VM that has been started: in words, and for `--json`."""

    what: str
    facts: dict[str, Any]


class Removed(NamedTuple):
    """A VM that is forgotten: its images, which stay, and the QEMU that goes on without vmckpt."""

    disks: list[str]
    goes_on_as_pid: int | None = None
    # Where what its TPM holds stays.
    tpm: str | None = None


class SnapshotRow(NamedTuple):
    """A snapshot. `state_bytes` and `guest_clock_s` are None where nobody says."""

    name: str
    taken_unix_s: int
    state_bytes: int | None
    guest_clock_s: float | None
    facts: dict[str, Any]


class Driver(Protocol):
    """One VM. Errors are VmckptErrors."""

    @property
    def name(self) -> str:
        """The VM's name."""

    @property
    def host(self) -> Host:
        """Where it is."""

    async def look(self) -> Row:
        """How it is now."""

    async def attach(self) -> None:
        """Join this terminal to its console."""

    async def start(self) -> Started:
        """Start it where it is."""

    async def stop(self, *, force: bool, timeout_s: float) -> None:
        """Press its power button and wait until it is off; with `force` end it at once."""

    async def remove(self, *, with_state: bool = False) -> Removed:
        """Forget it; what stays. `with_state`: not what its TPM holds."""

    def own_images(self) -> "list[Path]":
        """Where the disks are that it writes."""

    async def check(self, target: Host, options: "Options") -> "Sequence[Check]":
        """All that is for and against moving it; changes nothing."""

    async def examine(self, target: Host, options: "Options") -> "Examined":
        """The same, and what of its disks would be copied."""

    async def migrate(
        self,
        target: Host,
        options: "Options",
        emit: Emit,
        forecast: Mapping[str, Any] | None = None,
    ) -> "Report | Recovery":
        """Move it while it runs; a Recovery when it had to be ended by one."""

    async def measure(self, for_s: float) -> "DirtyRate":
        """How fast it dirties its memory, looked at for so long."""

    async def save(self, name: str, emit: Emit) -> SnapshotRow:
        """Take a snapshot."""

    async def load(self, name: str, emit: Emit) -> SnapshotRow:
        """Go back to a snapshot."""

    async def snapshots(self) -> list[SnapshotRow]:
        """Its snapshots, oldest first."""

    async def delete(self, name: str, emit: Emit) -> None:
        """Delete a snapshot."""
