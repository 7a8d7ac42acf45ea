"""A disk that cannot read some sectors (EIO): named by `check`, and nothing is given up for it."""

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.contract.test_store_bundles import Ready, merged, ready
from tests.contract.test_store_healing import ram_pack, save_two
from tests.guest_like import dirtied, memory, require_same, save
from tests.lent_store import lent
from tests.small_packs import require_all, require_whole
from vmckpt.store.backends.marks import mark_of
from vmckpt.store.check import check
from vmckpt.store.collect import collect, plan_gc
from vmckpt.store.damage.records import named
from vmckpt.store.damage.repair import plan_repair, repair
from vmckpt.store.damage.subset import parse_subset
from vmckpt.store.errors import DamagedError, UnreadableError
from vmckpt.store.files.config import NAMES
from vmckpt.store.files.manifest import PAGE_CHUNK_BYTES
from vmckpt.store.files.pins import new_pin
from vmckpt.store.open import create_store, open_store
from vmckpt.store.store import Store

__all__ = ["merged", "ready"]

PAGES = 256
Sectors = dict[str, range]


@pytest.fixture
def sectors(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sectors]:
    """Bytes that cannot be read, by the end of their file's name.

    As Linux does it, a read that begins before them returns what lies before them, without error.
    """
    bad: Sectors = {}
    right = os.pread

    def pread(fd: int, length: int, offset: int) -> bytes:
        path = str(Path(f"/proc/self/fd/{fd}").readlink())
        for name, span in bad.items():
            if path.endswith(name) and offset < span.stop and span.start < offset + length:
                if offset < span.start:
                    return right(fd, span.start - offset, offset)
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return right(fd, length, offset)

    monkeypatch.setattr(os, "pread", pread)
    yield bad


class Made:
    """A store with two checkpoints of a VM, of which the first has a pin."""

    def __init__(self, location: Path) -> None:
        self.location, self.first_ram = location, memory(PAGES, 1)
        self.second_ram, dirty = dirtied(self.first_ram, 20, 2)
        with create_store(str(location)) as store:
            self.first = save(store, self.first_ram)
            store.pin(new_pin(self.first.id, "kept", "me"))
            self.second = save(store, self.second_ram, parent=self.first, dirty=dirty)

    def open(self) -> Store:
        return open_store(str(self.location))

    def frames(self) -> tuple[str, range]:
        """The middle of a frame of the first one's RAM."""
        with self.open() as store:
            for pack_id in map(bytes.fromhex, self.first.packs):
                pack = store.opened.packs.find(pack_id)
                if pack.table.chunk_bytes == PAGE_CHUNK_BYTES:
                    at = int(pack.table.starts[0] + pack.table.stored[0] // 2)
                    return pack.name, range(at, at + 1)
        raise AssertionError

    def require_whole(self) -> None:
        with self.open() as store:
            require_same(store, self.first, self.first_ram)
            require_same(store, self.second, self.second_ram)
            collect(store, plan_gc(store))
            assert check(store).whole


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path / "store")


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def frame(made: Made) -> tuple[str, range]:
    return made.frames()


def table(made: Made) -> tuple[str, range]:
    name, _ = made.frames()
    size = (made.location / name).stat().st_size
    return name, range(size - 10, size)


def checkpoint(made: Made) -> tuple[str, range]:
    return f"checkpoints/{made.first.id}", range(10)


def base(made: Made) -> tuple[str, range]:
    (name,) = (made.location / "maps").glob("[0-9a-f]*")
    return f"maps/{name.name}", range(1 << 20)


def pin(made: Made) -> tuple[str, range]:
    (name,) = (made.location / "pins").iterdir()
    return f"pins/{name.name}", range(1 << 20)


def config(made: Made) -> tuple[str, range]:
    return f"{made.location.name}/{NAMES[0]}", range(1 << 20)


def other_config(made: Made) -> tuple[str, range]:
    return NAMES[2], range(1 << 20)


def record(made: Made) -> tuple[str, range]:
    with made.open() as store:
        pack = store.opened.packs.find(bytes.fromhex(made.first.packs[0]))
        none = pack.table.slots[:1]
        (name,) = store.opened.records.write([named(pack, none, pack.hashes()[none])])
    return f"damaged/{name}", range(1 << 20)


EVERY = [frame, table, checkpoint, base, pin, config, other_config, record]
LOSING = (frame, table, checkpoint, base)
Where = Callable[[Made], tuple[str, range]]


@pytest.mark.parametrize("where", EVERY)
def test_a_check_names_what_cannot_be_read_and_goes_on(
    made: Made, sectors: Sectors, where: Where
) -> None:
    name, span = where(made)
    sectors[name] = span
    with made.open() as store:
        report = check(store)
        assert report.checkpoints == 2
        found = {one.name: one.why for one in report.findings}
        assert os.strerror(errno.EIO) in found[name.removeprefix("store/")]
        assert (made.first.id in report.lost) == (where in LOSING)


