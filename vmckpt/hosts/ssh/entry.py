"""What the inventory says of a host that is reached over SSH."""

from dataclasses import dataclass
from typing import Any

from vmckpt.hosts.entries import SSH, fields_to_json
from vmckpt.hosts.host import Entry
from vmckpt.hosts.ssh.address import Address


@dataclass(frozen=True, slots=True, kw_only=True)
class SshEntry(Entry):
    """A host reached over SSH; `vmckpt` is the command there."""

    address: Address
    vmckpt: str = "vmckpt"

    def to_json(self) -> dict[str, Any]:
        """For its file."""
        config = self.address.config
        return {
            "kind": SSH,
            "address": str(self.address),
            "ssh_config": str(config) if config else None,
            "vmckpt": self.vmckpt,
            **fields_to_json(self),
        }
