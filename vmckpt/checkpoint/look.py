"""Looking into stores, and removing from them."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import NamedTuple

from vmckpt.checkpoint.operate import Entry, entries
from vmckpt.checkpoint.retention import Candidate, Rule, plan
from vmckpt.errors import RefusedError
from vmckpt.sequence.in_thread import in_thread
from vmckpt.store.open import open_store


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


async def differences(one: Entry, other: Entry) -> list[AreaDifference]:
    """How much of each area differs. Raises RefusedError when they are in two stores."""
    if one.place != other.place:
        raise RefusedError(
            "the two checkpoints are in two stores",
            why=f"{one.place} and {other.place}",
            remedy="copy one of them: vmckpt store copy",
        )
    return await in_thread(partial(_differences, one, other))


def _differences(one: Entry, other: Entry) -> list[AreaDifference]:
    sizes = {area.name: area.chunk_bytes for entry in (other, one) for area in entry.manifest.areas}
    with open_store(one.place) as store:
        found = store.diff(one.id, other.id)
    return [AreaDifference(name, len(chunks), sizes[name]) for name, chunks in found.items()]


async def verify(entry: Entry) -> int:
    """Read all of it: how many bytes. Raises DamagedError."""
    return await in_thread(partial(_verify, entry))


def _verify(entry: Entry) -> int:
    total = 0
    with open_store(entry.place) as store, store.read(entry.id) as point:
        for area in entry.manifest.areas:
            for _, contents in point.area(area.name).stream():
                total += len(contents)
        for blob in entry.manifest.blobs:
            total += len(point.blob(blob.name))
    return total


async def remove(found: Sequence[Entry]) -> None:
    """Remove them. Raises BusyError (one is being read)."""
    for place, those in groupby(sorted(found, key=lambda one: one.place), lambda one: one.place):
        await in_thread(partial(_remove, place, [one.id for one in those]))


def _remove(place: str, ids: list[str]) -> None:
    with open_store(place) as store:
        store.remove(ids)


async def prune(
    where: Iterable[str], vm: str, rule: Rule, tags: Mapping[str, str], *, apply: bool
) -> list[Decision]:
    """What the rule means for a VM's checkpoints that have the tags; done with `apply`."""
    found = [one for one in await entries(where, vm) if _has(one, tags)]
    candidates = [
        Candidate(one.id, one.manifest.created_unix_s, one.manifest.added_bytes) for one in found
    ]
    verdicts = plan(candidates, rule, now_unix_s=time.time())
    decisions = [Decision(one, *verdicts[one.id]) for one in found]
    if apply:
        await remove([one.entry for one in decisions if not one.keep])
    return decisions


def _has(entry: Entry, tags: Mapping[str, str]) -> bool:
    have = entry.facts.tags if entry.facts else {}
    return all(have.get(key) == value for key, value in tags.items())
