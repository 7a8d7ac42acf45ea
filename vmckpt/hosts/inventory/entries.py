"""Convert inventory entries from and to JSON."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vmckpt.codec import builtins, convert
from vmckpt.hosts.host import HostEntry, entry_fields
from vmckpt.hosts.local import LocalHost

if TYPE_CHECKING:
    from vmckpt.hosts.ssh.entry import SshEntry

LOCAL, SSH = "local", "ssh"


def parse_entry(name: str, data: Mapping[str, Any]) -> "LocalHost | SshEntry":
    """The entry of a host. Raises ValueError on a malformed one, UsageError on its address."""
    # A person may have written it: an empty value counts as missing.
    given = {key: value for key, value in data.items() if value != ""} | {"name": name}
    match given.pop("kind", LOCAL):
        case "local":
            return convert(LocalHost, given)
        case "ssh":
            from vmckpt.hosts.ssh.address import Address
            from vmckpt.hosts.ssh.entry import Reached, SshEntry

            shared, reached = convert(HostEntry, given), convert(Reached, given)
            if reached.ssh_config and not reached.ssh_config.is_absolute():
                raise ValueError(f"'{reached.ssh_config}' must be an absolute path")
            return SshEntry(
                **entry_fields(shared),
                address=Address.parse(reached.address, reached.ssh_config),
                vmckpt=reached.vmckpt,
            )
        case other:
            raise ValueError(f"{other!r} is not a kind of host: '{LOCAL}' and '{SSH}' are")


def entry_to_json(entry: "LocalHost | SshEntry") -> dict[str, Any]:
    """The file's content, without the name; `parse_entry` is the inverse."""
    fields = builtins(HostEntry(**entry_fields(entry)))
    del fields["name"]
    if isinstance(entry, LocalHost):
        return {"kind": LOCAL, "enter": list(entry.enter), **fields}
    from vmckpt.hosts.ssh.entry import Reached

    reached = Reached(str(entry.address), entry.address.config, entry.vmckpt)
    return {"kind": SSH, **builtins(reached), **fields}
