"""check: verify a store, either every byte or a part."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vmckpt.errors import StorageError
from vmckpt.store.backends.backend import MissingError
from vmckpt.store.backends.cached import uncached
from vmckpt.store.bundles.bundled import Holdings
from vmckpt.store.bundles.layout import BUNDLES, is_bundle
from vmckpt.store.damage.records import DAMAGED, damage, named
from vmckpt.store.damage.subset import EVERYTHING, Subset
from vmckpt.store.errors import DamagedError, UnreadableError, damaged
from vmckpt.store.files.checkpoint_file import CHECKPOINTS, MAPS, AreaMap, Maps
from vmckpt.store.files.maps import packs_of, slots_of
from vmckpt.store.files.pack import PACKS, Hashes, Numbers, Pack, every, pack_name, parsed_name
from vmckpt.store.files.pins import damaged_pins
from vmckpt.store.index import Index
from vmckpt.store.keyring import restore_copies
from vmckpt.store.store import Store, is_id
from vmckpt.store.transaction import PATIENCE_S, WRITERS

_FOLDERS = (BUNDLES, CHECKPOINTS, MAPS, PACKS, DAMAGED)


@dataclass(frozen=True, slots=True)
class StoreFinding:
    """Something wrong with one object of a store."""

    name: str
    why: str


@dataclass(slots=True)
class CheckReport:
    """What was checked, and what is wrong. `lost` checkpoints can no longer be restored intact."""

    checkpoints: int = 0
    packs: int = 0
    # The number of packs whose content was read completely.
    packs_read: int = 0
    # Whether something could not be read or found this time, but may be later.
    unread: bool = False
    # False: the location takes no damage records (an exported file, or read-only).
    noted: bool = True
    read_bytes: int = 0
    findings: list[StoreFinding] = field(default_factory=list)
    lost: dict[str, list[str]] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings and not self.lost


def check(
    store: Store,
    progress: Callable[[int, int], None] = lambda done, total: None,
    subset: Subset = EVERYTHING,
) -> CheckReport:
    """Check a store, and record in it which chunks are damaged: see `damage/records.py`.

    Damaged or missing copies of the config are rewritten from an intact one. The check continues
    after each fault; only gc has to wait for its end. `subset`: the packs whose content is read;
    the rest of the store, with all checkpoints and maps, is always checked. `progress` receives
    bytes done and the total. Raises StorageError, BusyError.
    """
    backend = store.opened.backend
    with backend.hold(WRITERS, shared=True, wait_s=PATIENCE_S), uncached(backend):
        return _Check(store, progress, subset).run()


class _Check:
    def __init__(self, store: Store, progress: Callable[[int, int], None], subset: Subset) -> None:
        self._opened, self._store, self._progress = store.opened, store, progress
        self._subset = subset
        self._report = CheckReport()
        # The readable slots of each pack; None if all of it is lost.
        self._good: dict[bytes, Numbers | None] = {}
        # The packs needed by checkpoints that can be read.
        self._needed: set[bytes] = set()
        self._total = 0
        # Why needed objects may exist although they were not found.
        self._unread: StorageError | None = None
        self._names_there: Index | None = None

    def run(self) -> CheckReport:
        report, backend = self._report, self._opened.backend
        checkpoints = self._store.ids()
        sizes = {folder: backend.names(folder) for folder in _FOLDERS}
        self._opened.records.refresh()
        for name, why in restore_copies(self._store):
            self._found(name, why)
        self._strangers(sizes)
        newest = self._opened.packs.list_again()
        held = backend.list_holdings()
        self._unread = backend.unread()
        report.unread |= self._unread is not None
        # Older generations in a bundle, which gc has rewritten since: nothing reads them.
        packs = [
            (pack_id, generation, size)
            for pack_id, generation, size in every(backend)
            if newest.get(pack_id, (generation, 0))[0] == generation
            or pack_name(pack_id, generation) in held.loose
        ]
        chosen = self._subset.choose([pack_id for pack_id, _, _ in packs])
        self._total = sum(size for pack_id, _, size in packs if pack_id in chosen)
        self._total += sum(sum(sizes[folder].values()) for folder in (CHECKPOINTS, MAPS))
        for pack_id, generation, size in packs:
            whole = pack_id in chosen
            good = self._pack(pack_id, generation) if whole else self._table(pack_id, generation)
            if newest.get(pack_id, (generation, 0))[0] == generation:
                self._good[pack_id] = good
            report.packs += 1
            report.packs_read += whole
            self._read(size if whole else 0)
        for name, error in self._opened.records.unreadable.items():
            self._found(f"{DAMAGED}/{name}", error)
        for name, size in sizes[BUNDLES].items():
            self._bundle(f"{BUNDLES}/{name}", size)
        for name, size in sizes[MAPS].items():
            self._base(name)
            self._read(size)
        for name, why in damaged_pins(self._opened).items():
            self._found(name, why)
        for checkpoint_id in checkpoints:
            self._checkpoint(checkpoint_id)
            self._read(sizes[CHECKPOINTS].get(checkpoint_id, 0))
            report.checkpoints += 1
        self._forget_unneeded(held)
        return report

    def _strangers(self, sizes: dict[str, dict[str, int]]) -> None:
        known = {f"{PACKS}/{name}" for name in sizes[PACKS]} - {
            pack_name(pack_id, generation) for pack_id, generation, _ in every(self._opened.backend)
        }
        for name in sorted(known):
            self._found(name, "it is not a pack")
        for name in sorted(sizes[BUNDLES]):
            if not is_bundle(name):
                self._found(f"{BUNDLES}/{name}", "nothing of a store is called so")
        for folder in (CHECKPOINTS, MAPS, DAMAGED):
            for name in sorted(sizes[folder]):
                if not is_id(name):
                    self._found(f"{folder}/{name}", "nothing of a store is called so")

    def _pack(self, pack_id: bytes, generation: int) -> Numbers | None:
        """Check a pack; returns the readable slots."""
        name = pack_name(pack_id, generation)
        try:
            pack = self._opened.packs.open(pack_id, generation)
        except MissingError:
            return None
        except DamagedError as exc:
            self._found(name, exc)
            return None
        table = pack.table
        names = np.zeros((table.slot_count, 2), dtype="<u8")
        good = np.zeros(table.slot_count, dtype=bool)
        found = self._opened.pool.map(self._frame, _each(pack))
        for frame, hashes in enumerate(found):
            if isinstance(hashes, DamagedError):
                self._found(name, hashes)
                continue
            first = int(table.firsts[frame])
            slots = table.slots[first : first + int(table.counts[frame])]
            names[slots] = np.frombuffer(hashes, dtype="<u8").reshape(-1, 2)
            good[slots] = True
        self._names(name, pack, names, good)
        known = self._opened.records.slots(pack_id, generation)
        if gone := int(np.sum(~table.has(known))):
            self._found(name, f"{gone} chunks were damaged when gc rewrote it")
        if bad := table.slots[~good[table.slots]].tolist():
            noted = self._opened.records.note([damage(pack, np.array(bad))])
            self._report.noted &= noted
        return np.flatnonzero(good)

    def _table(self, pack_id: bytes, generation: int) -> Numbers | None:
        """Check only a pack's tables; returns its slots, except known damage."""
        try:
            pack = self._opened.packs.open(pack_id, generation)
        except MissingError:
            return None
        except DamagedError as exc:
            self._found(pack_name(pack_id, generation), exc)
            return None
        try:
            pack.require_hashes()
        except (DamagedError, MissingError) as exc:
            self._found(pack.name, _why(exc))
        bad = self._opened.records.slots(pack_id, generation)
        if len(bad):
            self._found(pack.name, f"{len(bad)} chunks were found to be damaged before")
        return np.setdiff1d(pack.table.slots, bad)

    def _names(self, name: str, pack: Pack, names: Hashes, good: NDArray[np.bool_]) -> None:
        """Check that readable chunks match their names. Others are not `good`: new checkpoints find
        chunks by name, and would reuse them.
        """
        try:
            hashes = pack.stored_hashes()
        except (DamagedError, MissingError) as exc:
            self._found(name, _why(exc))
            return
        gone = np.ones(len(good), dtype=bool)
        gone[pack.table.slots] = False
        wrong = np.flatnonzero(np.any(names != hashes, axis=1) & (good | gone))
        if len(wrong):
            self._found(name, f"chunks {wrong.tolist()} are not what their names say")
            good[wrong] = False

    def _frame(self, position: tuple[Pack, int]) -> bytes | DamagedError:
        pack, frame = position
        try:
            data = pack.frame(frame)
        except DamagedError as exc:
            return exc
        except MissingError:
            return damaged(f"{pack.name} is missing", "it was removed during the check")
        return self._opened.sealer.hashes(memoryview(data), pack.table.chunk_bytes)

    def _bundle(self, name: str, size: int) -> None:
        """Check a bundle's lists; its packs are checked like all others."""
        with suppress(MissingError):
            if is_bundle(name.rpartition("/")[2]):
                for why in self._opened.backend.files.faults(name, size):
                    self._found(name, why)

    def _forget_unneeded(self, held: Holdings) -> None:
        """Unneeded packs stay in a bundle for a while: ignore damage of them."""
        unneeded = {
            name
            for name in held.within.keys() - held.loose.keys()
            if (parsed := parsed_name(name)) and parsed[0] not in self._needed
        }
        findings = self._report.findings
        self._report.findings = [one for one in findings if one.name not in unneeded]

    def _base(self, name: str) -> None:
        if not is_id(name):
            return
        try:
            self._opened.files.read_base(bytes.fromhex(name))
        except DamagedError as exc:
            self._found(f"{MAPS}/{name}", exc)

    def _checkpoint(self, checkpoint_id: str) -> None:
        try:
            _, maps = self._opened.files.read_all(checkpoint_id)
        except MissingError:
            return  # removed, meanwhile
        except DamagedError as exc:
            # Whether a later read succeeds does not matter to other checkpoints.
            self._found(f"{CHECKPOINTS}/{checkpoint_id}", exc.why)
            self._lost(checkpoint_id, exc.what)
            return
        for name, area in maps.areas.items():
            try:
                missing = self._missing(area, maps)
            except DamagedError as exc:  # of a pack that was readable before
                self._lost(checkpoint_id, f"{name}: {exc.what}: {exc.why}")
                continue
            if missing:
                self._lost(checkpoint_id, f"{name}: {missing} chunks are damaged or missing")
        needed = _packs_in(maps)
        self._needed |= needed
        absent = needed - self._good.keys()
        why = f": {self._unread.what}: {self._unread.why}" if self._unread else ""
        for pack in sorted(absent):
            text = f"checkpoint {checkpoint_id} needs it: missing{why}"
            self._found(f"{PACKS}/{pack.hex()}", text)

    def _missing(self, area: AreaMap, maps: Maps) -> int:
        total, packs = 0, packs_of(area.refs)
        for number in np.unique(packs).tolist():
            if number >= 0:
                slots = slots_of(area.refs[packs == number])
                good = self._good.get(maps.packs[number])
                if good is None or not self._fits(area, maps.packs[number]):
                    total += len(slots)
                    continue
                lost = slots[~np.isin(slots, good)]
                if len(lost):
                    pack = self._opened.packs.find(maps.packs[number])
                    lost = lost[~self._opened.elsewhere.older(pack, lost, [])[1]]
                    lost = lost[~self._elsewhere(pack, lost)]
                total += len(lost)
        return total

    def _fits(self, area: AreaMap, pack_id: bytes) -> bool:
        """Whether the pack's chunks have the area's size: maps are data."""
        return self._opened.packs.find(pack_id).table.chunk_bytes == area.chunk_bytes

    def _elsewhere(self, pack: Pack, slots: Numbers) -> NDArray[np.bool_]:
        """Which chunks other packs have intact, to be read from there."""
        if self._names_there is None:
            find = self._opened.packs.find
            packs = [find(pack) for pack, good in self._good.items() if good is not None]
            self._names_there = Index().grown(packs, self._bad_slots)
        names = self._opened.elsewhere.names(pack, slots)
        found: NDArray[np.bool_] = (self._names_there.find(names)[0] >= 0) & names.any(axis=1)
        gone = ~found & ~pack.table.has(slots) & (slots < pack.table.slot_count)
        if gone.any():  # gc has recorded that, but its records may be damaged too
            self._report.noted &= self._opened.records.note([named(pack, slots[gone], names[gone])])
        return found

    def _bad_slots(self, pack_id: bytes, _: int) -> Numbers:
        """The slots of a pack that are unreadable or gone."""
        slots, good = self._opened.packs.find(pack_id).table.slot_count, self._good[pack_id]
        return np.setdiff1d(np.arange(slots), good if good is not None else [])

    def _found(self, name: str, why: str | DamagedError) -> None:
        if isinstance(why, DamagedError):
            self._report.unread |= isinstance(why, UnreadableError)
            why = why.why
        self._report.findings.append(StoreFinding(name, why))

    def _lost(self, checkpoint_id: str, why: str) -> None:
        self._report.lost.setdefault(checkpoint_id, []).append(why)

    def _read(self, size: int) -> None:
        self._report.read_bytes += size
        self._progress(self._report.read_bytes, self._total)


def _why(exc: DamagedError | MissingError) -> DamagedError | str:
    return exc if isinstance(exc, DamagedError) else "it was removed meanwhile"


def _each(pack: Pack) -> Iterator[tuple[Pack, int]]:
    return ((pack, frame) for frame in range(len(pack.table.counts)))


def _packs_in(maps: Maps) -> set[bytes]:
    numbers = {int(n) for area in maps.areas.values() for n in np.unique(packs_of(area.refs))}
    return {maps.packs[number] for number in numbers if number >= 0}
