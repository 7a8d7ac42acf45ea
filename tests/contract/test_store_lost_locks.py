"""gc and a writer whose locks were lost, at every instant: what is committed stays whole."""

import errno
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.guest_like import Memory, memory, require_same, save
from vmckpt.errors import OperationFailedError, VmckptError
from vmckpt.store.backends.local import LocalBackend, LocalHeld, LocalWriter
from vmckpt.store.check import check
from vmckpt.store.collect import collect, plan_gc
from vmckpt.store.copying import copy_checkpoints
from vmckpt.store.damage.repair import plan_repair, repair
from vmckpt.store.errors import ThereAlreadyError
from vmckpt.store.files.manifest import PAGE_CHUNK_BYTES, Manifest
from vmckpt.store.files.naming import Called, IfTaken
from vmckpt.store.files.pins import new_pin
from vmckpt.store.open import create_store, open_store
from vmckpt.store.store import Store
from vmckpt.store.transaction import Origin, Transaction

PAGES = 64
SLOW = [pytest.mark.long, pytest.mark.timeout(1800)]


class Counted(LocalWriter):
    """Publishing is an instant of its own, before and after."""

    def publish(self) -> None:
        backend = self._backend
        assert isinstance(backend, Lockless)
        backend.instant()
        super().publish()
        backend.instant()


class Lockless(LocalBackend):
    """A directory whose locks keep none away; `then` is called at the instant number `at`."""

    locks_last = False
    at = -1
    then: Callable[[], None] = staticmethod(lambda: None)
    count = 0

    def instant(self) -> None:
        self.count += 1
        if self.count == self.at:
            self.then()

    @contextmanager
    def hold(self, name: str, *, shared: bool, wait_s: float = 0.0) -> Iterator[LocalHeld]:
        self.instant()
        yield LocalHeld()

    def versions(self, folder: str) -> dict[str, tuple[int, str]]:
        self.instant()
        return super().versions(folder)

    def remove(self, name: str) -> None:
        self.instant()
        super().remove(name)
        self.instant()

    def write(self, name: str) -> LocalWriter:
        return Counted(self, name)


def prepared(location: Path) -> tuple[Manifest, Memory]:
    """A store with a pack of which more than half is of no use, and what is needed of it."""
    ram = memory(PAGES, 1)
    with create_store(str(location)) as store:
        first = save(store, ram)
        kept = ram.copy()
        kept[: PAGES * 2 // 3] = 0
        second = save(store, kept)
        store.remove([first.id])
        return second, kept


def begun(store: Store) -> Transaction:
    """A writer that has found in the store what no checkpoint needs any longer."""
    ram = memory(PAGES, 1)
    new = store.begin("late")
    for name, size in (("ram", PAGE_CHUNK_BYTES), ("disk-0", 64 << 10)):
        area = new.area(name, size_bytes=ram.nbytes, chunk_bytes=size)
        area.put(np.arange(ram.nbytes // size), ram.tobytes())
    new.blob("device-state", ram[:3].tobytes() + b"end")
    return new


def collected_with_a_writer(
    location: Path, at: int, second: Manifest, kept: Memory
) -> tuple[int, bool]:
    """How many instants gc had, and whether the writer that commits at one of them did so."""
    backend = Lockless(location)
    committed: list[Manifest] = []
    with open_store(Lockless(location)) as late, open_store(backend) as store:
        new = begun(late)

        def commit() -> None:
            try:
                committed.append(new.commit({}))
            except VmckptError:
                new.abort()

        plan = plan_gc(store)
        backend.count, backend.at, backend.then = 0, at, commit
        try:
            collect(store, plan)
        finally:
            backend.at = -1
        if backend.count < at:
            commit()
        instants = backend.count
    require_whole(location, [(second, kept), *((one, memory(PAGES, 1)) for one in committed)])
    return instants, bool(committed)


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.long)])
def test_a_writer_that_commits_at_any_instant_of_gc(tmp_path: Path, step: int) -> None:
    made, at, committed = prepared(tmp_path / "made"), 0, set[bool]()
    while True:
        location = copied(tmp_path / "made", tmp_path / str(at))
        instants, is_committed = collected_with_a_writer(location, at, *made)
        committed.add(is_committed)
        if (at := at + step) > instants:
            break
    assert at > 20
    # Some commit in time, some are refused: none is committed and lost.
    assert committed == {True, False}


