"""The groups, derived from the records in their checkpoints.

A group is complete while all its checkpoints exist in any store; an incomplete one is listed as
such, and cannot be restored.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from vmckpt.checkpoint.catalogue.catalogue import CatalogueEntry
from vmckpt.errors import NotFoundError, RefusedError, UsageError


@dataclass(frozen=True, slots=True)
class Group:
    """Checkpoints that were taken together: their ids by VM, and those that exist."""

    id: str
    name: str
    members: Mapping[str, str]
    entries: Mapping[str, CatalogueEntry]

    @property
    def missing(self) -> list[str]:
        """The VMs whose checkpoint is missing."""
        return [vm for vm in self.members if vm not in self.entries]


def groups(entries: Iterable[CatalogueEntry]) -> list[Group]:
    """The groups of which any checkpoint exists, oldest first."""
    found: dict[str, Group] = {}
    by_id = {entry.id: entry for entry in entries}
    for entry in by_id.values():
        message = entry.facts.group if entry.facts else None
        if message is None or message["id"] in found:
            continue
        there = {vm: by_id[one] for vm, one in message["members"].items() if one in by_id}
        found[message["id"]] = Group(message["id"], message["name"], message["members"], there)
    return list(found.values())


def find(entries: Iterable[CatalogueEntry], text: str) -> Group:
    """The group with that name, id, or id prefix (4 or more). Raises NotFoundError, UsageError."""
    every = groups(entries)
    found = [one for one in every if text in (one.id, one.name)]
    found = found or [one for one in every if len(text) >= 4 and one.id.startswith(text)]
    if len(found) > 1:
        raise UsageError(
            f"'{text}' matches {len(found)} groups",
            why=", ".join(f"{one.id} of {', '.join(one.members)}" for one in found),
            remedy="write its id",
        )
    if not found:
        raise NotFoundError(
            f"there is no group '{text}'",
            why="no checkpoint in the stores that were searched belongs to it",
            remedy="see `vmckpt checkpoint list`, or name its store: --store",
        )
    return found[0]


def require_whole(group: Group) -> None:
    """Raises RefusedError if one of its checkpoints is missing."""
    if group.missing:
        raise RefusedError(
            f"group '{group.name}' is no longer complete",
            why=f"the checkpoint of {', '.join(group.missing)} is in no store that answers",
            remedy="make its store available, or restore the others one by one: they are "
            "ordinary checkpoints",
        )
