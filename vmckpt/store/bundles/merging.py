"""gc: merge small packs into bundles, and rewrite worn bundles.

Merging only adds: once a bundle is published, each pack in it is in two objects. Which of them is
removed is decided as for everything that gc removes (`store/collect.py`), from what is stored. So a
gc killed at any point leaves nothing that the next one does not understand.
"""

import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from vmckpt.errors import BusyError, RefusedError
from vmckpt.store.backends.backend import MissingError
from vmckpt.store.backends.cached import uncached
from vmckpt.store.bundles.bundled import Holdings
from vmckpt.store.bundles.layout import (
    BUNDLES,
    MOST_BYTES,
    MOST_PACKS,
    Bundle,
    BundledPack,
    Whole,
    rank_of,
)
from vmckpt.store.errors import DamagedError, UnreadableError
from vmckpt.store.files.config import MERGED, allow_bundles
from vmckpt.store.files.pack import Pack
from vmckpt.store.opened import Opened
from vmckpt.store.store import Store, reading

# Smaller packs are merged once there are this many; merging few does not pay.
SMALL_BYTES, MANY = 4 << 20, 16
# A bundle is rewritten when more than this share of it, or this many of its packs, are unused.
WORTH_RATIO, MANY_UNUSED = 0.2, 16


class Copies(NamedTuple):
    """One pack in two objects; the copy in `better` is intact, or identical to that in `other`."""

    pack: str
    other: str
    better: str


@dataclass(frozen=True, slots=True)
class Merge:
    """Packs to put into one bundle, each with the object to read it from."""

    packs: Sequence[tuple[str, str]]


def plan_merges(
    held: Holdings,
    kept: Mapping[str, int],
    proven: frozenset[Copies],
    *,
    changing: Collection[str],
    faulty: Iterable[str],
    age: Callable[[str], int],
) -> list[Merge]:
    """The merges that pay off. Pure.

    `kept` packs, with sizes, are needed; `changing` ones have, or will have, other generations;
    `proven`: see `copies`. `faulty` bundles have a damaged list. Packs are grouped in the order of
    their `age`.
    """

    def live(bundle: Bundle) -> list[str]:
        kept_here = [name for name in bundle.members if name in kept]
        return [n for n in kept_here if not superseded(n, bundle.name, held, proven)]

    loose = [
        name
        for name, size in held.loose.items()
        if name in kept
        and size <= SMALL_BYTES
        and name not in changing
        and not superseded(name, name, held, proven)
    ]
    sources = {name: name for name in loose} if len(loose) >= MANY else {}
    bundles = {name: live(bundle) for name, bundle in held.bundles.items()}
    worn = {name for name, packs in bundles.items() if _is_worn(held.bundles[name], packs)} | set(
        faulty
    )
    small = {n for n in bundles.keys() - worn if _is_small(held.bundles[n])}
    for name in worn | (small if len(small) >= MANY else set()):
        sources |= dict.fromkeys(bundles[name], name)
    ordered = sorted(sources, key=lambda name: (age(name), name))
    merges = [Merge([(n, sources[n]) for n in part]) for part in _parts(ordered, kept)]
    # The remaining separate packs wait for more.
    return [one for one in merges if len(one.packs) >= MANY or any(n != s for n, s in one.packs)]


def superseded(
    pack: str, holder: str, held: Holdings, proven: Iterable[Copies], gone: Iterable[str] = ()
) -> bool:
    """Whether an object's copy of a pack is not needed: another, which is not `gone`, keeps it."""
    holders = held.holders(pack)
    if holder not in holders:
        return False
    before = holders[: holders.index(holder)]
    return any(Copies(pack, holder, one) in proven for one in before if one not in gone)


def copies(store: Store, held: Holdings, kept: Iterable[str]) -> frozenset[Copies]:
    """Of packs in several objects, the copies of which one may be removed. Raises StorageError."""

    def compare(pack: str) -> list[Copies]:
        best, *others = held.holders(pack)
        read = store.opened.backend.read_held
        with suppress(MissingError, UnreadableError):  # another gc has removed it
            data = read(pack, best)
            if whole(store.opened, pack, data) is None:
                others = [other for other in others if read(pack, other) == data]
            return [Copies(pack, other, best) for other in others]
        return []

    several = [pack for pack in kept if len(held.holders(pack)) > 1]
    with uncached(store.opened.backend):
        found = store.opened.at_once(compare, several)
    return frozenset(one for some in found for one in some)


