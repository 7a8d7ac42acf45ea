"""A store: its catalogue, and the operations on checkpoints."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np

from vmckpt.errors import BusyError, NotFoundError, StorageError, UsageError
from vmckpt.store.area import Area, FrameCache
from vmckpt.store.backends.backend import HeldLock, MissingError
from vmckpt.store.errors import DamagedError, damaged, there_already
from vmckpt.store.files import doomed
from vmckpt.store.files.checkpoint_file import CHECKPOINTS, Maps, require_agreement
from vmckpt.store.files.config import Config
from vmckpt.store.files.doomed import remove_checkpoints
from vmckpt.store.files.manifest import Manifest
from vmckpt.store.files.maps import Refs, packs_of, resized, slots_of
from vmckpt.store.files.naming import Called, Settled, meant, settle
from vmckpt.store.files.order import in_order, of_vm, owners
from vmckpt.store.files.pack import Hashes, Numbers, Pack
from vmckpt.store.files.pins import Pin, Pinned, pins, require_unpinned, write_pin
from vmckpt.store.index import Index
from vmckpt.store.opened import Opened
from vmckpt.store.transaction import (
    PATIENCE_S,
    WRITERS,
    Origin,
    Transaction,
    damaged_chunks,
    new_origin,
)


class StoreContents(NamedTuple):
    """All checkpoints, oldest first, and those with unreadable manifests."""

    manifests: list[Manifest]
    damaged: dict[str, DamagedError]


class Store:
    """An open store (`open.py`). Calls block; several threads may read."""

    def __init__(self, opened: Opened, config: Config) -> None:
        self.opened, self.config = opened, config
        self.location = opened.backend.location
        self._index, self._index_version = Index(), 0

    def close(self) -> None:
        """Release files and threads."""
        self.opened.pool.shutdown(cancel_futures=True)
        self.opened.backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def catalogue(self) -> StoreContents:
        """All checkpoints. Raises StorageError."""
        found, bad = [], {}

        def read(checkpoint_id: str) -> Manifest | DamagedError | None:
            try:
                return self.opened.files.read_manifest(checkpoint_id)
            except MissingError:  # removed, meanwhile
                return None
            except DamagedError as exc:
                return exc

        ids = self.ids()
        for checkpoint_id, manifest in zip(ids, self.opened.at_once(read, ids), strict=True):
            if isinstance(manifest, DamagedError):
                bad[checkpoint_id] = manifest
            elif manifest is not None:
                found.append(manifest)
        return StoreContents(in_order(found), bad)

    def ids(self) -> list[str]:
        """All checkpoints' ids, unordered."""
        return [name for name in self.opened.backend.names(CHECKPOINTS) if is_id(name)]

    def manifests(self, vm: str | None = None) -> list[Manifest]:
        """The readable manifests, oldest first: all, or one VM's. Raises StorageError."""
        return [m for m in self.catalogue().manifests if vm is None or m.vm == vm]

    def manifest(self, checkpoint_id: str) -> Manifest:
        """One manifest. Raises NotFoundError, DamagedError."""
        with suppress(MissingError):  # treated as an unknown id
            # The cache of object storage is valid only for objects that are listed now.
            if is_id(checkpoint_id) and (not self.opened.is_remote or checkpoint_id in self.ids()):
                return self.opened.files.read_manifest(checkpoint_id)
        raise self._not_found(checkpoint_id)

    def find(self, text: str, vm: str | None = None) -> Manifest:
        """Find a checkpoint by id prefix, or by the "name" in its facts, the VM's latest one.

        Raises NotFoundError, UsageError (the prefix matches several, or several VMs have one of
        that name), DamagedError.
        """
        if text in self.ids():
            return self.manifest(text)
        manifests = self.manifests(vm)
        ids = meant(text, {one.id: one.facts.get("name") for one in manifests})
        found = [one for one in manifests if one.id in ids]
        if not found:
            raise self._not_found(text)
        whose = owners(manifests)
        are_named = all(one.facts.get("name") == text for one in found)
        if len(found) > 1 and not (are_named and len({whose[m.id] or m.vm for m in found}) == 1):
            raise UsageError(
                f"'{text}' matches several checkpoints",
                why=", ".join(f"{m.id} ('{m.facts.get('name')}' of {m.vm})" for m in found),
                remedy="write more characters of its id",
            )
        return found[-1]

    def begin(
        self,
        vm: str,
        parent: str | None = None,
        *,
        origin: Origin | None = None,
        called: Called | None = None,
    ) -> Transaction:
        """Begin a checkpoint of `vm`; each VM has at most one writer.

        A VM is identified by its UUID (`origin.vm_id`), or, without one, by its name.

        It starts from the content of `parent`, of whatever VM. With `called` the name is looked up,
        and the checkpoints that it replaces are locked until the end. Raises BusyError,
        NotFoundError, DamagedError (the parent must be complete), ThereAlreadyError (that of
        `origin`), RefusedError (the name is in use, or what it replaces is pinned), StorageError.
        """
        with ExitStack() as locks:
            hold = self.opened.backend.hold
            held = [
                locks.enter_context(hold(f"writer of {_whole_name(vm, origin)}", shared=False)),
                locks.enter_context(hold(WRITERS, shared=True, wait_s=PATIENCE_S)),
            ]

            def require() -> None:
                _require_all(held)

            if origin and origin.id in self.ids():
                raise there_already(origin.id, self.location)
            there = self.catalogue().manifests
            settled = Settled("")
            if called:
                vm_id = origin.vm_id if origin else None
                settled = settle(called, of_vm(there, vm, vm_id, parent))
            held += [
                locks.enter_context(hold(reading(old), shared=False)) for old in settled.replaces
            ]
            require_unpinned(self.opened, settled.replaces)
            start, index = self.maps(parent) if parent else Maps(), self._indexed(there)
            if parent:
                self._require_whole(parent, start, index)
            return Transaction(
                self.opened,
                index,
                origin or new_origin(vm, parent),
                start,
                (locks.pop_all(), require),
                settled=settled,
            )

    @contextmanager
    def read(self, checkpoint_id: str) -> Iterator["Checkpoint"]:
        """Open a checkpoint for reading; it is not removed during the block.

        Raises NotFoundError, DamagedError, BusyError (it is being removed).
        """
        lock = reading(checkpoint_id)
        with self.opened.backend.hold(lock, shared=True, wait_s=1.0):
            manifest = self.manifest(checkpoint_id)
            maps = self.maps(checkpoint_id)
            require_agreement(manifest, maps)
            with suppress(StorageError, UsageError):  # a hint, which an older `lend` does not know
                self.opened.records.refresh()
            yield Checkpoint(self.opened, manifest, maps)

    def maps(self, checkpoint_id: str) -> Maps:
        """Where a checkpoint's chunks are. Raises NotFoundError, DamagedError."""
        try:
            return self.opened.files.read_maps(checkpoint_id)
        except MissingError as exc:
            raise self._not_found(checkpoint_id) from exc

    def diff(self, one: str, other: str) -> dict[str, Numbers]:
        """The chunks in which two checkpoints differ, by area; a missing area counts as zeroes.

        Raises NotFoundError, DamagedError.
        """
        maps = self.maps(one), self.maps(other)
        return {
            name: self._differences(maps, name) for name in sorted({*maps[0].areas, *maps[1].areas})
        }

    def remove(self, checkpoint_ids: Iterable[str]) -> None:
        """Remove checkpoints; no other needs them. gc frees the space.

        Raises NotFoundError, BusyError (one is being read), RefusedError (one is pinned): none was
        removed; StorageError, OperationFailedError (a lock was lost): earlier ones were removed.
        """
        ids = list(checkpoint_ids)
        hold = self.opened.backend.hold
        with ExitStack() as locks:
            held = [locks.enter_context(hold(reading(one), shared=False)) for one in ids]
            present = self.ids()
            for checkpoint_id in ids:
                if checkpoint_id not in present:
                    raise self._not_found(checkpoint_id)
            for _ in remove_checkpoints(self.opened, ids, lambda: _require_all(held)):
                pass

    def pins(self) -> Pinned:
        """The pins, by checkpoint. Raises StorageError."""
        return pins(self.opened)

    def pin(self, pin: Pin) -> None:
        """Protect the pin's checkpoint from removal.

        Raises NotFoundError, BusyError (it is being removed), StorageError; OperationFailedError:
        its lock was lost, and it is not pinned.
        """
        lock = reading(pin.checkpoint)
        with self.opened.backend.hold(lock, shared=True, wait_s=1.0) as held:
            if pin.checkpoint not in self.ids():
                raise self._not_found(pin.checkpoint)
            write_pin(self.opened, pin)
            try:
                self._require_not_doomed(pin.checkpoint)
                held.require()  # no other process could remove the checkpoint until here
            except BaseException:
                self.unpin(pin)
                raise

    def _require_not_doomed(self, checkpoint_id: str) -> None:
        """Raises BusyError, NotFoundError if a command that lost its lock is removing it, or has
        done so: see `store/files/doomed.py`.
        """
        opened = self.opened
        if opened.backend.locks_last:
            return
        if opened.files.checkpoint_name(checkpoint_id) in doomed.names(opened.backend):
            raise BusyError(
                f"checkpoint {checkpoint_id} is not pinned",
                why="another command removes it, or was removing it when it was killed",
                remedy="see `vmckpt checkpoint list`; one that is still there can be pinned a day "
                "after that command",
            )
        if checkpoint_id not in self.ids():
            raise self._not_found(checkpoint_id)

    def unpin(self, pin: Pin) -> None:
        """Remove the pin; a missing one is not an error. Raises StorageError."""
        self.opened.backend.remove(pin.name)

    def _require_whole(self, checkpoint_id: str, maps: Maps, index: Index) -> None:
        packs = {bytes.fromhex(pack) for pack in self.manifest(checkpoint_id).packs}
        if lost := packs - index.generations.keys():
            raise damaged(
                f"checkpoint {checkpoint_id} is not whole",
                f"{len(lost)} of its {len(packs)} packs are missing or damaged",
            )
        if bad := damaged_chunks(maps, index.generations, self.opened.records):
            raise damaged(f"checkpoint {checkpoint_id} is not whole", f"{bad} chunks are damaged")

    def _differences(self, maps: tuple[Maps, Maps], name: str) -> Numbers:
        areas = [one.areas[name] for one in maps if name in one.areas]
        chunks = max(len(area.refs) for area in areas)
        if len({area.chunk_bytes for area in areas}) > 1:
            return np.arange(chunks)
        # A chunk has the same name in every pack.
        names = []
        for one in maps:
            area = one.areas.get(name)
            refs = resized(area.refs if area else np.zeros(0, dtype=np.uint64), chunks)
            names.append(self._names(refs, one.packs))
        return np.flatnonzero(np.any(names[0] != names[1], axis=1))

    def _names(self, refs: Refs, packs: list[bytes]) -> Hashes:
        found = np.zeros((len(refs), 2), dtype=np.uint64)
        numbers = packs_of(refs)
        for number in np.unique(numbers).tolist():
            if number >= 0:
                chosen = numbers == number
                slots = slots_of(refs[chosen])
                names = self.opened.packs.use(
                    packs[number], partial(self.opened.elsewhere.names, slots=slots)
                )
                # A chunk without a name is known only by its location: anywhere else it counts as
                # different.
                unknown = ~names.any(axis=1)
                names[unknown, 0] = int.from_bytes(packs[number][:8], "little")
                names[unknown, 1] = slots[unknown]
                found[chosen] = names
        return found

    def _indexed(self, manifests: Iterable[Manifest]) -> Index:
        """The chunks that these checkpoints have, as far as is known now."""
        ids = {bytes.fromhex(pack) for m in manifests for pack in m.packs}
        newest = self.opened.packs.list_again()
        records, version = self.opened.records, self.opened.records.refresh()
        index = self._index if version == self._index_version else Index()
        for pack, generation in index.generations.items():
            if pack not in ids or newest.get(pack, (-1, 0))[0] != generation:
                index = Index()
        # In storage order: the tables of packs in one bundle are read together.
        wanted = [pack for pack in newest if pack in ids and pack not in index.generations]
        # Damaged packs are left out, so that no new checkpoint reuses them.
        found = self.opened.at_once(self._with_hashes, wanted)
        packs = [pack for pack in found if pack is not None]
        self._index, self._index_version = index.grown(packs, records.slots), version
        return self._index

    def _with_hashes(self, pack_id: bytes) -> Pack | None:
        """A pack with its names read, and kept if reading is slow."""
        try:
            pack = self.opened.packs.find(pack_id)
            if self.opened.is_remote:
                pack.hashes()
        except (DamagedError, MissingError):
            return None
        return pack

    def _not_found(self, text: str) -> NotFoundError:
        return NotFoundError(
            f"there is no checkpoint '{text}'",
            why=f"the store {self.location} has none with that name or beginning of an id",
            remedy="see: vmckpt checkpoint list",
        )