@pytest.mark.parametrize("where", EVERY)
def test_nothing_is_given_up_for_what_cannot_be_read_now(
    made: Made, sectors: Sectors, where: Where
) -> None:
    """Checkpoints that do not need it are made, listed and restored; nothing is removed for it."""
    name, span = where(made)
    sectors[name] = span
    with made.open() as store:
        done = repair(store, plan_repair(store), remove_lost=True)
        assert not done.removed
        assert set(store.ids()) == {made.first.id, made.second.id}
        assert made.second.id in {one.id for one in store.manifests()}
        other = memory(PAGES, 9)
        third = save(store, other, vm="other")
        require_same(store, third, other)
    sectors.clear()
    made.require_whole()


@pytest.mark.parametrize("from_end", [2, 3])
def test_gc_gives_up_no_chunk_that_a_disk_cannot_read_now(
    made: Made, sectors: Sectors, from_end: int
) -> None:
    name, _ = made.frames()
    kept = made.first_ram.copy()
    kept[: PAGES // 2] = 0
    with made.open() as store:
        third = save(store, kept, vm="other")
        pins = store.pins()[made.first.id]
        store.unpin(pins[0])
        store.remove([made.first.id, made.second.id])
        pack = store.opened.packs.find(bytes.fromhex(name[6:38]))
        number = len(pack.table.counts) - from_end
        at = int(pack.table.starts[number] + pack.table.stored[number] // 2)
        sectors[name] = range(at, at + 1)
        plan = plan_gc(store)
        assert pack.id in {one.pack_id for one in plan.rewrites}
        assert pack.name in collect(store, plan).lost
    sectors.clear()
    with made.open() as store:
        collect(store, plan_gc(store))
        require_same(store, third, kept)
        assert check(store).whole


def test_gc_keeps_what_no_checkpoint_needs_until_it_can_be_read_or_is_much(
    tmp_path: Path, sectors: Sectors
) -> None:
    location = tmp_path / "store"
    one, two, second = save_two(location)
    with open_store(str(location)) as store:
        pack = store.opened.packs.find(bytes.fromhex(ram_pack(store, one)))
        at = int(pack.table.starts[0] + pack.table.stored[0] // 2)
        sectors[pack.name] = range(at, at + 1)
        assert check(store).lost
        store.remove([one.id])
        assert not plan_gc(store).rewrites
        require_same(store, two, second)
    sectors.clear()
    with open_store(str(location)) as store:
        collect(store, plan_gc(store))
        assert not store.opened.backend.names("damaged")
        assert check(store).whole
        require_same(store, two, second)


def test_what_cannot_be_read_is_read_elsewhere_once_it_was_stored_again(
    made: Made, sectors: Sectors
) -> None:
    name, span = made.frames()
    sectors[name] = span
    with made.open() as store:
        with pytest.raises(UnreadableError):
            require_same(store, made.first, made.first_ram)
        with pytest.raises(DamagedError):
            store.begin("vm", made.first.id)
        again = save(store, made.first_ram)
        for one, ram in ((made.first, made.first_ram), (again, made.first_ram)):
            require_same(store, one, ram)
        collect(store, plan_gc(store))
        assert not check(store).lost


def test_a_lent_store_says_that_a_disk_cannot_read_it(made: Made, sectors: Sectors) -> None:
    name, span = made.frames()
    sectors[name] = span
    with lent(made.location) as backend, open_store(backend) as store:
        with pytest.raises(UnreadableError):
            require_same(store, made.first, made.first_ram)
        assert made.first.id in check(store).lost
        done = repair(store, plan_repair(store), remove_lost=True)
        assert not done.removed
        assert os.strerror(errno.EIO) in done.kept[made.first.id]


def test_what_is_perhaps_in_a_bundle_whose_lists_cannot_be_read_is_not_lost(
    tmp_path: Path, sectors: Sectors, merged: Ready
) -> None:
    location = merged.copied(tmp_path / "store")
    (bundle,) = (location / "bundles").glob("[0-9a-f]*")
    sectors[bundle.name] = range(1 << 40)
    with open_store(str(location)) as store:
        assert len(store.manifests()) == len(merged.made)
        done = repair(store, plan_repair(store), remove_lost=True)
        assert not done.removed
        assert len(done.kept) == len(merged.made)
        with pytest.raises(UnreadableError):
            require_all(store, merged.made)
    sectors.clear()
    with open_store(str(location)) as store:
        require_all(store, merged.made)
        require_whole(store)


def damaged_with_a_copy(made: Made) -> tuple[str, str]:
    """Damage content of the store, and put it again: the checkpoint of the copy, and its pack."""
    name, span = made.frames()
    with made.open() as store:
        flip(made.location / name, span.start)
        check(store)
        again = save(store, made.first_ram, vm="other")
    (other,) = {f"{one}-0" for one in again.packs} - {f"{one}-0" for one in made.second.packs}
    return again.id, other


@pytest.mark.parametrize("subset", ["100%", "1/1000"])
def test_a_checkpoint_is_not_lost_whose_content_is_perhaps_elsewhere(
    made: Made, sectors: Sectors, subset: str
) -> None:
    """In its place it is damaged, and where else it is a disk cannot read it now."""
    _, other = damaged_with_a_copy(made)
    sectors[other] = range(1000, 1001)
    with made.open() as store:
        done = repair(store, plan_repair(store, subset=parse_subset(subset)), remove_lost=True)
        assert not done.removed
    sectors.clear()
    with made.open() as store:
        collect(store, plan_gc(store))  # it can be read again
        collect(store, plan_gc(store))  # so its content heals the other one
    made.require_whole()


@pytest.mark.parametrize("is_needed", [True, False])
def test_what_a_disk_could_not_read_once_still_stands_in_for_what_is_damaged(
    made: Made, sectors: Sectors, is_needed: bool
) -> None:
    """Elsewhere it was noted as damaged, and can be read again."""
    again, other = damaged_with_a_copy(made)
    sectors[other] = range(1000, 1001)
    with made.open() as store:
        check(store)
        if not is_needed:
            store.remove([again])
    sectors.clear()
    with made.open() as store:
        require_same(store, made.first, made.first_ram)
    with made.open() as store:
        plan = plan_repair(store, subset=parse_subset("1/1000"))
        assert not repair(store, plan, remove_lost=True).removed
        collect(store, plan_gc(store))
    made.require_whole()


@pytest.mark.parametrize("is_noted", [True, False])
def test_gc_keeps_what_heals_while_a_disk_cannot_read_it(
    made: Made, sectors: Sectors, is_noted: bool
) -> None:
    """No checkpoint needs it but for what is damaged: it was removed, and the chunks were lost."""
    again, other = damaged_with_a_copy(made)
    with made.open() as store:
        check(store)
        useless = save(store, memory(PAGES, 77))
        store.remove([again, useless.id])
    sectors[other] = range(1000, 1001)
    with made.open() as store:
        if is_noted:
            check(store)
        collect(store, plan_gc(store))
        left = store.opened.backend.names("packs")
        assert not {name for name in left if name.partition("-")[0] in useless.packs}
    sectors.clear()
    made.require_whole()


def test_a_store_whose_packs_are_on_a_disk_that_is_not_mounted_has_lost_nothing(
    made: Made,
) -> None:
    """One of an older vmckpt: see test_store_folders.py for those that have marks."""
    with made.open() as store:
        (made.location / mark_of(store.config.id)).rmdir()
    packs, away = made.location / "packs", made.location / "away"
    packs.rename(away)
    packs.mkdir()
    with made.open() as store:
        plan = plan_repair(store)
        assert plan.lost
        assert "not mounted" in plan.report.findings[0].why
        assert not repair(store, plan, remove_lost=True).removed
        with pytest.raises(UnreadableError, match="is missing"):
            require_same(store, made.first, made.first_ram)
    packs.rmdir()
    away.rename(packs)
    made.require_whole()


@pytest.mark.parametrize("chunks", [PAGES, 560])
def test_a_machine_with_too_little_memory_for_a_checkpoint_removes_none(
    made: Made, monkeypatch: pytest.MonkeyPatch, chunks: int
) -> None:
    """For the words of its maps, or for what these are made of."""
    with monkeypatch.context() as patch:
        patch.setattr("vmckpt.store.files.maps._MEMORY_BYTES", 24 * chunks)
        with made.open() as store:
            plan = plan_repair(store)
            assert plan.lost
            assert plan.refused
            assert "more memory" in plan.refused.remedy
            assert not repair(store, plan, remove_lost=True).removed
    made.require_whole()


def test_no_generation_goes_while_another_cannot_be_read(
    made: Made, sectors: Sectors, tmp_path: Path
) -> None:
    name, _ = made.frames()
    earlier = (made.location / name).read_bytes()
    kept = made.first_ram.copy()
    kept[: PAGES // 2] = 0
    with made.open() as store:
        third = save(store, kept, vm="other")
        store.unpin(store.pins()[made.first.id][0])
        store.remove([made.first.id, made.second.id])
        collect(store, plan_gc(store))
    (made.location / name).write_bytes(earlier)
    later = max((made.location / "packs").glob(f"{name[6:38]}-*"), key=lambda one: len(one.name))
    sectors[later.name] = range(1 << 40)
    with made.open() as store, pytest.raises(UnreadableError):
        collect(store, plan_gc(store))
    assert later.exists()
    assert (made.location / name).exists()
    sectors.clear()
    with made.open() as store:
        collect(store, plan_gc(store))
        require_same(store, third, kept)
        assert check(store).whole
