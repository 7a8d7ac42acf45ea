"""A process that works on a store until it is killed: `python -m tests.store_work PLACE SEED`.

It makes checkpoints whose contents follow from their facts, so that whoever finds one can tell what
has to be in it; removes some, collects, copies, exports and imports, in an order that follows from
the seed. Each thing that is done for good is a line on stdout.
"""

import random
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np

from tests.guest_like import RAM, Memory, memory, read_whole
from vmckpt.errors import NotFoundError, VmckptError
from vmckpt.store.collect import collect, plan_gc
from vmckpt.store.copying import copy_checkpoints
from vmckpt.store.files.manifest import PAGE_CHUNK_BYTES, Manifest
from vmckpt.store.open import create_store, new_archive, open_store
from vmckpt.store.store import Store

PAGES = 256
# A checkpoint's state is the sum of these changes: (seed, pages).
Changes = list[list[int]]


def state(changes: Changes) -> Memory:
    """The memory after these changes."""
    ram = _begin().copy()
    for seed, pages in changes:
        rng = np.random.default_rng(seed)
        chosen = rng.choice(PAGES, pages, replace=False)
        ram[chosen, :100] = rng.integers(0, 256, (pages, 100))
    return ram


@cache
def _begin() -> Memory:
    return memory(PAGES, 0)


def make(store: Store, seed: int, parent: Manifest | None, pages: int = 20) -> Manifest:
    """One more checkpoint."""
    changes: Changes = list(parent.facts["changes"]) if parent else []
    changes = [*changes, [seed, pages]]
    ram = state(changes)
    with store.begin("vm", parent.id if parent else None) as new:
        area = new.area(RAM, size_bytes=ram.nbytes, chunk_bytes=PAGE_CHUNK_BYTES)
        if parent:
            dirty = np.flatnonzero((ram != state(changes[:-1])).any(axis=1))
            area.put(dirty, ram[dirty].tobytes())
        else:
            area.put(np.arange(PAGES), ram.tobytes())
        new.blob("device-state", ram[:2].tobytes())
        return new.commit({"changes": changes})


def require_right(store: Store, manifest: Manifest) -> None:
    """The checkpoint is what its facts say, bit by bit."""
    ram = state(manifest.facts["changes"])
    with store.read(manifest.id) as point:
        assert read_whole(point.area(RAM)) == ram.tobytes(), manifest.id
        assert point.blob("device-state") == ram[:2].tobytes(), manifest.id


def work(folder: Path, seed: int, steps: int) -> None:
    """Do so many things, and say each that is done."""
    rng = random.Random(seed)
    one, other = open_or_create(folder / "one"), open_or_create(folder / "two")
    for step in range(steps):
        number = seed * 1000 + step
        manifests = one.manifests()
        kind = rng.choice(["create", "create", "gc", "remove", "copy", "export"])
        if kind == "create" or not manifests:
            made = make(one, number, rng.choice([None, *manifests[-3:]]))
            print("made", made.id, flush=True)
        elif kind == "gc":
            collect(one, plan_gc(one))
            collect(other, plan_gc(other))
        elif kind == "remove" and len(manifests) > 4:
            for store in (one, other):
                gone = rng.choice(manifests)
                print("removing", gone.id, flush=True)
                with suppress(NotFoundError):
                    store.remove([gone.id])
        elif kind == "copy":
            copy_checkpoints(one, other, manifests)
        elif kind == "export":
            file = folder / f"{number}.export"
            with new_archive(file, one) as archive:
                copy_checkpoints(one, archive, manifests[-2:])
            print("exported", file.name, flush=True)
            with open_store(str(file)) as archive:
                copy_checkpoints(archive, other, archive.manifests())
            file.unlink()


def open_or_create(location: Path) -> Store:
    """The store, made when it is not there yet."""
    try:
        return open_store(str(location))
    except NotFoundError:
        return create_store(str(location))


def main() -> int:
    """Run, and end with 3 and the error's text on stdout when the store says no."""
    folder, seed, steps = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    try:
        work(folder, seed, steps)
    except VmckptError as exc:
        print("error", exc.kind, exc.why, flush=True)
        return 3
    print("done", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