def test_gc_at_any_instant_of_a_commit(tmp_path: Path) -> None:
    second, kept = prepared(tmp_path / "made")
    at, instants, committed = 1, 1, set[bool]()
    while at <= instants:
        location = copied(tmp_path / "made", tmp_path / str(at))
        backend = Lockless(location)
        with open_store(backend) as late, open_store(Lockless(location)) as store:
            new = begun(late)
            backend.count, backend.at = 0, at
            backend.then = partial(void, partial(collect_now, store))
            made = list[Manifest]()
            with suppress(VmckptError):
                made.append(new.commit({}))
            new.abort()
            instants = max(instants, backend.count)
        committed.add(bool(made))
        require_whole(location, [(second, kept), *((one, memory(PAGES, 1)) for one in made)])
        at += 1
    assert committed == {True, False}


def test_two_that_write_a_pack_anew_do_not_overwrite_one_another(tmp_path: Path) -> None:
    second, kept = prepared(tmp_path / "store")
    backend = Lockless(tmp_path / "store")
    with open_store(backend) as store, open_store(str(tmp_path / "store")) as other:
        plans = plan_gc(store), plan_gc(other)
        assert plans[0].rewrites
        for at in range(1, 200):
            backend.count, backend.at = 0, at
            backend.then = partial(void, partial(collect_now, other))
            void(partial(collect_now, store))
            require_same(store, second, kept)
            if backend.count < at:
                break
        assert check(other).whole


class Losing(Lockless):
    """Its holder hears of it when it has `lost` its locks."""

    lost = False
    # With the first object whose name begins so.
    loses_with: str | None = None

    def write(self, name: str) -> LocalWriter:
        if self.loses_with is not None and name.startswith(self.loses_with):
            return _LostWith(self, name)
        return super().write(name)

    @contextmanager
    def hold(self, name: str, *, shared: bool, wait_s: float = 0.0) -> Iterator[LocalHeld]:
        self.instant()
        yield _Lost(self)


class _LostWith(Counted):
    def publish(self) -> None:
        super().publish()
        assert isinstance(self._backend, Losing)
        self._backend.lost = True


class _Lost(LocalHeld):
    def __init__(self, backend: Losing) -> None:
        self._backend = backend

    def require(self) -> None:
        if self._backend.lost:
            raise OperationFailedError("a lock in the store was lost", why="-", remedy="-")


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=SLOW)])
@pytest.mark.parametrize("hears", [False, True])
def test_a_gc_that_takes_back_what_another_has_taken_for_the_newest(
    tmp_path: Path, step: int, *, hears: bool
) -> None:
    """Its host slept while it wrote a pack again: its locks are lost, and another gc is over."""
    made = prepared(tmp_path / "made")
    for at in itertools.count(1, step):
        location = copied(tmp_path / "made", tmp_path / str(at))
        backend = Losing(location)
        with open_store(backend) as store, open_store(Lockless(location)) as other:
            plan = plan_gc(store)
            assert plan.rewrites

            def slept(backend: Losing = backend, other: Store = other) -> None:
                backend.lost = hears
                void(partial(collect_now, other))

            backend.count, backend.at, backend.then = 0, at, slept
            void(partial(collect, store, plan))
        require_whole(location, [made])
        shutil.rmtree(location)
        if backend.count < at:
            break
    assert at > 30


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=SLOW)])
def test_another_gc_comes_while_one_takes_back_what_it_has_written_anew(
    tmp_path: Path, step: int
) -> None:
    """A lock is lost as soon as the first pack's next generation is there."""
    made = prepared(tmp_path / "made")
    for at in itertools.count(1, step):
        location = copied(tmp_path / "made", tmp_path / str(at))
        backend = Losing(location)
        with open_store(backend) as store, open_store(Lockless(location)) as other:
            plan = plan_gc(store)
            backend.count, backend.at = 0, at
            backend.then = partial(void, partial(collect_now, other))
            backend.loses_with = "packs/"
            void(partial(collect, store, plan))
        require_whole(location, [made])
        shutil.rmtree(location)
        if backend.count < at:
            break
    assert at > 30


