"""Inspect stores, and remove checkpoints from them."""

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from vmckpt.checkpoint.catalogue.catalogue import CatalogueEntry, Unreadable
from vmckpt.checkpoint.catalogue.location import Key, StoreLocation, opened
from vmckpt.checkpoint.catalogue.retention import (
    Candidate,
    RetentionRule,
    RetentionVerdict,
    contradictions,
    plan,
)
from vmckpt.errors import BusyError, NotFoundError, RefusedError
from vmckpt.sequence.in_thread import in_thread
from vmckpt.store.backends.cached import uncached
from vmckpt.store.files.order import in_order
from vmckpt.store.files.pins import pinned_error
from vmckpt.store.store import Store


class AreaDifference(NamedTuple):
    """The number of chunks of one area that differ."""

    name: str
    chunks: int
    chunk_bytes: int


@dataclass(frozen=True, slots=True)
class RuleEffect:
    """The effect of a rule on one checkpoint."""

    entry: CatalogueEntry
    keep: bool
    why: str


class Pruned(NamedTuple):
    """The effect of a rule on a VM's checkpoints, oldest first, and any clock problems."""

    decisions: list[RuleEffect]
    clocks: str


async def differences(
    one: CatalogueEntry, other: CatalogueEntry, key: Key = None
) -> list[AreaDifference]:
    """How much of each area differs. Raises RefusedError if no store has both checkpoints."""
    there = [location.label for location in other.locations]
    both = [location for location in one.locations if location.label in there]
    if not both:
        raise RefusedError(
            "the two checkpoints are in two stores",
            why=f"{one.location.label} and {other.location.label}",
            remedy="copy one of them: "
            f"vmckpt store copy {other.location.label} {one.id[:12]} --store {one.location.label}",
        )
    async with opened(both[0], key) as store:
        found = await in_thread(partial(store.diff, one.id, other.id))
    sizes = {area.name: area.chunk_bytes for entry in (other, one) for area in entry.manifest.areas}
    return [AreaDifference(name, len(chunks), sizes[name]) for name, chunks in found.items()]


async def verify(entry: CatalogueEntry, key: Key = None) -> dict[str, int]:
    """Read a checkpoint completely in every store that has it; returns bytes by store.

    Reads the stores themselves, never the local cache of object storage. Raises DamagedError.
    """
    found = {}
    for location in entry.locations:
        async with opened(location, key) as store:
            found[location.label] = await in_thread(partial(_verify, store, entry))
    return found


def _verify(store: Store, entry: CatalogueEntry) -> int:
    total = 0
    with uncached(store.opened.backend), store.read(entry.id) as point:
        for area in entry.manifest.areas:
            for _, contents in point.area(area.name).stream():
                total += len(contents)
        for blob in entry.manifest.blobs:
            total += len(point.blob(blob.name))
    return total


async def remove(found: Sequence[CatalogueEntry], key: Key = None) -> None:
    """Remove checkpoints from every store that has them.

    Raises BusyError (one is being read), RefusedError (one is pinned in any store).
    """
    for one in found:
        if one.pins:
            raise pinned_error(one.name, one.pins)
    await _remove([(location, one.id) for one in found for location in one.locations], key)


async def remove_unreadable(found: Sequence[Unreadable], key: Key = None) -> None:
    """Remove checkpoints that cannot be read. Raises BusyError, RefusedError (one is pinned)."""
    await _remove([(one.location, one.id) for one in found], key)


async def _remove(where: Iterable[tuple[StoreLocation, str]], key: Key) -> None:
    removed = set[str]()
    for location, those in _by_store(where):
        async with opened(location, key) as store:
            # A directory that hosts share is a store of each of them.
            gone = removed - set(await in_thread(store.ids)) if removed else set()
            await in_thread(partial(store.remove, [one for one in those if one not in gone]))
        removed |= set(those)


async def _remove_unread(found: Sequence[CatalogueEntry], key: Key) -> set[str]:
    """Remove those that are not being read; returns the ids of the others.

    Raises RefusedError if one is pinned.
    """
    read = set[str]()
    for location, those in _by_store(
        (location, one.id) for one in found for location in one.locations
    ):
        async with opened(location, key) as store:
            read |= await in_thread(partial(_remove_each, store, those))
    return read


def _remove_each(store: Store, ids: Sequence[str]) -> set[str]:
    with suppress(BusyError, NotFoundError):  # then one by one
        store.remove(ids)  # all at once if possible: object storage needs requests for each
        return set()
    read = set[str]()
    for one in ids:
        try:
            with suppress(NotFoundError):  # another command has removed it
                store.remove([one])
        except BusyError:
            read.add(one)
    return read


def _by_store(
    where: Iterable[tuple[StoreLocation, str]],
) -> Iterable[tuple[StoreLocation, list[str]]]:
    found: dict[str, tuple[StoreLocation, list[str]]] = {}
    for location, checkpoint_id in where:
        found.setdefault(location.label, (location, []))[1].append(checkpoint_id)
    return found.values()


async def prune(
    entries: Sequence[CatalogueEntry],
    rule: RetentionRule,
    tags: Mapping[str, str],
    key: Key,
    *,
    apply: bool,
    just_taken: Collection[str] = (),
) -> Pruned:
    """Evaluate the rule for one VM's checkpoints with the given tags; `apply` removes.

    Pinned checkpoints are kept and do not count towards the rule. One that is being read stays for
    now, but does not cause another to be kept.
    """
    there = {one.id: one for one in entries}
    ordered = in_order(one.manifest for one in entries)
    found = [there[one.id] for one in ordered if _has(there[one.id], tags)]
    candidates = [
        Candidate(one.id, one.manifest.created_unix_s, one.manifest.added_bytes)
        for one in found
        if not one.pins
    ]
    now_unix_s = time.time()
    verdicts = {
        one.id: RetentionVerdict(True, f"pinned: {one.pins[0].in_words}")
        for one in found
        if one.pins
    } | dict(plan(candidates, rule, now_unix_s=now_unix_s, just_taken=just_taken))
    if apply:
        unwanted = [one for one in found if not verdicts[one.id].keep]
        read = await _remove_unread(unwanted, key)
        verdicts |= dict.fromkeys(read, RetentionVerdict(True, "it is being read: not removed yet"))
    decisions = [RuleEffect(one, *verdicts[one.id]) for one in found]
    wrong = contradictions(candidates, now_unix_s=now_unix_s)
    return Pruned(decisions, _clocks([there[one.id] for one in wrong]))


def _clocks(wrong: Sequence[CatalogueEntry]) -> str:
    """A warning if hosts' clocks disagree, else an empty string."""
    if not wrong:
        return ""
    hosts = sorted({one.facts.host if one.facts else "?" for one in wrong})
    names = ", ".join(one.name for one in wrong[:3]) + (", ..." if len(wrong) > 3 else "")
    return (
        f"the clocks of hosts disagree: the times of {len(wrong)} checkpoints ({names}; taken on "
        f"{', '.join(hosts)}) contradict the order in which they were taken, which counts instead"
    )


def _has(entry: CatalogueEntry, tags: Mapping[str, str]) -> bool:
    have = entry.facts.tags if entry.facts else {}
    return all(have.get(key) == value for key, value in tags.items())
