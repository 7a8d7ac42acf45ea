"""Memory like a guest's: zeroes, text, noise, pages that are there twice. For tests of stores."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vmckpt.store.area import Area
from vmckpt.store.files.manifest import BLOCK_CHUNK_BYTES, PAGE_CHUNK_BYTES, Manifest
from vmckpt.store.store import Store

Memory = NDArray[np.uint8]
RAM, DISK = "ram", "disk-0"


def memory(pages: int, seed: int) -> Memory:
    """Pages by bytes; a quarter each of zeroes, noise, text, and copies of others."""
    rng = np.random.default_rng(seed)
    found = np.zeros((pages, PAGE_CHUNK_BYTES), dtype=np.uint8)
    kinds = rng.integers(0, 4, pages)
    for page in np.flatnonzero(kinds == 1):
        found[page] = rng.integers(0, 256, PAGE_CHUNK_BYTES)
    for page in np.flatnonzero(kinds == 2):
        found[page] = np.resize(rng.integers(97, 123, 60), PAGE_CHUNK_BYTES)
    found[kinds == 3] = found[rng.permutation(pages)[: np.count_nonzero(kinds == 3)]]
    return found


def dirtied(before: Memory, pages: int, seed: int) -> tuple[Memory, NDArray[np.int64]]:
    """A later state, in which some pages were written, a few of them with zeroes."""
    rng = np.random.default_rng(seed)
    chosen = np.sort(rng.choice(len(before), pages, replace=False))
    after = before.copy()
    after[chosen, :200] = rng.integers(0, 256, (pages, 200))
    after[chosen[:: max(1, pages // 3)]] = 0
    return after, chosen


def save(
    store: Store,
    ram: Memory,
    *,
    vm: str = "vm",
    parent: Manifest | None = None,
    dirty: NDArray[np.int64] | None = None,
    name: str | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Manifest:
    """A checkpoint with RAM, a disk that is the same bytes, and device state."""
    with store.begin(vm, parent.id if parent else None) as new:
        area = new.area(RAM, size_bytes=ram.nbytes, chunk_bytes=PAGE_CHUNK_BYTES)
        disk = new.area(DISK, size_bytes=ram.nbytes, chunk_bytes=BLOCK_CHUNK_BYTES)
        chosen = np.arange(len(ram)) if dirty is None else dirty
        area.put(chosen, ram[chosen].tobytes())
        blocks = np.unique(chosen // 16)
        disk.put(blocks, ram.reshape(-1, BLOCK_CHUNK_BYTES)[blocks].tobytes())
        new.blob("device-state", ram[:3].tobytes() + b"end")
        return new.commit(facts or {"name": name, "trigger": "test"})


def read_whole(area: Area) -> bytes:
    """All of an area, zeroes included."""
    return bytes(area.read(np.arange(area.chunk_count)))


def require_same(store: Store, manifest: Manifest, ram: Memory) -> None:
    """The checkpoint is that memory, whichever way it is read."""
    with store.read(manifest.id) as point:
        assert point.blob("device-state") == ram[:3].tobytes() + b"end"
        for name in (RAM, DISK):
            area = point.area(name)
            assert read_whole(area) == ram.tobytes()
            streamed = np.zeros((area.chunk_count, area.chunk_bytes), dtype=np.uint8)
            for numbers, contents in area.stream():
                streamed[numbers] = np.frombuffer(contents, dtype=np.uint8).reshape(
                    len(numbers), -1
                )
            assert streamed.tobytes() == ram.tobytes()
