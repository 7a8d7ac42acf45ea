"""A host's identity, independent of operators' names: a UUID in STATE/host-id.

It is created when first needed. Each operator has an inventory: one's `local` is another's `h1`.
Records for others name a host by this UUID.
"""

import uuid
from pathlib import Path

from vmckpt.errors import StorageError
from vmckpt.hosts.host import Host


async def host_identity(host: Host) -> str:
    """The host's identity, created if it has none. Raises HostDownError, StorageError."""
    if found := await read_host_identity(host):
        return found
    await host.make_dir(host.state_dir)
    part = host.state_dir / f".host-id.{uuid.uuid4()}"
    await host.write_text(part, f"{uuid.uuid4()}\n")
    try:
        # If two operators do this at once, the first one wins.
        done = await host.run(["ln", "-T", "--", str(part), str(identity_path(host))])
    finally:
        await host.remove(part)
    if found := await read_host_identity(host):
        return found
    raise StorageError(
        f"{host.name} has no identity",
        why=f"{identity_path(host)} is empty, or cannot be made: {done.stderr.strip()}",
        remedy="remove that file if it is empty, and try again; else free space there",
    )


async def read_host_identity(host: Host) -> str | None:
    """The host's identity; None: it has none yet. Raises HostDownError."""
    text = await host.read_text(identity_path(host))
    return text.strip() if text and text.strip() else None


def identity_path(host: Host) -> Path:
    """The file that contains it."""
    return host.state_dir / "host-id"
