"""The inventory entry of a host that is reached over SSH."""

from dataclasses import dataclass

from vmckpt.hosts.host import HostEntry
from vmckpt.hosts.ssh.address import Address


@dataclass(frozen=True, slots=True, kw_only=True)
class SshEntry(HostEntry):
    """A host reached over SSH; `vmckpt` is the command there."""

    address: Address
    vmckpt: str = "vmckpt"
