"""Bits that flipped, files that are gone: found, and never taken for what was written."""

import random
import shutil
from pathlib import Path

import pytest

from tests.guest_like import Memory, dirtied, memory, require_same, save
from vmckpt.errors import RefusedError, VmckptError
from vmckpt.store.check import check
from vmckpt.store.collect import collect, plan_gc
from vmckpt.store.copying import copy_checkpoints
from vmckpt.store.errors import DamagedError
from vmckpt.store.files.manifest import Manifest
from vmckpt.store.open import create_store, new_archive, open_store
from vmckpt.store.sealing.keys import KeyHolder, KeySource, make_key_file

PAGES = 64
FLIPS = 120
MANY_FLIPS = 1000


class Small:
    """A store with one of everything: two checkpoints, a rewritten pack, encrypted or not."""

    def __init__(self, folder: Path, *, encrypted: bool) -> None:
        key = None
        if encrypted:
            make_key_file(folder / "key")
            key = KeySource(KeyHolder.FILE, str(folder / "key"))
        self.location, self.key = folder / "store", key
        self.states: list[tuple[Manifest, Memory]] = []
        first = memory(PAGES, 1)
        with create_store(str(self.location), key) as store:
            one = save(store, first)
            second, dirty = dirtied(first, 40, 1)
            two = save(store, second, parent=one, dirty=dirty)
            store.remove([one.id])
            assert plan_gc(store).rewrites
            collect(store, plan_gc(store))
            third, dirty = dirtied(second, 9, 2)
            three = save(store, third, parent=two, dirty=dirty)
            self.states = [(two, second), (three, third)]

    def files(self) -> list[Path]:
        """Every file that has bytes."""
        return sorted(p for p in self.location.rglob("*") if p.is_file() and p.stat().st_size)

    def require_found(self, what: str) -> None:
        """The damage is found, and a restore refuses, or is unharmed."""
        try:
            with open_store(str(self.location), self.key) as store:
                report = check(store)
                assert report.findings, f"{what} was not found"
                for manifest, ram in self.states:
                    try:
                        require_same(store, manifest, ram)
                    except VmckptError:
                        assert manifest.id in report.lost, f"{what}: {manifest.id} is lost, unsaid"
                    else:
                        # A longer file is found, and all in it is good.
                        longer = "longer than its manifest" in str(report.findings)
                        lost = manifest.id in report.lost
                        assert longer or not lost, f"{what}: {manifest.id} is whole"
        except (DamagedError, RefusedError):
            pass  # the store itself does not open: the error says so


@pytest.fixture(params=[False, True], ids=["clear", "encrypted"])
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Small:
    return Small(tmp_path, encrypted=request.param)


