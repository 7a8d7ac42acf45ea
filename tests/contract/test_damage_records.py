"""Names of chunks that were lost: whatever happens to what keeps them, they are not forgotten."""

import secrets
import shutil
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from tests.contract.test_store_healing import flip_frame, ram_pack
from tests.contract.test_store_lost_locks import Lockless
from tests.guest_like import Memory, dirtied, memory, require_same, save
from vmckpt.errors import VmckptError
from vmckpt.store.backends.backend import ObjectWriter
from vmckpt.store.check import check
from vmckpt.store.collect import collect, plan_gc
from vmckpt.store.damage import records
from vmckpt.store.damage.records import DAMAGED, MANY_RECORDS, RECORD_COPIES, Damage
from vmckpt.store.errors import DamagedError
from vmckpt.store.files.manifest import Manifest
from vmckpt.store.files.pack import Pack
from vmckpt.store.open import create_store, open_store
from vmckpt.store.store import Store

PAGES = 64
NAME = bytes(range(16))
SLOT = 3


def new_store(location: Path) -> Store:
    """A store with a checkpoint, and so with a pack."""
    store = create_store(str(location))
    save(store, memory(16, 1))
    return store


def a_pack(store: Store) -> Pack:
    return store.opened.packs.find(min(store.opened.packs.list_again()))


def lost_by_another_gc(pack: Pack, names: Mapping[int, bytes]) -> Damage:
    """What a gc notes of a generation that it has not published yet: every other gc keeps it."""
    return Damage(pack.id, pack.generation + 1, names)


def records_in(location: Path) -> list[Path]:
    return sorted((location / DAMAGED).iterdir())


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def name_of(location: Path, pack: Pack, slot: int) -> bytes:
    """What another process knows from the records."""
    with open_store(str(location)) as store:
        store.opened.records.refresh()
        return store.opened.records.names(pack.id, np.array([slot])).astype("<u8").tobytes()


@pytest.mark.parametrize("bad_reads", [1, 2, 3])
def test_a_record_that_was_read_badly_is_neither_removed_nor_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad_reads: int
) -> None:
    location = tmp_path / "store"
    with new_store(location) as store:
        pack = a_pack(store)
        store.opened.records.write([lost_by_another_gc(pack, {SLOT: NAME})])
    with open_store(str(location)) as store:
        read, left = store.opened.backend.read, bad_reads

        def badly(name: str, start: int = 0, length: int | None = None) -> bytes:
            nonlocal left
            data = read(name, start, length)
            if name.startswith(DAMAGED) and left:
                left -= 1
                return data[:-1] + bytes([data[-1] ^ 1])
            return data

        monkeypatch.setattr(store.opened.backend, "read", badly)
        store.opened.records.refresh()
        collect(store, plan_gc(store))
        assert not left
        assert store.opened.records.names(pack.id, np.array([SLOT])).tobytes() == NAME
    assert name_of(location, pack, SLOT) == NAME


def test_gc_writes_anew_the_copy_of_a_name_that_was_lost(tmp_path: Path) -> None:
    location = tmp_path / "store"
    with new_store(location) as store:
        pack = a_pack(store)
        for _ in range(RECORD_COPIES):
            store.opened.records.write([lost_by_another_gc(pack, {SLOT: NAME, SLOT + 1: b""})])
    before = set(records_in(location))
    flip(min(before))
    with open_store(str(location)) as store:
        collect(store, plan_gc(store))
    assert len(records_in(location)) == RECORD_COPIES
    [other] = before & set(records_in(location))
    flip(other)
    assert name_of(location, pack, SLOT) == NAME


def test_records_of_a_needed_pack_that_is_not_there_stay(tmp_path: Path) -> None:
    location = tmp_path / "store"
    with new_store(location) as store:
        pack = a_pack(store)
        store.opened.records.write([lost_by_another_gc(pack, {SLOT: NAME})])
    (location / pack.name).rename(tmp_path / "away")
    with open_store(str(location)) as store:
        collect(store, plan_gc(store))
    (tmp_path / "away").rename(location / pack.name)
    assert name_of(location, pack, SLOT) == NAME
    with open_store(str(location)) as store:
        store.remove(store.ids())
        collect(store, plan_gc(store))
    assert not records_in(location)


