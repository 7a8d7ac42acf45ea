"""Whose checkpoints are meant by a VM's name, which several VMs may have. Pure."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from vmckpt.errors import NotFoundError, UsageError
from vmckpt.store.files.manifest import Manifest
from vmckpt.store.files.order import owners

if TYPE_CHECKING:
    from vmckpt.checkpoint.catalogue.catalogue import CatalogueEntry

# What `--vm-id` calls the checkpoints that were taken before VMs had UUIDs.
NONE = "none"


class Chosen(NamedTuple):
    """The checkpoints of one VM, and those of others of its name (and of none that is known)."""

    mine: list["CatalogueEntry"]
    others: list["CatalogueEntry"]


def of_vm(entries: Sequence["CatalogueEntry"], vm_id: str | None) -> Chosen:
    """The entries of the VM with this UUID; of None those that belong to no VM that is known."""
    whose = owners(one.manifest for one in entries)
    mine = [one for one in entries if whose[one.id] == vm_id]
    return Chosen(mine, [one for one in entries if whose[one.id] != vm_id])


def chosen(
    entries: Sequence["CatalogueEntry"], vm: str, here: Sequence[str | None], wanted: str | None
) -> Chosen:
    """Those of the VM that an operator means by `vm`.

    `here` are the UUIDs of the VMs of that name in the inventory (None: it has none yet), `wanted`
    is what `--vm-id` says. Raises UsageError when several could be meant, NotFoundError.
    """
    whose = owners(one.manifest for one in entries)
    known = sorted({vm_id or NONE for vm_id in whose.values()})
    if wanted is not None:
        matching = [one for one in known if one.startswith(wanted)]
        if len(matching) == 1:
            return of_vm(entries, None if matching[0] == NONE else matching[0])
        if not matching:
            raise NotFoundError(
                f"no VM '{vm}' with the id '{wanted}' has checkpoints",
                why=f"checkpoints of that name are of: {', '.join(known) or 'none'}",
                remedy="see `vm id` of: vmckpt checkpoint show CHECKPOINT",
            )
        known = matching
    elif len(set(here)) == 1:
        return of_vm(entries, here[0])
    if len(known) > 1:
        raise UsageError(
            f"'{vm}' is {len(known)} VMs",
            why=f"checkpoints of that name are of: {', '.join(known)}",
            remedy="say which one: --vm-id ID"
            + (f" (--vm-id {NONE}: taken before VMs had ids)" if NONE in known else ""),
        )
    return Chosen(list(entries), [])


def vm_labels(manifests: Sequence[Manifest]) -> dict[str, str]:
    """What to call the VM of each checkpoint: with its id where several have the name."""
    whose = owners(manifests)
    ids: dict[str, set[str | None]] = {}
    for one in manifests:
        ids.setdefault(one.vm, set()).add(whose[one.id])
    return {one.id: _label(one.vm, whose[one.id], ids[one.vm]) for one in manifests}


def _label(vm: str, vm_id: str | None, ids: set[str | None]) -> str:
    return vm if len(ids) == 1 else f"{vm} ({vm_id[:8] if vm_id else 'no id'})"
