"""Check that the VM of a given name on a host is the VM that is meant.

While the VM's own host does not answer, another host with a VM of that name, such as a compromised
one, may be the only one that does. It would receive the VM, or the secret of the VM's store.
"""

from functools import partial

from vmckpt.checkpoint.catalogue.location import Key, StoreLocation, opened
from vmckpt.errors import OutcomeUnknownError, RefusedError, VmckptError
from vmckpt.hosts.every import Answers, ask_every
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory.inventory import all_hosts
from vmckpt.sequence.in_thread import in_thread
from vmckpt.store.files.manifest import Manifest
from vmckpt.store.store import Store
from vmckpt.vm.identity import read_identity
from vmckpt.vm.inventory import Vm
from vmckpt.vm.paths import vm_dir


async def require_meant_to_restore(manifest: Manifest, host: Host) -> None:
    """Check before the checkpoint's VM is restored in place on `host`.

    Raises OutcomeUnknownError if another host has the VM too; RefusedError if the VM here is a
    different one, and a host that does not answer may have the checkpoint's.
    """
    others = await _elsewhere(manifest.vm, host)
    if homes := [name for name in others.given if name]:
        raise OutcomeUnknownError(
            f"'{manifest.vm}' is at home on {' and '.join([host.name, *homes])}",
            why="a migration between them was interrupted, or one of them is stale",
            remedy=f"run `vmckpt migrate --recover {manifest.vm}`, and see `vmckpt vm list`",
        )
    found = await read_identity(host, vm_dir(host.state_dir, manifest.vm))
    if others.silent and None not in (found, manifest.vm_id) and found != manifest.vm_id:
        raise _another(manifest.vm, host, others.silent)


async def require_meant_to_take(vm: Vm, location: StoreLocation, key: Key) -> None:
    """Check before `vm`'s host receives the secret of the encrypted store at `location`.

    Raises RefusedError if it is not the VM whose checkpoints are there, and a host that does not
    answer may have that one; and what opening the store raises.
    """
    identity = await read_identity(vm.host, vm.directory)
    await require_meant(vm.name, vm.host, identity, location, key)


async def require_meant(
    name: str, host: Host, identity: str | None, location: StoreLocation, key: Key
) -> None:
    """As `require_meant_to_take`, for a VM of that identity."""
    others = await _elsewhere(name, host)
    if not others.silent:
        return
    async with opened(location, key) as store:
        known = await in_thread(partial(_ids_of, store, name))
    if known and identity not in known:
        raise _another(name, host, others.silent)


def _ids_of(store: Store, vm: str) -> set[str]:
    """The UUIDs of all VMs of that name that have checkpoints in the store."""
    return {one.vm_id for one in store.catalogue().manifests if one.vm == vm and one.vm_id}


async def _elsewhere(name: str, host: Host) -> Answers[str]:
    """The other hosts that have a VM of that name; "" for those that have none."""

    async def ask(other: Host) -> str:
        is_home = await other.exists(vm_dir(other.state_dir, name).current)
        return other.name if is_home else ""

    return await ask_every((one for one in all_hosts() if one.name != host.name), ask)


def _another(name: str, host: Host, silent: list[VmckptError]) -> RefusedError:
    return RefusedError(
        f"'{name}' on {host.name} is not the VM that these checkpoints were taken of",
        why="its VM id differs, and the original may be on a host that does not answer: "
        + "; ".join(error.what for error in silent),
        remedy="try again when that host answers; if it is gone for good: vmckpt host rm",
    )
