"""Chunks that are not what their names say: a bit of memory flipped, or a client lied.

All that a store checks when it reads is right of them, and new checkpoints find chunks by name.
"""

from pathlib import Path

import numpy as np
import pytest

from tests.guest_like import Memory, memory, require_same, save
from vmckpt.store.check import check
from vmckpt.store.collect import collect, plan_gc
from vmckpt.store.damage.repair import plan_repair, repair
from vmckpt.store.errors import DamagedError
from vmckpt.store.files.manifest import PAGE_CHUNK_BYTES, Manifest
from vmckpt.store.open import create_store, open_store
from vmckpt.store.sealing.seal import Sealer
from vmckpt.store.store import Store

RAM = memory(64, 1)


class Made:
    """A store with a checkpoint of `RAM` whose first page is another, and one that shares it."""

    def __init__(self, location: Path) -> None:
        self.location = str(location)
        page = int(np.flatnonzero(RAM.any(axis=1))[0])
        wrong = RAM.copy()
        wrong[page, 0] ^= 1
        right = Sealer.hashes

        def hashes(sealer: Sealer, data: memoryview, chunk_bytes: int) -> bytes:
            if chunk_bytes == PAGE_CHUNK_BYTES:
                data = memoryview(bytes(data).replace(wrong[page].tobytes(), RAM[page].tobytes()))
            return right(sealer, data, chunk_bytes)

        with create_store(self.location) as store, pytest.MonkeyPatch.context() as patch:
            patch.setattr(Sealer, "hashes", hashes)
            self.first = save(store, wrong)
        with self.open() as store:
            self.second = save(store, RAM, vm="other")

    def open(self) -> Store:
        return open_store(self.location)


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path / "store")


def require_refused(store: Store, manifest: Manifest, ram: Memory) -> None:
    """By each way of reading it."""
    with pytest.raises(DamagedError):
        require_same(store, manifest, ram)
    with store.read(manifest.id) as point:
        area = point.area("ram")
        with pytest.raises(DamagedError):
            list(area.stream())
        with pytest.raises(DamagedError):
            area.read_around(int(area.numbers()[0]))


def test_nothing_new_rests_on_what_a_check_has_found(made: Made) -> None:
    with made.open() as store:
        report = check(store)
        assert report.lost.keys() == {made.first.id, made.second.id}
        third = save(store, RAM, vm="third")
        require_same(store, third, RAM)


def test_it_is_refused_from_then_on_and_heals_when_its_content_is_stored(made: Made) -> None:
    with made.open() as store:
        check(store)
    with made.open() as store:
        require_refused(store, made.second, RAM)
        third = save(store, RAM, vm="third")
        require_same(store, made.second, RAM)
        assert collect(store, plan_gc(store)).healed
    with made.open() as store:
        store.remove([third.id])
        collect(store, plan_gc(store))
        require_same(store, made.second, RAM)
        assert check(store).whole


def test_gc_does_not_make_it_pass_for_what_it_is_not(made: Made) -> None:
    with made.open() as store:
        repair(store, plan_repair(store), remove_lost=False)
        collect(store, plan_gc(store))
        require_refused(store, made.second, RAM)
        assert made.second.id in check(store).lost
    with made.open() as store:
        require_refused(store, made.second, RAM)
