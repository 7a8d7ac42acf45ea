"""The order in which checkpoints were taken, by what cannot be wrong. Pure.

A checkpoint comes after its parent, and after all of its VM that have a smaller sequence number.
Clocks of hosts decide only between checkpoints of which neither says anything.
"""

import heapq
from collections.abc import Iterable, Mapping
from itertools import pairwise

from vmckpt.store.files.manifest import Manifest


def in_order(manifests: Iterable[Manifest]) -> list[Manifest]:
    """The manifests, oldest first. Any input will do: in a ring of parents the clock decides."""
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
    """Which VM each checkpoint is of: the VM's UUID, by the checkpoint's id.

    One that was taken before VMs had UUIDs belongs to the VM of the same name whose checkpoints
    descend from it, if there is only one; else to none that is known (None).
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
    """The checkpoints of a VM, whose last one is `last` for all that it knows, in the order given.

    Without a UUID those of its name.
    """
    every = list(manifests)
    if vm_id is None:
        return [one for one in every if one.vm == vm]
    # As if there were one more: its old ones are its own before it has taken one with its UUID.
    next_one = Manifest("", vm, last, 0, 0, (), (), (), {}, vm_id)
    whose = owners([*every, next_one])
    return [one for one in every if whose[one.id] == vm_id]


def _numbered(manifests: Iterable[Manifest]) -> Mapping[str, list[Manifest]]:
    """Those with a sequence number, by VM, in its order."""
    found: dict[str, list[Manifest]] = {}
    for one in manifests:
        if one.vm_id is not None and one.sequence is not None:
            found.setdefault(one.vm_id, []).append(one)
    for those in found.values():
        those.sort(key=lambda one: (one.sequence, one.created_unix_s, one.id))
    return found
