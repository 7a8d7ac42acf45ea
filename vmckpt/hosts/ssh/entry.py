"""What the inventory says of a host that is reached over SSH."""

from dataclasses import dataclass

from vmckpt.hosts.host import Entry
from vmckpt.hosts.ssh.address import Address


@dataclass(frozen=True, slots=True, kw_only=True)
class SshEntry(Entry):
    """A host reached over SSH; `vmckpt` is the command there."""

    address: Address
    vmckpt: str = "vmckpt"
