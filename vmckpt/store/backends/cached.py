"""Cache the beginnings and ends of objects in object storage.

An object of a store never changes, so a cached part is valid while the storage lists the object
with the same version (ETag) and size. Small objects are cached whole; of others the parts that
catalogue and index need: the first bytes of checkpoints, maps, the headers and tables of packs, and
the beginnings of bundles, which have those of many packs. Each part has a checksum keyed by the
store's secret: a part that was changed here is read again.

Each store has its own cache directory (named by its id), bounded in size, which may be removed at
any time. A cache that cannot be read or written never makes a command fail.
"""

import os
import secrets
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

from vmckpt.store.backends.backend import Backend, HeldLock, ObjectWriter, ReadableBackend
from vmckpt.store.errors import DamagedError

T = TypeVar("T")
# A smaller object is read and cached whole.
WHOLE_BYTES = 64 << 10
# Hashes and tables of packs are within their last bytes.
_END_BYTES = 1 << 20
_MOST_MAPS_BYTES = 16 << 20
MOST_BYTES = 512 << 20
_SUM_BYTES = 16
_FOLDERS = ("bundles", "checkpoints", "maps", "packs")


class CachedBackend:
    """A backend with a cache directory for what it reads. Thread-safe."""

    is_remote = True

    def __init__(self, inner: Backend, folder: Path | None, secret: bytes) -> None:
        self.location, self.locks_last = inner.location, inner.locks_last
        self._inner, self._secret = inner, blake2b(secret, person=b"vmckpt cache").digest()
        self._folder = folder if folder is not None and _own_folder(folder) else None
        self._known: dict[str, dict[str, tuple[int, str]]] = {}
        self._mutex = threading.Lock()
        self._off = 0

    def names(self, folder: str) -> dict[str, int]:
        """The objects in a folder; from now on only cached parts of these are valid."""
        return {name: size for name, (size, _) in self.versions(folder).items()}

    def versions(self, folder: str) -> dict[str, tuple[int, str]]:
        """The same, with the storage's versions."""
        found = self._inner.versions(folder)
        if folder in _FOLDERS:
            with self._mutex:
                self._known[folder] = dict(found)
        return found

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Part of an object; cached if it will be needed again."""
        known = self._version(name)
        if known is None:
            return self._inner.read(name, start, length)
        size, version = known
        if size <= (_MOST_MAPS_BYTES if name.startswith("maps/") else WHOLE_BYTES):
            data = self._part(name, version, "all", lambda: self._inner.read(name))
            return data[start:] if length is None else data[start : start + length]
        if length is None or not _is_wanted_again(name, start, length, size):
            return self._inner.read(name, start, length)
        part = f"{start}+{length}"
        return self._part(name, version, part, lambda: self._inner.read(name, start, length))

    def read_end(self, name: str, length: int) -> tuple[bytes, int]:
        """The end of an object."""
        known = self._version(name)
        if known is None or length == 0:
            return self._inner.read_end(name, length)
        size, _ = known
        start = max(0, size - length)
        return self.read(name, start, size - start), size

    def write(self, name: str) -> ObjectWriter:
        """A new object."""
        return self._inner.write(name)

    def remove(self, name: str) -> None:
        """Remove an object."""
        folder, _, bare = name.partition("/")
        with self._mutex:
            self._known.get(folder, {}).pop(bare, None)
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
        """Evict the oldest entries beyond the cache's limit."""
        if self._folder is not None:
            with suppress(OSError):
                _bound(self._folder)
        self._inner.close()

    @contextmanager
    def off(self) -> Iterator[None]:
        """Bypass the cache for the block; such blocks may be nested."""
        with self._mutex:
            self._off += 1
        try:
            yield
        finally:
            with self._mutex:
                self._off -= 1

    def _version(self, name: str) -> tuple[int, str] | None:
        if self._off or self._folder is None:
            return None
        folder, _, bare = name.partition("/")
        with self._mutex:
            return self._known.get(folder, {}).get(bare)

    def _part(self, name: str, version: str, part: str, read: "ObjectReader") -> bytes:
        key = f"{name}\0{version}\0{part}".encode()
        path = Path(str(self._folder)) / sha256(key).hexdigest()[:40]
        with suppress(OSError):
            data = path.read_bytes()
            if data[:_SUM_BYTES] == self._sum(key, data[_SUM_BYTES:]):
                os.utime(path)
                return data[_SUM_BYTES:]
        data = read()
        temporary = path.with_name(f".{secrets.token_hex(8)}")
        with suppress(OSError):
            temporary.write_bytes(self._sum(key, data) + data)
            temporary.rename(path)
        return data

    def _sum(self, key: bytes, data: bytes) -> bytes:
        return blake2b(key + b"\0" + data, key=self._secret, digest_size=_SUM_BYTES).digest()


@runtime_checkable
class Keeping(Protocol):
    """A backend that caches what it reads."""

    def off(self) -> AbstractContextManager[None]:
        """Bypass the cache for the block."""


class ObjectReader(Protocol):
    """Reads what is not cached."""

    def __call__(self) -> bytes:
        """Raises MissingError, StorageError."""


def uncached(backend: ReadableBackend) -> AbstractContextManager[None]:
    """Read from the store itself for the block."""
    return backend.off() if isinstance(backend, Keeping) else _nothing()


def read_twice(backend: ReadableBackend, read: Callable[[], T]) -> T:
    """The result of `read`; retried without the cache before damage is believed.

    A single read may return bad bytes of a good object, and damaged objects are given up or
    removed.
    """
    try:
        return read()
    except DamagedError:
        with uncached(backend):
            return read()


def cache_folder(store_id: str) -> Path | None:
    """The store's cache directory on this machine, for this user; None: no cache."""
    given = os.environ.get("VMCKPT_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME")
    if given is None:
        try:
            given = str(Path.home() / ".cache")
        except RuntimeError:
            return None
    return Path(given) / "vmckpt" / "stores" / store_id


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _is_wanted_again(name: str, start: int, length: int, size: int) -> bool:
    is_begin = start == 0 and (length <= WHOLE_BYTES or name.startswith("bundles/"))
    return is_begin or (name.startswith("packs/") and start + length > size - _END_BYTES)


def _own_folder(folder: Path) -> bool:
    """Create it; returns whether it belongs to this user alone."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return False
    return (
        stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
    )


def _bound(folder: Path) -> None:
    files = [(entry.stat().st_mtime, entry.stat().st_size, entry) for entry in folder.iterdir()]
    total = sum(size for _, size, _ in files)
    for _, size, entry in sorted(files, key=lambda one: one[0]):
        if total <= MOST_BYTES:
            return
        entry.unlink(missing_ok=True)
        total -= size
