"""A VM's identity, independent of its name: a UUID in `vms/VM/identity`.

It is created with the VM and moves with it. Copies and forks get their own. A VM that is older than
this file gets one when it is first needed.
"""

import uuid
from collections.abc import Iterable
from contextlib import suppress

from vmckpt.errors import StorageError, UsageError
from vmckpt.hosts.every import ask_every
from vmckpt.hosts.host import Host
from vmckpt.vm.paths import VmDir, vm_dir


def new_identity() -> str:
    """A new identity."""
    return str(uuid.uuid4())


async def read_identity(host: Host, directory: VmDir) -> str | None:
    """The VM's identity; None: it has none yet. Raises UsageError on a damaged file."""
    text = await host.read_text(directory.identity)
    if text is None:
        return None
    if not is_identity(text.strip()):
        raise UsageError(
            f"{directory.identity} is damaged",
            why="it holds no UUID",
            remedy="write the `vm_id` of the VM's checkpoints into it (vmckpt checkpoint list "
            "--json), or remove it: the VM then gets a new one, and its old checkpoints are kept "
            "until you remove them",
        )
    return text.strip()


async def identities(name: str, hosts: Iterable[Host]) -> list[str | None]:
    """The identities of the VMs of that name on the hosts that answer; None: one has none yet."""

    async def ask(host: Host) -> list[str | None]:
        directory = vm_dir(host.state_dir, name)
        there = await host.exists(directory.current)
        return [await read_identity(host, directory)] if there else []

    answers = await ask_every(hosts, ask)
    return [one for those in answers.given for one in those]


async def identity_of(host: Host, directory: VmDir) -> str:
    """The VM's identity, created if it has none. The caller holds its lock.

    Raises UsageError, StorageError.
    """
    found = await read_identity(host, directory)
    if found is None:
        found = new_identity()
        await host.write_text(directory.identity, f"{found}\n")
    return found


async def hand_over(host: Host, directory: VmDir, destination: Host) -> None:
    """Copy the identity and the checkpoint history to the destination. Raises StorageError."""
    theirs = vm_dir(destination.state_dir, directory.path.name)
    found = await read_identity(host, directory)
    if found is None:
        found = new_identity()
        with suppress(StorageError):  # a full disk at the source must not prevent a migration
            await host.write_text(directory.identity, f"{found}\n")
    await destination.write_text(theirs.identity, f"{found}\n")
    if point := await host.read_text(directory.point):
        await destination.write_text(theirs.point, point)


def is_identity(text: str) -> bool:
    """Whether the text is a UUID in vmckpt's spelling."""
    try:
        return str(uuid.UUID(text)) == text
    except ValueError:
        return False