def test_a_generation_that_lacks_what_came_meanwhile_takes_none_with_it(tmp_path: Path) -> None:
    """Of a gc that lost its locks and died when that was there, and the one before it, too."""
    ram = memory(PAGES, 1)
    kept = ram.copy()
    kept[: PAGES * 2 // 3] = 0
    with create_store(str(tmp_path / "made")) as store:
        made = [(save(store, ram), ram), (save(store, kept), kept)]
    location = copied(tmp_path / "made", tmp_path / "store")
    with open_store(str(tmp_path / "made")) as store:
        store.remove([made[0][0].id])
        collect_now(store)
    before = {one.name for one in (location / "packs").glob("[0-9a-f]*")}
    late = {one.name for one in (tmp_path / "made/packs").glob("[0-9a-f]*")} - before
    assert late
    for name in late:
        shutil.copy(tmp_path / "made/packs" / name, location / "packs" / name)
    # Until the next gc what it lacks is read from the one before.
    require_whole(location, made)
    with open_store(str(location)) as store:
        assert check(store).whole
        assert not repair(store, plan_repair(store), remove_lost=True).removed
    require_whole(location, made)
    assert len(list((location / "packs").glob("[0-9a-f]*"))) == len(before)


@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("pins_first", [False, True])
def test_of_a_pin_and_a_removal_without_locks_one_wins_at_every_instant(
    tmp_path: Path, *, pins_first: bool, replaces: bool
) -> None:
    outcomes = set[tuple[bool, bool]]()
    for at in itertools.count(1):
        location = tmp_path / str(at)
        ram = memory(16, 1)
        with create_store(str(location)) as store:
            old = save(store, ram, name="n")
        backends = Lockless(location), Lockless(location)
        with open_store(backends[0]) as one, open_store(backends[1]) as other:
            done = {"pinned": False, "removed": False}

            def pin(store: Store, old: Manifest = old, done: dict[str, bool] = done) -> None:
                store.pin(new_pin(old.id, "keep", "me"))
                done["pinned"] = True

            def remove(store: Store, old: Manifest = old, done: dict[str, bool] = done) -> None:
                if replaces:
                    new = store.begin("vm", called=Called("n", IfTaken.REPLACE))
                    new.commit({"name": new.name})
                    done["removed"] = old.id in new.replaced
                else:
                    store.remove([old.id])
                    done["removed"] = True

            first, then = (pin, remove) if pins_first else (remove, pin)
            backends[0].at = at
            backends[0].then = partial(void, partial(then, other))
            void(partial(first, one))
        with open_store(str(location)) as after:
            is_there = old.id in after.ids()
            assert is_there != done["removed"]
            assert not (done["pinned"] and done["removed"])
            assert is_there or not done["pinned"]
        outcomes.add((done["pinned"], done["removed"]))
        if backends[0].count < at:
            break
    assert {(True, False), (False, True)} <= outcomes


class Asleep(Lockless):
    """Its host slept: locks that it had taken before are lost."""

    nights = 0

    @contextmanager
    def hold(self, name: str, *, shared: bool, wait_s: float = 0.0) -> Iterator[LocalHeld]:
        self.instant()
        yield _Overnight(self)


class _Overnight(LocalHeld):
    def __init__(self, backend: Asleep) -> None:
        self._backend, self._night = backend, backend.nights

    def require(self) -> None:
        if self._backend.nights != self._night:
            raise OperationFailedError("a lock in the store was lost", why="-", remedy="-")


@pytest.mark.parametrize("collects", [False, True])
def test_what_another_copy_has_put_there_or_found_there_stays(
    tmp_path: Path, *, collects: bool
) -> None:
    """The host of the first one sleeps at any instant; the second one, and a gc, come meanwhile."""
    ram = memory(PAGES, 1)
    with create_store(str(tmp_path / "source")) as source:
        first = save(source, ram)
    outcomes = set[tuple[int, bool]]()
    for at in itertools.count(1):
        location = tmp_path / str(at)
        create_store(str(location)).close()
        backend = Asleep(location)
        copied = list[int]()

        def sleep(backend: Asleep = backend, copied: list[int] = copied) -> None:
            backend.nights += 1
            with (
                open_store(str(tmp_path / "source")) as source,
                open_store(Lockless(backend.root)) as target,
            ):
                copied.append(len(copy_checkpoints(source, target, [first])))
                if collects:
                    collect_now(target)

        done = False
        with open_store(str(tmp_path / "source")) as source, open_store(backend) as target:
            backend.count, backend.at, backend.then = 0, at, sleep
            with suppress(VmckptError):
                copy_checkpoints(source, target, [first])
                done = True
        if backend.count < at:
            break
        require_whole(location, [(first, ram)])
        outcomes.add((copied[0], done))
    # The second one is faster, or finds it there; the first one hears that, or of its locks.
    assert outcomes >= {(1, True), (0, True)}
    assert at > 15


def test_a_writer_whose_locks_are_lost_removes_its_own_checkpoint_alone(tmp_path: Path) -> None:
    with create_store(str(tmp_path / "source")) as source:
        first = save(source, memory(PAGES, 1))
    create_store(str(tmp_path / "store")).close()
    backend = Losing(tmp_path / "store")
    with open_store(str(tmp_path / "source")) as source, open_store(backend) as target:
        begun = target.begin(first.vm, origin=Origin(first.id, first.vm, None, None))
        copy_checkpoints(source, target, [first])
        with begun, pytest.raises(ThereAlreadyError):
            begun.commit({})
        require_same(target, first, memory(PAGES, 1))


def test_gc_makes_room_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with create_store(str(tmp_path / "store")) as store:
        store.remove([save(store, memory(PAGES, 1)).id])

        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "write", full)
        assert collect(store, plan_gc(store)).freed_bytes > 0
        monkeypatch.undo()
        assert not plan_gc(store).dead