def test_a_record_is_of_a_size_that_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    location, slots = tmp_path / "store", 100
    monkeypatch.setattr(records, "_MOST_CHUNKS", slots - 1)
    monkeypatch.setattr(records, "_MOST_WRITTEN_CHUNKS", slots // 3)
    with new_store(location) as store:
        pack = a_pack(store)
        names = dict.fromkeys(range(slots), b"") | {slots - 1: NAME}
        other = Damage(pack.id, pack.generation + 1, {0: NAME})
        store.opened.records.write([other, Damage(pack.id, pack.generation, names), other])
    with open_store(str(location)) as store:
        store.opened.records.refresh()
        assert not store.opened.records.unreadable
        assert len(store.opened.records.slots(pack.id, pack.generation)) == slots
        assert store.opened.records.slots(pack.id, pack.generation + 1).tolist() == [0]
    assert name_of(location, pack, slots - 1) == NAME


def test_damaged_records_do_not_keep_many_from_becoming_one(tmp_path: Path) -> None:
    location = tmp_path / "store"
    with new_store(location) as store:
        pack, bad = a_pack(store), 4
        for slot in range(MANY_RECORDS + 1 + bad):
            store.opened.records.write([lost_by_another_gc(pack, {SLOT + slot: NAME})])
    for path in records_in(location)[:bad]:
        flip(path)
    with open_store(str(location)) as store:
        collect(store, plan_gc(store))
        assert len(records_in(location)) == RECORD_COPIES
        known = store.opened.records.slots(pack.id, pack.generation + 1)
        assert len(known) == MANY_RECORDS + 1


def test_a_name_that_is_learned_later_is_written_down(tmp_path: Path) -> None:
    location = tmp_path / "store"
    with new_store(location) as store:
        pack, note = a_pack(store), store.opened.records.note
        for name in (b"", NAME, NAME, b""):
            assert note([Damage(pack.id, pack.generation, {0: name})])
    assert len(records_in(location)) == 2
    assert name_of(location, pack, 0) == NAME


def test_a_frame_whose_name_is_learned_later_is_noted_once_more(tmp_path: Path) -> None:
    location = tmp_path / "store"
    with new_store(location) as store:
        pack, known = a_pack(store), store.opened.records
        slots = pack.table.frame_slots(0).tolist()
        known.write([Damage(pack.id, pack.generation, dict.fromkeys(slots, b""))])
        for _ in range(2):
            known.note_frame(pack, 0)
    assert len(records_in(location)) == 2
    assert name_of(location, pack, slots[0]) == pack.hashes()[slots[0]].astype("<u8").tobytes()


def test_threads_that_meet_a_frame_at_once_write_one_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = tmp_path / "store"
    with new_store(location) as store:
        pack, backend = a_pack(store), store.opened.backend
        write, both = backend.write, threading.Barrier(2)

        def slowly(name: str) -> ObjectWriter:
            with suppress(threading.BrokenBarrierError):
                both.wait(0.3)  # the other one, where it does not wait for this one
            return write(name)

        monkeypatch.setattr(backend, "write", slowly)
        threads = [
            threading.Thread(target=store.opened.records.note_frame, args=(pack, 0))
            for _ in range(2)
        ]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    assert len(records_in(location)) == 1


class History(NamedTuple):
    """A store with two checkpoints; the second one needs little of the first one's pack."""

    first: Manifest
    second: Manifest
    ram: Memory
    pack: str


def prepared(location: Path) -> History:
    before = memory(PAGES, 1)
    with create_store(str(location)) as store:
        first = save(store, before)
        after, dirty = dirtied(before, PAGES // 2, 1)
        second = save(store, after, parent=first, dirty=dirty)
        return History(first, second, after, ram_pack(store, first))


def hurt_before_gc(location: Path, history: History) -> None:
    """A damaged frame in the pack that gc is to write again."""
    with open_store(str(location)) as store:
        store.remove([history.first.id])
    flip_frame(location, history.pack)


def flip_hashes(location: Path, pack_id: str, *, spare: bool = False) -> None:
    """Flip a bit of the names of a pack, or of their spare copy."""
    with open_store(str(location)) as store:
        pack = store.opened.packs.find(bytes.fromhex(pack_id))
        at = pack._hash_span[0] + 20 if not spare else int(pack.table.starts[-1]) + 20
        path = location / pack.name
    flip(path, at)


@pytest.mark.parametrize("collected", ["never", "before", "after"])
def test_a_frame_and_its_names_are_damaged_and_heal(tmp_path: Path, collected: str) -> None:
    location = tmp_path / "store"
    history = prepared(location)
    two, second, pack = history.second, history.ram, history.pack
    hurt_before_gc(location, history)
    if collected == "before":
        with open_store(str(location)) as store:
            assert collect(store, plan_gc(store)).lost
    flip_hashes(location, pack)
    if collected == "after":
        with open_store(str(location)) as store:
            assert collect(store, plan_gc(store)).lost
    with open_store(str(location)) as store:
        assert two.id in check(store).lost
        save(store, second, vm="other")
        require_same(store, two, second)
        assert collect(store, plan_gc(store)).healed
        require_same(store, two, second)
        assert check(store).whole


def test_names_of_what_gc_lost_outlast_their_records(tmp_path: Path) -> None:
    location = tmp_path / "store"
    history = prepared(location)
    two, second = history.second, history.ram
    hurt_before_gc(location, history)
    with open_store(str(location)) as store:
        assert collect(store, plan_gc(store)).lost
    assert records_in(location)
    for path in records_in(location):
        flip(path)
    with open_store(str(location)) as store:
        # Neither are they forgotten, nor does anything rest on what is not there.
        collect(store, plan_gc(store))
        save(store, second, vm="other")
        require_same(store, two, second)
        assert collect(store, plan_gc(store)).healed
        assert check(store).whole
        require_same(store, two, second)


@pytest.mark.parametrize("meet", [check, plan_gc])
def test_nothing_starts_from_what_gc_lost_and_has_no_record(
    tmp_path: Path, meet: Callable[[Store], object]
) -> None:
    location = tmp_path / "store"
    history = prepared(location)
    hurt_before_gc(location, history)
    with open_store(str(location)) as store:
        assert collect(store, plan_gc(store)).lost
    for path in records_in(location):
        flip(path)
    with open_store(str(location)) as store:
        meet(store)
    with (
        open_store(str(location)) as store,
        pytest.raises(DamagedError, match="chunks are damaged"),
    ):
        store.begin("vm", history.second.id)


@pytest.mark.parametrize("spare", [False, True])
def test_a_damaged_copy_of_the_names_is_found_and_written_anew(tmp_path: Path, spare: bool) -> None:
    location, ram = tmp_path / "store", memory(PAGES, 1)
    with create_store(str(location)) as store:
        first = save(store, ram)
        pack = ram_pack(store, first)
    flip_hashes(location, pack, spare=spare)
    with open_store(str(location)) as store:
        report = check(store)
        assert [pack in one.name for one in report.findings] == [True]
        assert not report.lost
        # Its content is still found by name.
        before = store.opened.packs.list_again()
        again = save(store, ram, vm="other")
        assert store.opened.packs.list_again() == before
        collect(store, plan_gc(store))
        assert check(store).whole
        for one in (first, again):
            require_same(store, one, ram)


def test_a_pack_of_an_older_vmckpt_has_its_names_once(tmp_path: Path) -> None:
    """That one reads the spare copy as a frame that holds nothing."""
    location = tmp_path / "store"
    with new_store(location) as store:
        pack = a_pack(store)
        assert pack.frame(len(pack.table.counts) - 1) == b""
        spare = pack.spare_hashes()
        assert spare is not None
        assert np.array_equal(spare, pack.stored_hashes())
        assert len(pack.table.frame_slots(len(pack.table.counts) - 1)) == 0


@pytest.mark.parametrize("hurt_meanwhile", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize("first_is_newer", [False, True])
def test_two_gcs_without_a_lock_forget_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hurt_meanwhile: bool, first_is_newer: bool
) -> None:
    """The other gc does all of its work at any one instant of the first."""
    history = prepared(tmp_path / "made")
    if not hurt_meanwhile:
        hurt_before_gc(tmp_path / "made", history)
    at, forgotten = 0, list[int]()
    while True:
        at += 1
        location = tmp_path / f"at-{at}"
        shutil.copytree(tmp_path / "made", location)
        backend = Lockless(location)

        def other(location: Path = location) -> None:
            if hurt_meanwhile:
                hurt_before_gc(location, history)
            monkeypatch.setattr(secrets, "randbelow", lambda _: 1 - first_is_newer)
            with open_store(Lockless(location)) as store:
                collect(store, plan_gc(store))
            monkeypatch.setattr(secrets, "randbelow", lambda _: int(first_is_newer))

        monkeypatch.setattr(secrets, "randbelow", lambda _: int(first_is_newer))
        with open_store(backend) as store:
            plan = plan_gc(store)
            backend.count, backend.at, backend.then = 0, at, other
            with suppress(VmckptError):  # the other one has removed what it was to rewrite
                collect(store, plan)
        if backend.count < at:
            break
        with open_store(str(location)) as store:
            pack = store.opened.packs.find(bytes.fromhex(history.pack))
            store.opened.records.refresh()
            slots = store.opened.records.slots(pack.id, pack.generation)
            if not store.opened.records.names(pack.id, slots).any():
                forgotten.append(at)
            save(store, history.ram, vm="other")
            require_same(store, history.second, history.ram)
        shutil.rmtree(location)
    assert at > 10
    assert not forgotten