def may_merge(store: Store) -> bool:
    """Whether this client may merge packs: it may remove objects, and no older version is active.

    The gc that raises the store to format 3 merges nothing yet, nor does a gc before the first
    bundle while a checkpoint is being read: an older version may have opened the store before, and
    would not find merged packs. Raises BusyError, StorageError.
    """
    backend = store.opened.backend
    if not backend.knows_bundles:
        return False
    try:
        backend.remove(f"{BUNDLES}/{secrets.token_hex(16)}-0")
        if store.config.format < MERGED:
            allow_bundles(backend)
            return False
    except RefusedError:
        return False  # an append-only client: the owner's gc does it
    return bool(backend.list_holdings().bundles) or not _are_read(store)


def _are_read(store: Store) -> bool:
    """Whether any checkpoint is being read."""

    def is_read(checkpoint_id: str) -> bool:
        try:
            with store.opened.backend.hold(reading(checkpoint_id), shared=False):
                return False
        except BusyError:
            return True

    return any(store.opened.at_once(is_read, store.ids()))


def merge(store: Store, held: Holdings, merges: Sequence[Merge]) -> int:
    """Publish bundles; returns how many. Raises StorageError."""
    backend, made = store.opened.backend, 0
    for one in merges:
        packs = [pack for pack in _read(store.opened, held, one) if pack is not None]
        holders = {holder for name, _ in one.packs for holder in held.holders(name)}
        above = max((rank_of(one) for one in holders if one in held.bundles), default=0)
        if packs:
            backend.files.write(packs, above)
            made += 1
    return made


def whole(opened: Opened, name: str, data: bytes) -> Whole | None:
    """A pack with every box verified; None: it is damaged."""
    pack_id, _, generation = name.rpartition("/")[2].partition("-")
    try:
        header = opened.packs.header.read(data, name)
        seal = opened.packs.sealer.file(header, name)
        pack = Pack(_Bytes(data), bytes.fromhex(pack_id), int(generation), seal)
        pack.require_hashes()
        for frame in range(len(pack.table.counts)):
            pack.frame(frame)
    except DamagedError:
        return None
    return Whole(name, data, pack.frame_bytes)


def _read(opened: Opened, held: Holdings, merge: Merge) -> list[Whole | None]:
    """Read the packs as stored. A damaged pack in a bundle is moved unchanged."""

    def read(copy: tuple[str, str]) -> Whole | None:
        name, holder = copy
        try:
            data = opened.backend.read_held(name, holder)
            found = whole(opened, name, data)
            if found is None:
                with uncached(opened.backend):
                    again = opened.backend.read_held(name, holder)
                found = whole(opened, name, again)
                bundle = held.bundles.get(holder)
                if found is None and bundle is not None and again == data:
                    found = _as_it_is(data, bundle.members[name])
        except (MissingError, UnreadableError):  # another gc has moved it: leave it
            return None
        return found

    return opened.at_once(read, merge.packs)


def _as_it_is(data: bytes, member: BundledPack) -> Whole | None:
    return Whole(member.name, data, member.frame_bytes) if len(data) == member.size else None


def _is_small(bundle: Bundle) -> bool:
    return bundle.size < MOST_BYTES // 4 and len(bundle.members) < MOST_PACKS // 4


def _is_worn(bundle: Bundle, live: Sequence[str]) -> bool:
    used = sum(bundle.members[name].size for name in live)
    unused = len(bundle.members) - len(live)
    return bool(live) and (
        bundle.fault is not None
        or unused >= MANY_UNUSED
        or bundle.size - used > bundle.size * WORTH_RATIO
    )


def _parts(names: Sequence[str], sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Group packs by the size of a bundle, in order."""
    part, total = list[str](), 0
    for name in names:
        if part and (total + sizes[name] > MOST_BYTES or len(part) >= MOST_PACKS):
            yield part
            part, total = [], 0
        part.append(name)
        total += sizes[name]
    if part:
        yield part


class _Bytes:
    """A pack in memory, read like an object."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        return self._data[start : None if length is None else start + length]

    def read_end(self, name: str, length: int) -> tuple[bytes, int]:
        size = len(self._data)
        return self._data[max(0, size - length) :], size
