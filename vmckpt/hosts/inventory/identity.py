"""Which host it is, whatever an operator calls it: a UUID in STATE/host-id, made when first needed.

Operators have an inventory each: one's `local` is another's `h1`. What is written down for others
names a host by this.
"""

import uuid
from pathlib import Path

from vmckpt.errors import StorageError
from vmckpt.hosts.host import Host


async def host_identity(host: Host) -> str:
    """The host's, made if it has none. Raises HostDownError, StorageError."""
    if found := await read_host_identity(host):
        return found
    await host.make_dir(host.state_dir)
    part = host.state_dir / f".host-id.{uuid.uuid4()}"
    await host.write_text(part, f"{uuid.uuid4()}\n")
    try:
        # Of two operators' at once the first one's stays.
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
    """The host's; None: it has none yet. Raises HostDownError."""
    text = await host.read_text(identity_path(host))
    return text.strip() if text and text.strip() else None


def identity_path(host: Host) -> Path:
    """The file that has it."""
    return host.state_dir / "host-id"