def flip(path: Path, at: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def flip_many(small: Small, count: int) -> None:
    """Flips in every file in turn, half of them where the formats' own bytes are: at the ends."""
    rng = random.Random(7)
    files = small.files()
    assert {p.relative_to(small.location).parts[0] for p in files} == {
        "checkpoints",
        "config",
        "maps",
        "packs",
        "store",
    }
    for i in range(count):
        path = files[i % len(files)]
        size = path.stat().st_size
        ends = [*range(min(200, size)), *range(max(0, size - 200), size)]
        at = rng.choice(ends) if rng.random() < 0.5 else rng.randrange(size)
        bit, kept = rng.randrange(8), path.read_bytes()
        flip(path, at, bit)
        small.require_found(f"bit {bit} of byte {at} of {size} of {path.name}")
        path.write_bytes(kept)
    with open_store(str(small.location), small.key) as store:
        assert check(store).whole


def test_flipped_bits_are_found(small: Small) -> None:
    flip_many(small, FLIPS)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_thousand_flipped_bits_are_found(small: Small) -> None:
    flip_many(small, MANY_FLIPS)


def test_files_that_are_gone_cut_off_or_too_long_are_found(small: Small) -> None:
    for path in small.files():
        kept = path.read_bytes()
        for what in (kept[:-1], kept[: len(kept) // 2], b"", kept + b"x", None):
            if what is None:
                path.unlink()
            else:
                path.write_bytes(what)
            if what is None and path.parent.name in ("checkpoints", "config"):
                # It was removed, or an older version made the store: that is no damage.
                with open_store(str(small.location), small.key) as store:
                    assert check(store).whole
            else:
                small.require_found(f"{path.name} with {len(what or b'')} bytes")
            path.write_bytes(kept)


def test_a_file_in_the_place_of_another_is_found(small: Small) -> None:
    for folder in ("packs", "checkpoints"):
        one, other = sorted((small.location / folder).glob("[0-9a-f]*"))[:2]
        kept = one.read_bytes()
        shutil.copyfile(other, one)
        small.require_found(f"{other.name} under the name {one.name}")
        one.write_bytes(kept)


def test_strangers_are_found(small: Small) -> None:
    for folder in ("packs", "checkpoints", "maps"):
        stranger = small.location / folder / "notes.txt"
        stranger.write_text("hello")
        with open_store(str(small.location), small.key) as store:
            assert [f.name for f in check(store).findings] == [f"{folder}/notes.txt"]
        stranger.unlink()


def test_gc_refuses_while_it_cannot_know_what_is_needed(small: Small) -> None:
    manifest, ram = small.states[0]
    damaged = small.states[1][0].id
    flip(small.location / "checkpoints" / damaged, 400, 1)
    with open_store(str(small.location), small.key) as store:
        with pytest.raises(RefusedError, match="it is not known what it needs"):
            plan_gc(store)
        store.remove([damaged])
        collect(store, plan_gc(store))
        require_same(store, manifest, ram)


def test_nothing_new_rests_on_a_damaged_pack(small: Small) -> None:
    _, ram = small.states[1]
    for pack in (small.location / "packs").glob("[0-9a-f]*"):
        flip(pack, pack.stat().st_size - 10, 1)
    with open_store(str(small.location), small.key) as store:
        saved = save(store, ram, vm="other")
        require_same(store, saved, ram)


def lose_packs(location: Path) -> None:
    for pack in (location / "packs").glob("[0-9a-f]*"):
        pack.unlink()


def test_nothing_new_starts_from_a_checkpoint_whose_packs_are_lost(small: Small) -> None:
    manifest, ram = small.states[1]
    lose_packs(small.location)
    with open_store(str(small.location), small.key) as store:
        with pytest.raises(DamagedError, match="packs are missing or damaged"):
            store.begin("vm", manifest.id)
        require_same(store, save(store, ram), ram)


def test_a_copy_rests_on_nothing_that_its_target_has_lost(small: Small, tmp_path: Path) -> None:
    (one, _), (other, ram) = small.states
    with (
        open_store(str(small.location), small.key) as store,
        create_store(str(tmp_path / "target")) as target,
    ):
        copy_checkpoints(store, target, [one])
        lose_packs(tmp_path / "target")
        copy_checkpoints(store, target, [other])
        require_same(target, target.manifest(other.id), ram)


def test_flipped_bits_of_an_exported_file_are_found(small: Small) -> None:
    path = small.location.parent / "exported"
    with open_store(str(small.location), small.key) as store:
        with new_archive(path, store) as archive:
            copy_checkpoints(store, archive, store.manifests())
        with open_store(str(path), small.key) as archive:
            assert check(archive).whole
            for manifest, ram in small.states:
                require_same(archive, manifest, ram)
    small.location = path
    rng = random.Random(3)
    size = path.stat().st_size
    for i in range(FLIPS):
        at = size - 1 - i * 5 if i % 3 == 0 else rng.randrange(size)
        flip(path, at, i % 8)
        small.require_found(f"bit {i % 8} of byte {at}")
        flip(path, at, i % 8)
