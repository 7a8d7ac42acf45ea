"""Choose the checkpoints meant by a VM's name, which several VMs may share. Pure."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from vmckpt.errors import NotFoundError, UsageError
from vmckpt.store.files.manifest import Manifest
from vmckpt.store.files.order import owners

if TYPE_CHECKING:
    from vmckpt.checkpoint.catalogue.catalogue import CatalogueEntry

# The value of `--vm-id` for checkpoints taken before VMs had UUIDs.
NONE = "none"


class Chosen(NamedTuple):
    """One VM's checkpoints, and those of other or unknown VMs of the same name."""

    mine: list["CatalogueEntry"]
    others: list["CatalogueEntry"]


def of_vm(entries: Sequence["CatalogueEntry"], vm_id: str | None) -> Chosen:
    """The entries of the VM with this UUID; None: those of no known VM."""
    whose = owners(one.manifest for one in entries)
    mine = [one for one in entries if whose[one.id] == vm_id]
    return Chosen(mine, [one for one in entries if whose[one.id] != vm_id])


def chosen(
    entries: Sequence["CatalogueEntry"], vm: str, here: Sequence[str | None], wanted: str | None
) -> Chosen:
    """The checkpoints of the VM that the operator means by `vm`.

    `here` are the UUIDs of the inventory's VMs of that name (None: without a UUID yet), `wanted` is
    the value of `--vm-id`. Raises UsageError if the name is ambiguous, NotFoundError.
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
            f"'{vm}' is the name of {len(known)} VMs",
            why=f"checkpoints of that name are of: {', '.join(known)}",
            remedy="say which one: --vm-id ID"
            + (f" (--vm-id {NONE}: taken before VMs had ids)" if NONE in known else ""),
        )
    return Chosen(list(entries), [])


def vm_labels(manifests: Sequence[Manifest]) -> dict[str, str]:
    """A label for each checkpoint's VM: with its UUID if several VMs share the name."""
    whose = owners(manifests)
    ids: dict[str, set[str | None]] = {}
    for one in manifests:
        ids.setdefault(one.vm, set()).add(whose[one.id])
    return {one.id: _label(one.vm, whose[one.id], ids[one.vm]) for one in manifests}


def _label(vm: str, vm_id: str | None, ids: set[str | None]) -> str:
    return vm if len(ids) == 1 else f"{vm} ({vm_id[:8] if vm_id else 'no id'})"
