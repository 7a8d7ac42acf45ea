"""vm.json: a VM's last QEMU, as its host records it, and sessions on that QEMU's monitors."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NotRequired, Self, TypedDict

from vmckpt.hosts.host import Host
from vmckpt.hosts.processes.process import ProcessId
from vmckpt.state.documents import Schema
from vmckpt.vm.paths import QemuDir, VmDir

if TYPE_CHECKING:
    from vmckpt.qemu.monitor import Monitor

# What QEMU calls the guest's RAM.
RAM_NAME = "ram0"


@dataclass(frozen=True, slots=True)
class Platform:
    """The values of "auto" in a spec, resolved on the VM's first host; they move with the VM."""

    machine: str
    accel: str
    cpu: str


@dataclass(frozen=True, slots=True)
class Replaced:
    """The QEMU that a standby's QEMU has taken over from: its remains on `host` are stale."""

    host: str
    qemu_id: str


class Qemu(NamedTuple):
    """A QEMU process: its files, its process id, its platform.

    For an adopted one (`is_foreign`) `nodes` are the names of its disks' nodes; vmckpt's own follow
    from the spec. `private_ram`: a fork's, whose memory file is shared and read-only. `replaces`:
    the QEMU that it took over from.
    """

    files: QemuDir
    process: ProcessId
    platform: Platform
    nodes: tuple[str, ...] = ()
    is_foreign: bool = False
    replaces: Replaced | None = None
    private_ram: bool = False
    # What a domain's QEMU calls the guest's RAM; vmckpt's own and adopted ones: see `Vm.ram_names`.
    ram_names: tuple[str, ...] = ()
    # The UUID of the libvirt domain whose QEMU it is; "": it is no domain's.
    domain: str = ""

    def to_json(self) -> str:
        """The content of vm.json."""
        return _SCHEMA.encode(
            {
                "qemu_id": self.files.qemu_id,
                "pid": self.process.pid,
                "start_ticks": self.process.start_ticks,
                "platform": self.platform,
                "nodes": self.nodes if self.is_foreign else None,
                "foreign": self.is_foreign or None,
                "replaces": self.replaces,
                "private_ram": self.private_ram or None,
                "memory": None if self.files.is_loose else "directory",
                "domain": self.domain or None,
                "ram_names": self.ram_names or None,
            }
        )

    @classmethod
    def from_json(cls, text: str, directory: VmDir) -> Self:
        """The inverse of `to_json`. Raises StorageError on a damaged file."""
        found = _SCHEMA.decode(text, directory.current)
        return cls(
            directory.qemu(found["qemu_id"])._replace(is_loose=found.get("memory") is None),
            ProcessId(found["pid"], found["start_ticks"]),
            found["platform"],
            found.get("nodes") or (),
            found.get("foreign") or False,
            found.get("replaces"),
            found.get("private_ram") or False,
            found.get("ram_names") or (),
            found.get("domain") or "",
        )


class _VmRecord(TypedDict):
    """vm.json. `memory` is "directory" if the QEMU's memory has a directory of its own."""

    qemu_id: str
    pid: int
    start_ticks: int
    platform: Platform
    nodes: NotRequired[tuple[str, ...] | None]
    foreign: NotRequired[bool | None]
    replaces: NotRequired[Replaced | None]
    private_ram: NotRequired[bool | None]
    memory: NotRequired[str | None]
    domain: NotRequired[str | None]
    ram_names: NotRequired[tuple[str, ...] | None]


_SCHEMA = Schema(
    _VmRecord,
    "end the VM's QEMU by hand if it runs, keep a copy of spec.toml, remove {directory}, and run "
    "the VM again from the copy: vmckpt vm run",
    omits_none=True,
)


async def open_monitor(host: Host, qemu: Qemu, path: Path, timeout_s: float = 5.0) -> "Monitor":
    """A session on one of the VM's monitors. Raises HostDownError, MonitorLostError."""
    from vmckpt.qemu.monitor import Monitor

    return await Monitor.connect(
        await host.connect(path), f"{qemu.files.vm_name} on {host.name}", timeout_s
    )
