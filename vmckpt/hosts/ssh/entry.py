"""The inventory entry of a host that is reached over SSH."""

from dataclasses import dataclass
from pathlib import Path

from vmckpt.hosts.host import HostEntry
from vmckpt.hosts.ssh.address import Address


@dataclass(frozen=True, slots=True)
class Reached:
    """How to reach a host over SSH, as in its file."""

    address: str
    ssh_config: Path | None = None
    vmckpt: str = "vmckpt"


@dataclass(frozen=True, slots=True, kw_only=True)
class SshEntry(HostEntry):
    """A host reached over SSH; `vmckpt` is the command there."""

    address: Address
    vmckpt: str = "vmckpt"