class Checkpoint:
    """A checkpoint to read from."""

    def __init__(self, opened: Opened, manifest: Manifest, maps: Maps) -> None:
        self.manifest = manifest
        self._opened, self._maps = opened, maps
        self._cache = FrameCache()

    def area(self, name: str) -> Area:
        """An area. Raises NotFoundError."""
        found = self._maps.areas.get(name)
        if found is None:
            raise self._no_part(name)
        return Area(self._opened, self._maps, found, self._cache)

    def blob(self, name: str) -> bytes:
        """A blob. Raises NotFoundError, DamagedError."""
        try:
            return self._opened.files.read_blob(self.manifest, name)
        except KeyError:
            raise self._no_part(name) from None

    def _no_part(self, name: str) -> NotFoundError:
        parts = [area.name for area in self.manifest.areas]
        parts += [blob.name for blob in self.manifest.blobs]
        return NotFoundError(
            f"checkpoint {self.manifest.id} has no part '{name}'",
            why=f"it has: {', '.join(parts) or 'none'}",
            remedy="see: vmckpt checkpoint show",
        )


def is_id(text: str) -> bool:
    """Whether it is a valid checkpoint id."""
    return len(text) == 32 and all(letter in "0123456789abcdef" for letter in text)


def _require_all(held: Iterable[HeldLock]) -> None:
    for lock in held:
        lock.require()


def _whole_name(vm: str, origin: Origin | None) -> str:
    return f"{vm} ({origin.vm_id})" if origin and origin.vm_id else vm


def reading(checkpoint_id: str) -> str:
    """The name of a checkpoint's lock, which its readers share."""
    return f"checkpoint {checkpoint_id}"
