"""Return the VMs of a group to its cut together: all of them run from it, or none does."""

from collections.abc import Callable, Mapping
from typing import Any

from vmckpt.checkpoint.operate import require_new_names, restoring
from vmckpt.checkpoint.restore.requests import RestoreOptions
from vmckpt.drivers.find import require_own, restores_on
from vmckpt.group.groups import Group, require_whole
from vmckpt.group.head import restore
from vmckpt.group.services import at_work
from vmckpt.hosts.host import Host
from vmckpt.sequence.steps import all_of
from vmckpt.store.sealing.keys import KeySource


async def homes(group: Group, tell: Callable[[str], None]) -> dict[str, Host]:
    """The host on which each VM of the group is restored; see `drivers.find.restores_on`."""
    found = await all_of(restores_on(entry, tell, copy=False) for entry in group.entries.values())
    return dict(zip(group.entries, found, strict=True))


async def restore_group(
    group: Group,
    hosts: Mapping[str, Host],
    options: RestoreOptions,
    tell: Callable[[str], None],
    key: KeySource | None = None,
) -> dict[str, Any]:
    """Restore each on its host of `hosts`; returns once all guests run and are set up.

    The names of new VMs are checked again once the jobs hold them. Raises the reason against it for
    any VM: then no restored guest runs, and the existing ones continue.
    """
    require_whole(group)
    if options.in_place:
        await all_of(require_own(vm, hosts[vm]) for vm in group.entries)
    works = await all_of(
        restoring(hosts[vm], entry, options, key) for vm, entry in group.entries.items()
    )
    works = [work._replace(held_s=0.0) for work in works]

    async def require_still_unused() -> None:
        await all_of(require_new_names(work) for work in works)

    async with at_work(works) as (head, _):
        results = await restore(head, tell, require_still_unused)
    return {"group": group.id, "name": group.name, "members": results}
