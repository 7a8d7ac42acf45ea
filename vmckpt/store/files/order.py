"""The order in which checkpoints were taken, from reliable facts. Pure.

A checkpoint comes after its parent, and after all of its VM with a smaller sequence number. Hosts'
clocks decide only between checkpoints that neither rule orders.
"""

import heapq
from collections.abc import Iterable, Mapping
from itertools import pairwise

from vmckpt.store.files.manifest import Manifest


def in_order(manifests: Iterable[Manifest]) -> list[Manifest]:
    """The manifests, oldest first. Any input is valid: in a cycle of parents the clock decides."""
    every = {one.id: one for one in manifests}
    after: dict[str, list[str]] = {one: [] for one in every}
    waits_for = dict.fromkeys(every, 0)

    def before(first: str, second: str) -> None:
        after[first].append(second)
        waits_for[second] += 1

    for one in every.values():
        if one.parent in every:
            before(one.parent, one.id)
    for numbered in _numbered(every.values()).values():
        for first, second in pairwise(numbered):
            before(first.id, second.id)
    ready = [(one.created_unix_s, one.id) for one in every.values() if not waits_for[one.id]]
    heapq.heapify(ready)
    found: dict[str, Manifest] = {}
    while ready:
        _, next_id = heapq.heappop(ready)
        found[next_id] = every[next_id]
        for later in after[next_id]:
            waits_for[later] -= 1
            if not waits_for[later]:
                heapq.heappush(ready, (every[later].created_unix_s, later))
    rest = (one for one in every.values() if one.id not in found)
    return [*found.values(), *sorted(rest, key=lambda one: (one.created_unix_s, one.id))]


def owners(manifests: Iterable[Manifest]) -> Mapping[str, str | None]:
    """The UUID of each checkpoint's VM, by checkpoint id.

    A checkpoint taken before VMs had UUIDs belongs to the VM of the same name whose checkpoints
    descend from it, if there is only one; else to no known VM (None).
    """
    every = {one.id: one for one in manifests}
    found: dict[str, str | None] = {one.id: one.vm_id for one in every.values()}
    claims: dict[str, set[str]] = {}
    for one in every.values():
        if one.vm_id is None:
            continue
        older, seen = one.parent, set[str]()
        while older in every and older not in seen:
            ancestor = every[older]
            known = claims.setdefault(older, set())
            if ancestor.vm_id is not None or ancestor.vm != one.vm or one.vm_id in known:
                break
            known.add(one.vm_id)
            seen.add(older)
            older = ancestor.parent
    for old, vms in claims.items():
        if found[old] is None and len(vms) == 1:
            found[old] = next(iter(vms))
    return found


def of_vm(
    manifests: Iterable[Manifest], vm: str, vm_id: str | None, last: str | None
) -> list[Manifest]:
    """A VM's checkpoints, in the order given; `last` is the last one it knows of.

    Without a UUID, those of its name.
    """
    every = list(manifests)
    if vm_id is None:
        return [one for one in every if one.vm == vm]
    # As if there were one more checkpoint: so old ones belong to the VM before it takes one with
    # its UUID.
    next_one = Manifest("", vm, last, 0, 0, (), (), (), {}, vm_id)
    whose = owners([*every, next_one])
    return [one for one in every if whose[one.id] == vm_id]


def _numbered(manifests: Iterable[Manifest]) -> Mapping[str, list[Manifest]]:
    """Those with a sequence number, by VM, in that order."""
    found: dict[str, list[Manifest]] = {}
    for one in manifests:
        if one.vm_id is not None and one.sequence is not None:
            found.setdefault(one.vm_id, []).append(one)
    for those in found.values():
        those.sort(key=lambda one: (one.sequence, one.created_unix_s, one.id))
    return found