def test_gc_looks_at_its_lock_before_each_removal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with create_store(str(tmp_path / "store")) as store:
        for seed in range(4):
            gone = save(store, memory(PAGES, seed))
            store.remove([gone.id])
        plan = plan_gc(store)
        assert len(plan.dead) > 4
        asked: list[int] = []

        def require(_: LocalHeld) -> None:
            asked.append(1)
            if len(asked) == 4:
                raise OperationFailedError("a lock in the store was lost", why="-", remedy="-")

        monkeypatch.setattr(LocalHeld, "require", require)
        with pytest.raises(OperationFailedError):
            collect(store, plan)
        monkeypatch.undo()
        assert len(plan_gc(store).dead) == len(plan.dead) - 3


def require_whole(location: Path, wanted: list[tuple[Manifest, Memory]]) -> None:
    """These checkpoints are there and no others, before and after another gc."""
    with open_store(str(location)) as after:
        for _ in range(2):
            for manifest, ram in wanted:
                require_same(after, manifest, ram)
            assert set(after.ids()) == {manifest.id for manifest, _ in wanted}
            assert check(after).whole
            collect_now(after)


def copied(made: Path, location: Path) -> Path:
    shutil.copytree(made, location)
    return location


def collect_now(store: Store) -> None:
    collect(store, plan_gc(store))


def void(work: Callable[[], object]) -> None:
    """A gc that finds that another was faster says so, or does nothing."""
    try:
        work()
    except VmckptError:
        return
