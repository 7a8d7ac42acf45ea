"""Stores of many small checkpoints, and what it takes to read them. For tests of merged packs."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import numpy as np

from tests.guest_like import RAM, Memory, read_whole
from vmckpt.store.backends.backend import Backend, HeldLock, ObjectWriter
from vmckpt.store.backends.local import LocalBackend, LocalHeld, LocalWriter
from vmckpt.store.check import check
from vmckpt.store.collect import Collected, collect, plan_gc
from vmckpt.store.files.manifest import PAGE_CHUNK_BYTES, Manifest
from vmckpt.store.store import Store

PAGES = 32
FOLDERS = ("bundles", "checkpoints", "maps", "packs")


class Made(NamedTuple):
    """A checkpoint, and what it holds."""

    manifest: Manifest
    ram: Memory


def make_small(store: Store, count: int, seed: int = 0, vm: str = "vm") -> list[Made]:
    """So many checkpoints of a VM, each of which adds a pack of a few pages."""
    rng = np.random.default_rng(seed)
    ram = rng.integers(0, 256, (PAGES, PAGE_CHUNK_BYTES), dtype=np.uint8)
    ram[::2] = 0
    made: list[Made] = []
    for number in range(count):
        dirty = np.arange(PAGES) if not made else np.sort(rng.choice(PAGES, 3, replace=False))
        ram = ram.copy()
        ram[dirty, :64] = rng.integers(0, 256, (len(dirty), 64))
        made.append(Made(add(store, ram, dirty, made[-1].manifest if made else None, vm), ram))
        assert made[-1].manifest.added_bytes, number
    return made


def add(
    store: Store, ram: Memory, dirty: "np.ndarray[tuple[int], np.dtype[np.int64]]",
    parent: Manifest | None = None, vm: str = "vm",
) -> Manifest:  # fmt: skip
    """One more checkpoint."""
    with store.begin(vm, parent.id if parent else None) as new:
        area = new.area(RAM, size_bytes=ram.nbytes, chunk_bytes=PAGE_CHUNK_BYTES)
        area.put(dirty, ram[dirty].tobytes())
        new.blob("device-state", ram[1, :64].tobytes())
        return new.commit({})


def require_all(store: Store, made: Sequence[Made]) -> None:
    """Each of them is what it was, bit by bit, and there are no others."""
    for manifest, ram in made:
        require_one(store, manifest, ram)
    assert set(store.ids()) == {manifest.id for manifest, _ in made}


def require_one(store: Store, manifest: Manifest, ram: Memory) -> None:
    """A checkpoint is what it was, however it is read."""
    with store.read(manifest.id) as point:
        area = point.area(RAM)
        assert read_whole(area) == ram.tobytes(), manifest.id
        streamed = np.zeros_like(ram)
        for numbers, contents in area.stream():
            streamed[numbers] = np.frombuffer(contents, np.uint8).reshape(len(numbers), -1)
        assert streamed.tobytes() == ram.tobytes(), manifest.id
        assert point.blob("device-state") == ram[1, :64].tobytes()


def objects(backend: Backend) -> Mapping[str, int]:
    """How many objects lie in each folder."""
    return {folder: len(backend.names(folder)) for folder in FOLDERS}


def collect_now(store: Store) -> Collected:
    """Gc."""
    return collect(store, plan_gc(store))


def require_whole(store: Store) -> None:
    """Nothing is wrong with it."""
    report = check(store)
    assert report.whole, (report.findings, report.lost)


class Asked:
    """A back end that counts what it is asked."""

    def __init__(self, inner: Backend) -> None:
        self.location, self.inner = inner.location, inner
        self.locks_last, self.is_remote = inner.locks_last, inner.is_remote
        self.counts: Counter[str] = Counter()

    def names(self, folder: str) -> dict[str, int]:
        """Counted."""
        self.counts["names"] += 1
        return self.inner.names(folder)

    def versions(self, folder: str) -> dict[str, tuple[int, str]]:
        """Counted."""
        self.counts["names"] += 1
        return self.inner.versions(folder)

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Counted."""
        self.counts[name.partition("/")[0]] += 1
        return self.inner.read(name, start, length)

    def read_end(self, name: str, length: int) -> tuple[bytes, int]:
        """Counted."""
        self.counts[name.partition("/")[0]] += 1
        return self.inner.read_end(name, length)

    def write(self, name: str) -> ObjectWriter:
        """As it is."""
        return self.inner.write(name)

    def remove(self, name: str) -> None:
        """As it is."""
        self.inner.remove(name)

    def hold(
        self, name: str, *, shared: bool, wait_s: float = 0.0
    ) -> AbstractContextManager[HeldLock]:
        """As it is."""
        return self.inner.hold(name, shared=shared, wait_s=wait_s)

    def leftovers(self) -> dict[str, int]:
        """As it is."""
        return self.inner.leftovers()

    def close(self) -> None:
        """As it is."""
        self.inner.close()


class Killed(BaseException):
    """The process ends here: nothing that it would have done is done."""


class Stepped(LocalBackend):
    """A directory whose locks keep none away. `then` runs before change number `at` of it.

    Once `then` has raised, nothing changes any longer.
    """

    locks_last = False
    at = -1
    then: Callable[[], None] = staticmethod(lambda: None)
    count = 0
    _error: BaseException | None = None

    def step(self) -> None:
        """An instant at which another may come, or the process end."""
        if self._error is not None:
            raise self._error
        self.count += 1
        if self.count == self.at:
            try:
                self.then()
            except Killed as exc:
                self._error = exc
                raise

    @contextmanager
    def hold(self, name: str, *, shared: bool, wait_s: float = 0.0) -> Iterator[LocalHeld]:
        """Held by many."""
        self.step()
        yield LocalHeld()

    def versions(self, folder: str) -> dict[str, tuple[int, str]]:
        """An instant, and what is there then."""
        self.step()
        return super().versions(folder)

    def remove(self, name: str) -> None:
        """Two instants."""
        self.step()
        super().remove(name)
        self.step()

    def write(self, name: str) -> LocalWriter:
        """Publishing is two instants."""
        return _SteppedWriter(self, name)

    def leftovers(self) -> dict[str, int]:
        """None, as in object storage, where locks can be lost."""
        return {}


class _SteppedWriter(LocalWriter):
    def publish(self) -> None:
        backend = self._backend
        assert isinstance(backend, Stepped)
        backend.step()
        super().publish()
        backend.step()
