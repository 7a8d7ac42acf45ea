"""Looking into stores, and removing from them."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from vmckpt.checkpoint.catalogue import Entry
from vmckpt.checkpoint.place import Key, Place, opened
from vmckpt.checkpoint.retention import Candidate, Rule, Verdict, plan
from vmckpt.errors import RefusedError
from vmckpt.sequence.in_thread import in_thread
from vmckpt.store.pins import pinned_error
from vmckpt.store.store import Store


class AreaDifference(NamedTuple):
    """So many chunks of one area differ."""

    name: str
    chunks: int
    chunk_bytes: int


@dataclass(frozen=True, slots=True)
class Decision:
    """What a rule means for one checkpoint."""

    entry: Entry
    keep: bool
    why: str


async def differences(one: Entry, other: Entry, key: Key = None) -> list[AreaDifference]:
    """How much of each area differs. Raises RefusedError when no store has both."""
    there = [place.label for place in other.places]
    both = [place for place in one.places if place.label in there]
    if not both:
        raise RefusedError(
            "the two checkpoints are in two stores",
            why=f"{one.place.label} and {other.place.label}",
            remedy="copy one of them: "
            f"vmckpt store copy {other.place.label} {one.id[:12]} --store {one.place.label}",
        )
    async with opened(both[0], key) as store:
        found = await in_thread(partial(store.diff, one.id, other.id))
    sizes = {area.name: area.chunk_bytes for entry in (other, one) for area in entry.manifest.areas}
    return [AreaDifference(name, len(chunks), sizes[name]) for name, chunks in found.items()]


async def verify(entry: Entry, key: Key = None) -> dict[str, int]:
    """Read all of it, in every store that has it: how many bytes, by store. Raises DamagedError."""
    found = {}
    for place in entry.places:
        async with opened(place, key) as store:
            found[place.label] = await in_thread(partial(_verify, store, entry))
    return found


def _verify(store: Store, entry: Entry) -> int:
    total = 0
    with store.read(entry.id) as point:
        for area in entry.manifest.areas:
            for _, contents in point.area(area.name).stream():
                total += len(contents)
        for blob in entry.manifest.blobs:
            total += len(point.blob(blob.name))
    return total


async def remove(found: Sequence[Entry], key: Key = None) -> None:
    """Remove them from every store that has them.

    Raises BusyError (one is being read), RefusedError (one is pinned, in whatever store).
    """
    for one in found:
        if one.pins:
            raise pinned_error(one.name, one.pins)
    ids: dict[str, tuple[Place, list[str]]] = {}
    for one in found:
        for place in one.places:
            ids.setdefault(place.label, (place, []))[1].append(one.id)
    for place, those in ids.values():
        async with opened(place, key) as store:
            await in_thread(partial(store.remove, those))


async def prune(
    entries: Sequence[Entry], rule: Rule, tags: Mapping[str, str], key: Key, *, apply: bool
) -> list[Decision]:
    """What the rule means for a VM's checkpoints that have the tags; done with `apply`.

    Pinned ones are kept, and the rule is for the others: they count for nothing in it.
    """
    found = [one for one in entries if _has(one, tags)]
    candidates = [
        Candidate(one.id, one.manifest.created_unix_s, one.manifest.added_bytes)
        for one in found
        if not one.pins
    ]
    verdicts = {
        one.id: Verdict(True, f"pinned: {one.pins[0].in_words}") for one in found if one.pins
    } | dict(plan(candidates, rule, now_unix_s=time.time()))
    decisions = [Decision(one, *verdicts[one.id]) for one in found]
    if apply:
        await remove([one.entry for one in decisions if not one.keep], key)
    return decisions


def _has(entry: Entry, tags: Mapping[str, str]) -> bool:
    have = entry.facts.tags if entry.facts else {}
    return all(have.get(key) == value for key, value in tags.items())
