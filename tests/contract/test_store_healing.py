"""Damage that was met: nothing new rests on it, and it heals when its content is put again."""

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.guest_like import RAM, Memory, dirtied, memory, read_whole, require_same, save
from vmckpt.errors import StorageError, VmckptError
from vmckpt.store.backends.cached import CachedBackend, uncached
from vmckpt.store.backends.local import LocalBackend
from vmckpt.store.check import check
from vmckpt.store.collect import collect, plan_gc
from vmckpt.store.copying import copy_checkpoints
from vmckpt.store.damage.repair import plan_repair, repair
from vmckpt.store.damage.subset import parse_subset
from vmckpt.store.errors import DamagedError
from vmckpt.store.files.manifest import PAGE_CHUNK_BYTES, Manifest
from vmckpt.store.files.pack import FRAME_BYTES
from vmckpt.store.open import create_store, new_archive, open_store
from vmckpt.store.store import Store

PAGES = 256


def flip_frame(location: Path, pack: str, frame: int = 0, bit: int = 0) -> None:
    """Flip a bit in the middle of a frame of a pack."""
    with open_store(str(location)) as store:
        found = store.opened.packs.find(bytes.fromhex(pack))
        at = int(found.table.starts[frame] + found.table.stored[frame] // 2)
        path = location / found.name
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def flip_names(location: Path, pack: str) -> None:
    """Flip a bit of a pack's table of names."""
    with open_store(str(location)) as store:
        found = store.opened.packs.find(bytes.fromhex(pack))
        at, path = found._hash_span[0] + 20, location / found.name
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def ram_pack(store: Store, manifest: Manifest) -> str:
    """The pack that the first pages of a checkpoint are in."""
    maps = store.maps(manifest.id)
    first = int(maps.areas[RAM].refs[np.flatnonzero(maps.areas[RAM].refs)[0]])
    return maps.packs[(first >> 32) - 1].hex()


class Damaged:
    """A store whose only checkpoint has a damaged frame of RAM."""

    def __init__(self, location: Path) -> None:
        self.location, self.ram = location, memory(PAGES, 1)
        with create_store(str(location)) as store:
            self.first = save(store, self.ram)
            self.pack = ram_pack(store, self.first)
        flip_frame(location, self.pack)

    def open(self) -> Store:
        """The store."""
        return open_store(str(self.location))


@pytest.fixture
def hurt(tmp_path: Path) -> Damaged:
    return Damaged(tmp_path / "store")


def meet_by_check(store: Store, hurt: Damaged) -> None:
    report = check(store)
    assert hurt.first.id in report.lost
    assert report.noted


def meet_by_reading(store: Store, hurt: Damaged) -> None:
    with pytest.raises(DamagedError, match="lost"):
        require_same(store, hurt.first, hurt.ram)


def meet_by_streaming(store: Store, hurt: Damaged) -> None:
    with store.read(hurt.first.id) as point, pytest.raises(DamagedError, match="lost"):
        list(point.area(RAM).stream())


def meet_by_one_page(store: Store, hurt: Damaged) -> None:
    with store.read(hurt.first.id) as point, pytest.raises(DamagedError, match="lost"):
        point.area(RAM).read_around(int(point.area(RAM).numbers()[0]))


MEETINGS = [meet_by_check, meet_by_reading, meet_by_streaming, meet_by_one_page]


@pytest.mark.parametrize("meet", MEETINGS)
def test_the_next_put_of_the_same_content_heals(meet: object, hurt: Damaged) -> None:
    assert callable(meet)
    with hurt.open() as store:
        meet(store, hurt)
    # Another process: what is known stands in the store.
    with hurt.open() as store:
        again = save(store, hurt.ram, vm="other")
        require_same(store, again, hurt.ram)
        require_same(store, hurt.first, hurt.ram)
        assert not check(store).lost
    with hurt.open() as store:
        done = collect(store, plan_gc(store))
        assert done.healed
        assert not done.lost
        assert check(store).whole
        assert not store.opened.backend.names("damaged")
        # From its own pack again: what it was healed from may go.
        store.remove([again.id])
        collect(store, plan_gc(store))
        require_same(store, hurt.first, hurt.ram)
        assert check(store).whole
        assert plan_gc(store).freed_bytes == 0


def test_what_heals_is_not_collected_before_it_has_healed(hurt: Damaged) -> None:
    with hurt.open() as store:
        meet_by_check(store, hurt)
        again = save(store, hurt.ram, vm="other")
        store.remove([again.id])
        collect(store, plan_gc(store))
        require_same(store, hurt.first, hurt.ram)
        assert check(store).whole


@pytest.mark.parametrize("is_merged", [False, True])
@pytest.mark.parametrize("makes_room", [True, False])
def test_a_full_disk_is_collected_although_damage_is_to_heal(
    hurt: Damaged, monkeypatch: pytest.MonkeyPatch, *, makes_room: bool, is_merged: bool
) -> None:
    """Healing takes room first: `gc` ended there each time, and nothing gave any back."""
    with hurt.open() as store:
        meet_by_check(store, hurt)
        gone = [save(store, memory(PAGES, 50)), save(store, hurt.ram, vm="other")]
        gone += [save(store, memory(PAGES, seed)) for seed in range(40, 60 if is_merged else 40)]
    with monkeypatch.context() as unhealed:
        unhealed.setattr("vmckpt.store.collect._may_heal", lambda *_: False)
        for _ in range(2):  # the first one raises the store's format
            with hurt.open() as store:
                collect(store, plan_gc(store))
    with hurt.open() as store:
        assert bool(store.opened.backend.list_holdings().bundles) == is_merged
        store.remove([one.id for one in gone])
    write, unlink, full = os.write, os.unlink, [True]

    def written(fd: int, data: bytes) -> int:
        if full[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data)

    def unlinked(*args: Any, **more: Any) -> None:
        unlink(*args, **more)
        full[0] &= not makes_room

    with hurt.open() as store:
        useless = sum(plan_gc(store).dead.values())
        monkeypatch.setattr(os, "write", written)
        monkeypatch.setattr(os, "unlink", unlinked)
        if makes_room:
            assert collect(store, plan_gc(store)).healed
        else:
            with pytest.raises(StorageError, match="No space left"):
                collect(store, plan_gc(store))
        monkeypatch.undo()
        assert is_merged or sum(plan_gc(store).dead.values()) < useless
    with hurt.open() as store:
        collect(store, plan_gc(store))
        collect(store, plan_gc(store))
        require_same(store, hurt.first, hurt.ram)
        assert check(store).whole
        assert not plan_gc(store).dead


def test_a_new_checkpoint_does_not_start_from_damaged_chunks(hurt: Damaged) -> None:
    later, dirty = dirtied(hurt.ram, 10, 2)
    with hurt.open() as store:
        meet_by_check(store, hurt)
        with pytest.raises(DamagedError, match="chunks are damaged"):
            store.begin("vm", hurt.first.id)
        after = save(store, later)
        require_same(store, after, later)
        # What it started from is as it was, but for what changed since.
        lost = check(store).lost
        assert after.id not in lost
    del dirty


def test_damage_that_is_met_meanwhile_ends_the_commit(hurt: Damaged) -> None:
    with hurt.open() as store, hurt.open() as other:
        new = store.begin("vm")
        area = new.area(RAM, size_bytes=hurt.ram.nbytes, chunk_bytes=4096)
        area.put(np.arange(PAGES), hurt.ram.tobytes())
        meet_by_check(other, hurt)
        with pytest.raises(DamagedError, match="was not made"):
            new.commit({})
        assert store.ids() == [hurt.first.id]
        require_same(store, save(store, hurt.ram), hurt.ram)


def test_gc_keeps_what_is_good_and_remembers_what_is_lost(tmp_path: Path) -> None:
    location, first = tmp_path / "store", memory(PAGES, 1)
    with create_store(str(location)) as store:
        one = save(store, first)
        second, dirty = dirtied(first, 100, 1)
        two = save(store, second, parent=one, dirty=dirty)
        pack = ram_pack(store, one)
        store.remove([one.id])
    flip_frame(location, pack)
    with open_store(str(location)) as store:
        done = collect(store, plan_gc(store))
        [(name, lost)] = done.lost.items()
        assert pack in name
        assert lost
        report = check(store)
        assert two.id in report.lost
        assert not report.whole
        # Once more changes nothing.
        assert not plan_gc(store).rewrites
        readable = 0
        with store.read(two.id) as point:
            for page in range(PAGES):
                try:
                    found = point.area(RAM).read(np.array([page]))
                except DamagedError:
                    continue
                readable += 1
                assert bytes(found) == second[page].tobytes()
        assert PAGES - lost - 100 <= readable < PAGES
        # It is lost, not zeroes: nothing that rests on it is as if it were the same.
        assert len(store.diff(two.id, save(store, second * 0, vm="zero").id)[RAM]) == np.sum(
            second.any(axis=1)
        )
        save(store, second, vm="other")
        require_same(store, two, second)
    # The record that alone knows what is lost is there twice.
    record = next((location / "damaged").iterdir())
    record.write_bytes(record.read_bytes()[:-1])
    with open_store(str(location)) as store:
        require_same(store, two, second)
        assert collect(store, plan_gc(store)).healed == lost
        require_same(store, two, second)
        assert check(store).whole


def save_two(location: Path) -> tuple[Manifest, Manifest, Memory]:
    """Two checkpoints, and the memory of the second one, which needs all but the first frame of
    what the first one needs: too much for gc to write their pack again once that alone is left.
    """
    first = np.random.default_rng(1).integers(1, 256, (2 * PAGES, PAGE_CHUNK_BYTES), dtype=np.uint8)
    second, dirty = first.copy(), np.arange(FRAME_BYTES // PAGE_CHUNK_BYTES)
    second[dirty] = 0
    with create_store(str(location)) as store:
        one = save(store, first)
        two = save(store, second, parent=one, dirty=dirty)
    return one, two, second


@pytest.mark.parametrize("is_given_up", [False, True])
def test_a_repaired_store_is_whole_where_what_is_left_needs_most_of_a_damaged_pack(
    tmp_path: Path, is_given_up: bool
) -> None:
    """`is_given_up`: gc has written the pack again before, without what is lost."""
    location = tmp_path / "store"
    one, two, second = save_two(location)
    with open_store(str(location)) as store:
        pack = ram_pack(store, one)
    flip_frame(location, pack)
    if is_given_up:
        flip_names(location, pack)
        with open_store(str(location)) as store:
            assert collect(store, plan_gc(store)).lost
    with open_store(str(location)) as store:
        plan = plan_repair(store)
        assert repair(store, plan, remove_lost=True).removed == [one.id]
        assert check(store).whole
        assert not store.opened.backend.names("damaged")
        assert not plan_gc(store).rewrites
        require_same(store, two, second)


def test_a_pack_of_which_nothing_is_left_heals(tmp_path: Path) -> None:
    """All that is needed of it was in one frame."""
    location, first = tmp_path / "store", memory(PAGES // 4, 1)
    with create_store(str(location)) as store:
        one = save(store, first)
        second, dirty = dirtied(first, PAGES // 8, 1)
        two = save(store, second, parent=one, dirty=dirty)
        pack = ram_pack(store, one)
        store.remove([one.id])
    flip_frame(location, pack)
    with open_store(str(location)) as store:
        assert collect(store, plan_gc(store)).lost
    with open_store(str(location)) as store:
        assert not len(store.opened.packs.find(bytes.fromhex(pack)).table.slots)
        save(store, second, vm="other")
        require_same(store, two, second)
        assert collect(store, plan_gc(store)).healed
        require_same(store, two, second)
        assert check(store).whole


def test_two_packs_heal_by_one_another(tmp_path: Path) -> None:
    """Each by what no checkpoint needs of the other: whichever gc writes again first."""
    location, pages = tmp_path / "store", 32
    rng = np.random.default_rng(1)
    one, other = rng.integers(1, 256, (2, pages, 4096), dtype=np.uint8)
    zero, both = np.zeros_like(one), np.arange(2 * pages)
    rams = [np.concatenate(parts) for parts in ((one, other), (other, one))]
    needed = [np.concatenate((half, zero)) for half in (one, other)]
    with create_store(str(location)) as store:
        # At once, so that neither finds what the other brings.
        begun = [store.begin(vm) for vm in ("one", "other")]
        areas = [
            new.area(RAM, size_bytes=ram.nbytes, chunk_bytes=PAGE_CHUNK_BYTES)
            for new, ram in zip(begun, rams, strict=True)
        ]
        for area, ram in zip(areas, rams, strict=True):
            area.put(both, ram.tobytes())
        before = [new.commit({}) for new in begun]
        after = []
        for old, ram in zip(before, needed, strict=True):
            with store.begin(old.vm, old.id) as new:
                area = new.area(RAM, size_bytes=ram.nbytes, chunk_bytes=PAGE_CHUNK_BYTES)
                area.put(both[pages:], zero.tobytes())
                after.append(new.commit({}))
        packs = [ram_pack(store, manifest) for manifest in after]
        assert len(set(packs)) == 2
        store.remove([manifest.id for manifest in before])
    for pack in packs:
        flip_frame(location, pack)
    with open_store(str(location)) as store:
        assert not check(store).lost
        done = collect(store, plan_gc(store))
        assert (done.healed, done.lost) == (2 * pages, {})
        # Now what none needs may go.
        assert collect(store, plan_gc(store)).freed_bytes > 0
        assert check(store).whole
        for manifest, ram in zip(after, needed, strict=True):
            with store.read(manifest.id) as point:
                assert read_whole(point.area(RAM)) == ram.tobytes()


def test_what_is_found_damaged_after_gc_has_its_plan_heals_first(tmp_path: Path) -> None:
    """By what that gc was to remove."""
    location, ram = tmp_path / "store", memory(PAGES, 1)
    with create_store(str(location)) as store:
        begun = [store.begin(vm) for vm in ("one", "other")]
        for new in begun:  # at once: neither finds what the other brings
            area = new.area(RAM, size_bytes=ram.nbytes, chunk_bytes=PAGE_CHUNK_BYTES)
            area.put(np.arange(PAGES), ram.tobytes())
        one, other = (new.commit({}) for new in begun)
        store.remove([other.id])
        plan = plan_gc(store)
        assert plan.dead
        flip_frame(location, ram_pack(store, one))
        with open_store(str(location)) as checked:
            assert not check(checked).lost
        for again in (plan, plan_gc(store)):
            collect(store, again)
            assert not check(store).lost
        assert not plan_gc(store).dead
        assert check(store).whole
        with store.read(one.id) as point:
            assert read_whole(point.area(RAM)) == ram.tobytes()


def test_a_damaged_table_of_names_is_made_anew(tmp_path: Path) -> None:
    location, ram = tmp_path / "store", memory(PAGES, 1)
    with create_store(str(location)) as store:
        first = save(store, ram)
        pack = ram_pack(store, first)
    flip_names(location, pack)
    with open_store(str(location)) as store:
        report = check(store)
        assert not report.whole
        assert not report.lost
        collect(store, plan_gc(store))
        assert check(store).whole
        require_same(store, first, ram)


def test_damage_of_an_exported_file_is_said_and_nothing_is_written(
    hurt: Damaged, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    with create_store(str(tmp_path / "good")) as good, new_archive(path, good) as archive:
        first = save(good, hurt.ram)
        copy_checkpoints(good, archive, [first])
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    with open_store(str(path)) as archive:
        for _ in range(2):
            report = check(archive)
            assert first.id in report.lost
            assert not report.noted
        with pytest.raises(DamagedError):
            require_same(archive, first, hurt.ram)
    assert path.read_bytes() == data


def test_one_damaged_checkpoint_does_not_keep_others_from_being_copied(
    hurt: Damaged, tmp_path: Path
) -> None:
    other_ram: Memory = memory(PAGES, 9)
    with hurt.open() as store, create_store(str(tmp_path / "target")) as target:
        other = save(store, other_ram, vm="other")
        with pytest.raises(DamagedError, match="1 of 2"):
            copy_checkpoints(store, target, store.manifests())
        assert target.ids() == [other.id]
        require_same(target, other, other_ram)


def test_a_copy_of_a_good_store_heals(hurt: Damaged, tmp_path: Path) -> None:
    with create_store(str(tmp_path / "good")) as good, hurt.open() as store:
        meet_by_check(store, hurt)
        same = save(good, hurt.ram, vm="copied")
        copy_checkpoints(good, store, [same])
        require_same(store, hurt.first, hurt.ram)


def test_part_of_a_store_is_read(hurt: Damaged) -> None:
    with hurt.open() as store:
        for number in range(4):
            save(store, memory(PAGES, 20 + number))
        parts = [check(store, subset=parse_subset(f"{n}/3")) for n in (1, 2, 3)]
        assert sum(one.packs_read for one in parts) == parts[0].packs
        assert any(hurt.first.id in one.lost for one in parts)
        # Known from then on, whatever is read.
        least = check(store, subset=parse_subset("1%"))
        assert least.packs_read == 1
        assert hurt.first.id in least.lost
        assert not least.whole
    for text in ("0%", "101%", "3/2", "0/2", "1/x", "5", "nan%"):
        with pytest.raises(VmckptError, match="not part"):
            parse_subset(text)


@pytest.mark.parametrize("bad", range(1, 12))
def test_one_bad_read_of_good_bytes_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: int
) -> None:
    """Gc rewrites a pack and removes it: what one read did not give has to be read again."""
    location, ram = tmp_path / "store", memory(PAGES, 1)
    with create_store(str(location)) as store:
        first = save(store, ram)
        later, dirty = dirtied(ram, 100, 1)
        second = save(store, later, parent=first, dirty=dirty)
        store.remove([first.id])
    with open_store(str(location)) as store:
        read, reads = store.opened.backend.read, 0

        def badly(name: str, start: int = 0, length: int | None = None) -> bytes:
            nonlocal reads
            data = read(name, start, length)
            # Parts of packs: frames and names.
            if name.startswith("packs/") and start:
                reads += 1
                if reads == bad:
                    return data[:-1] + bytes([data[-1] ^ 1])
            return data

        monkeypatch.setattr(store.opened.backend, "read", badly)
        plan = plan_gc(store)
        assert plan.rewrites
        assert not collect(store, plan).lost
    with open_store(str(location)) as store:
        assert check(store).whole
        require_same(store, second, later)


def test_what_was_healed_since_the_check_is_not_removed_as_lost(hurt: Damaged) -> None:
    with hurt.open() as store:
        plan = plan_repair(store)
        assert list(plan.lost) == [hurt.first.id]
        with hurt.open() as other:  # while the check of a large store was still at it
            save(other, hurt.ram)
        done = repair(store, plan, remove_lost=True)
        assert (done.removed, done.restorable) == ([], [hurt.first.id])
        require_same(store, hurt.first, hurt.ram)
        assert check(store).whole


@pytest.mark.parametrize("folder", ["checkpoints/", "maps/", "packs/"])
@pytest.mark.parametrize("bad", [1, 2])
def test_one_bad_read_makes_no_checkpoint_a_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, bad: int
) -> None:
    """It would be removed as lost, or keep gc from its work until it is removed."""
    with create_store(str(tmp_path / "store")) as store:
        first = save(store, memory(PAGES, 1))
    with open_store(str(tmp_path / "store")) as store:
        backend, reads = store.opened.backend, 0
        read, read_end = backend.read, backend.read_end

        def badly(name: str, data: bytes) -> bytes:
            nonlocal reads
            counts = name.startswith(folder) and len(data) > 0
            reads += counts
            if counts and reads == bad:
                return data[:-1] + bytes([data[-1] ^ 1])
            return data

        monkeypatch.setattr(backend, "read", lambda name, *part: badly(name, read(name, *part)))

        def end(name: str, length: int) -> tuple[bytes, int]:
            data, size = read_end(name, length)
            return badly(name, data), size

        monkeypatch.setattr(backend, "read_end", end)
        report = check(store)
        assert report.whole, (report.findings, report.lost)
        reads = 0
        assert [one.id for one in store.manifests()] == [first.id]
        reads = 0
        assert not plan_gc(store).damaged


def test_a_check_reads_the_storage_itself_after_damage_too(tmp_path: Path) -> None:
    """What seems damaged is read once more past the cache: that does not switch it on again."""
    backend = CachedBackend(LocalBackend(tmp_path), tmp_path / "cache", bytes(32))
    with backend.off():
        with uncached(backend):
            pass
        assert backend._version("packs/x") is None
        backend._known["packs"] = {"x": (1, "v")}
        assert backend._version("packs/x") is None
    assert backend._version("packs/x") == (1, "v")
