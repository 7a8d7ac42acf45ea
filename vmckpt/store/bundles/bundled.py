"""Read packs by name, whether they are separate objects or in bundles.

A reader of a pack need not know where it is. A pack that gc moves during a read is found again. A
pack in a bundle is read from there even if a separate object of its name exists: an append-only
client makes no bundles, but it may add an object under the name of any pack that has none.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

from vmckpt.errors import StorageError, UsageError
from vmckpt.store.backends.backend import Backend, HeldLock, MissingError, ObjectWriter
from vmckpt.store.backends.cached import uncached
from vmckpt.store.bundles.layout import BUNDLES, Bundle, BundledPack, BundleFiles, is_bundle
from vmckpt.store.errors import DamagedError, UnreadableError
from vmckpt.store.files.config import MERGED, read_config
from vmckpt.store.files.header import HEADER_BYTES
from vmckpt.store.files.pack import PACKS

R = TypeVar("R")
# Memory limit for cached parts of bundles.
_MOST_BYTES = 64 << 20
# Read size in object storage: small packs that were merged together are needed together.
_BLOCK_BYTES = 1 << 20
_REQUESTS = 16
# Retries, and the pause before each, while gc moves the content of bundles.
_TRIES, _PAUSE_S = 10, 0.1


@dataclass(frozen=True, slots=True)
class Holdings:
    """The objects that hold packs: separate packs (`packs/...`: size), and bundles, by name.

    `unreadable`: bundles with unknown content; `unreadable_bytes`: their total size.
    """

    loose: dict[str, int] = field(default_factory=dict)
    bundles: dict[str, Bundle] = field(default_factory=dict)
    unreadable: dict[str, DamagedError] = field(default_factory=dict)
    unreadable_bytes: dict[str, int] = field(default_factory=dict)
    # By pack, the bundles that have it, the one that keeps it first.
    within: dict[str, tuple[Bundle, ...]] = field(default_factory=dict)

    def holders(self, pack: str) -> list[str]:
        """The objects that have a pack, the one that keeps it first."""
        found = [bundle.name for bundle in self.within.get(pack, ())]
        return [*found, pack] if pack in self.loose else found

    def sizes(self) -> dict[str, int]:
        """All packs, by name, once each."""
        found = {name: bundles[0].members[name].size for name, bundles in self.within.items()}
        return self.loose | found

    @property
    def stored_bytes(self) -> int:
        """The total size."""
        sizes = *self.loose.values(), *self.unreadable_bytes.values()
        return sum(sizes) + sum(bundle.size for bundle in self.bundles.values())


class BundledBackend:
    """A location whose packs are read wherever they are. Thread-safe."""

    def __init__(self, inner: Backend, files: BundleFiles) -> None:
        self.location, self.locks_last = inner.location, inner.locks_last
        self.is_remote = inner.is_remote
        self.files = files
        self._inner = inner
        # Replaced, never modified.
        self._known = Holdings()
        self._parts = _PartCache()
        # False if the far side of a lent store is an older version.
        self.knows_bundles = True

    def list_holdings(self) -> Holdings:
        """List the objects that hold packs now. Raises StorageError."""
        # In this order: a pack is in a bundle before its own object is removed.
        loose = {f"{PACKS}/{name}": size for name, size in self._inner.names(PACKS).items()}
        bundles, unreadable, sizes = self._bundles()
        before = self._known
        within = before.within if bundles.keys() == before.bundles.keys() else _within(bundles)
        bad_bytes = {name: sizes[name] for name in unreadable}
        found = Holdings(loose, bundles, unreadable, bad_bytes, within)
        self._known = found
        return found

    def holders(self, pack: str) -> list[str]:
        """The objects that had a pack at the last listing."""
        return self._known.holders(pack)

    def unread(self) -> StorageError | None:
        """Why the last listing may have missed packs."""
        known = self._known
        if not (known.loose or known.bundles or known.unreadable):
            return UnreadableError(
                f"the store {self.location} has no pack at all",
                why="its disk is perhaps not mounted",
                remedy="mount it; if its content is lost, remove the checkpoints that need it",
            )
        errors = known.unreadable.values()
        return next((one for one in errors if isinstance(one, UnreadableError)), None)

    def names(self, folder: str) -> dict[str, int]:
        """The objects in a folder; packs include those in bundles."""
        if folder != PACKS:
            return self._inner.names(folder)
        return {
            name.removeprefix(f"{PACKS}/"): size
            for name, size in self.list_holdings().sizes().items()
        }

    def versions(self, folder: str) -> dict[str, tuple[int, str]]:
        """The objects in a folder, as stored."""
        return self._inner.versions(folder)

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Part of an object."""

        def part(bundle: Bundle, member: BundledPack) -> bytes:
            end = member.size if length is None else min(start + length, member.size)
            return self._read_member(bundle, member, start, end)

        return self._from(name, lambda: self._inner.read(name, start, length), part)

    def read_end(self, name: str, length: int) -> tuple[bytes, int]:
        """The end of an object; for a pack in a bundle at most the part after its frames."""

        def part(bundle: Bundle, member: BundledPack) -> tuple[bytes, int]:
            return self._member_end(bundle, member, length)

        return self._from(name, lambda: self._inner.read_end(name, length), part)

    def read_held(self, pack: str, holder: str, start: int = 0, length: int | None = None) -> bytes:
        """Part of a pack, from the given holder. Raises MissingError, StorageError."""
        if holder == pack:
            return self._inner.read(pack, start, length)
        bundle, member = self._member(pack, holder)
        end = member.size if length is None else min(start + length, member.size)
        return self._read_member(bundle, member, start, end)

    def read_held_end(self, pack: str, holder: str, length: int) -> tuple[bytes, int]:
        """As `read_end`, from the given holder. Raises MissingError, StorageError."""
        if holder == pack:
            return self._inner.read_end(pack, length)
        return self._member_end(*self._member(pack, holder), length)

    def write(self, name: str) -> ObjectWriter:
        """A new object."""
        return self._inner.write(name)

    def remove(self, name: str) -> None:
        """Remove an object; a pack's copy in a bundle stays."""
        self._inner.remove(name)

    def hold(
        self, name: str, *, shared: bool, wait_s: float = 0.0
    ) -> AbstractContextManager[HeldLock]:
        """A lock."""
        return self._inner.hold(name, shared=shared, wait_s=wait_s)

    def leftovers(self) -> dict[str, int]:
        """What killed writers left."""
        return self._inner.leftovers()

    def close(self) -> None:
        """Release all resources."""
        self._parts.clear()
        self._inner.close()

    @contextmanager
    def off(self) -> Iterator[None]:
        """Bypass the cache for the block."""
        self._parts.clear()
        with uncached(self._inner):
            yield

    def _bundles(self) -> tuple[dict[str, Bundle], dict[str, DamagedError], dict[str, int]]:
        for _ in range(_TRIES):
            try:
                names = self._inner.names(BUNDLES)
            except UsageError:
                # Not when it was opened: gc may have raised the format since.
                if read_config(self._inner).format < MERGED:
                    self.knows_bundles = False
                    return {}, {}, {}
                raise
            sizes = {f"{BUNDLES}/{name}": size for name, size in names.items() if is_bundle(name)}
            before = self._known.bundles
            found = {name: before[name] for name in sizes if name in before}
            new = [name for name in sizes if name not in before]
            unreadable, gone = {}, False
            for name, one in zip(new, self._read_lists(new, sizes), strict=True):
                if one is None:
                    gone = True
                elif isinstance(one, DamagedError):
                    unreadable[name] = one
                else:
                    found[name] = one
            if not gone:  # otherwise another bundle, perhaps not listed yet, has its content
                return found, unreadable, sizes
            time.sleep(_PAUSE_S)
        raise StorageError(
            f"the store {self.location} lists bundles that are not there",
            why="its storage lists what was removed, or gc merges them faster than they are read",
            remedy="run this again; object storage has to list what is there, as AWS S3 does",
        )

    def _read_lists(
        self, names: list[str], sizes: dict[str, int]
    ) -> list[Bundle | DamagedError | None]:
        def read(name: str) -> Bundle | DamagedError | None:
            try:
                return self.files.read(name, sizes[name])
            except MissingError:
                return None
            except DamagedError as exc:
                return exc

        if not self.is_remote or len(names) < 2:
            return list(map(read, names))
        with ThreadPoolExecutor(_REQUESTS, thread_name_prefix="store requests") as threads:
            return list(threads.map(read, names))

    def _from(self, name: str, own: Callable[[], R], part: Callable[[Bundle, BundledPack], R]) -> R:
        """Read `own` from an object, or `part` of a pack in a bundle. Raises MissingError."""
        bundles = self._known.within.get(name, ())
        if not bundles:
            try:
                return own()
            except MissingError:
                if not name.startswith(f"{PACKS}/"):
                    raise
        for again in (False, True):
            for bundle in bundles:
                with suppress(MissingError):
                    return part(bundle, bundle.members[name])
            if not again:
                bundles = self.list_holdings().within.get(name, ())
        return own()

    def _member(self, pack: str, holder: str) -> tuple[Bundle, BundledPack]:
        bundle = self._known.bundles.get(holder)
        if bundle is None or pack not in bundle.members:
            raise MissingError(holder)
        return bundle, bundle.members[pack]

    def _member_end(self, bundle: Bundle, member: BundledPack, length: int) -> tuple[bytes, int]:
        start = max(member.size - length, HEADER_BYTES + member.frame_bytes)
        return self._read_member(bundle, member, start, member.size), member.size

    def _read_member(self, bundle: Bundle, member: BundledPack, start: int, end: int) -> bytes:
        return b"".join(
            self._read_part(bundle, at, length) for at, length in member.parts(start, end)
        )

    def _read_part(self, bundle: Bundle, at: int, length: int) -> bytes:
        name = bundle.name
        if at < bundle.front_bytes:
            with suppress(StorageError):  # a disk cannot read some of it, perhaps this part
                front = self._parts.get(
                    (name, -1), lambda: self._inner.read(name, 0, bundle.front_bytes)
                )
                return front[at : at + length]
            return self._inner.read(name, at, length)
        if not self.is_remote or length > _BLOCK_BYTES:
            return self._inner.read(name, at, length)
        found = bytearray()
        for number in range(at // _BLOCK_BYTES, (at + length - 1) // _BLOCK_BYTES + 1):
            found += self._block(bundle, number)
        first = at // _BLOCK_BYTES * _BLOCK_BYTES
        return bytes(found[at - first : at - first + length])

    def _block(self, bundle: Bundle, number: int) -> bytes:
        name, at = bundle.name, number * _BLOCK_BYTES
        return self._parts.get(
            (name, number),
            lambda: self._inner.read(name, at, min(_BLOCK_BYTES, bundle.size - at)),
        )


def _within(bundles: Mapping[str, Bundle]) -> dict[str, tuple[Bundle, ...]]:
    """By pack, the bundles that have it, the highest rank first."""
    found: dict[str, tuple[Bundle, ...]] = {}
    for bundle in sorted(bundles.values(), key=lambda one: one.order, reverse=True):
        for name in bundle.members:
            found[name] = (*found.get(name, ()), bundle)
    return found


class _PartCache:
    """Parts of bundles that were read last. One thread reads a part; others wait for it."""

    def __init__(self) -> None:
        self._found: OrderedDict[tuple[str, int], Future[bytes]] = OrderedDict()
        self._mutex = threading.Lock()

    def get(self, part: tuple[str, int], read: Callable[[], bytes]) -> bytes:
        """A part, read by `read` if it is not cached. Raises what that raises."""
        with self._mutex:
            future = self._found.get(part)
            if future is not None:
                self._found.move_to_end(part)
            else:
                mine = self._found[part] = Future[bytes]()
        if future is not None:
            return future.result()
        try:
            data = read()
        except BaseException as exc:
            with self._mutex:
                self._found.pop(part, None)
            mine.set_exception(exc)
            raise
        mine.set_result(data)
        self._bound()
        return data

    def clear(self) -> None:
        """Empty the cache."""
        with self._mutex:
            self._found = OrderedDict()

    def _bound(self) -> None:
        with self._mutex:
            done = {part: len(one.result()) for part, one in self._found.items() if one.done()}
            total = sum(done.values())
            for part, size in done.items():
                if total <= _MOST_BYTES:
                    return
                del self._found[part]
                total -= size
