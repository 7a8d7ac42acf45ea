"""Of one VM in one store a name is there once; --replace takes the old one away last."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from tests.contract.test_stores import Places, locations, server
from tests.guest_like import RAM, memory, require_same, save
from vmckpt.errors import BusyError, RefusedError, StorageError
from vmckpt.store.backends.local import LocalWriter
from vmckpt.store.check import check
from vmckpt.store.copying import copy_checkpoints
from vmckpt.store.files.manifest import PAGE_CHUNK_BYTES, Manifest
from vmckpt.store.files.naming import Called, IfTaken
from vmckpt.store.files.pins import new_pin
from vmckpt.store.open import create_store, open_store
from vmckpt.store.sealing.keys import from_environment
from vmckpt.store.store import Store
from vmckpt.store.transaction import Transaction

__all__ = ["locations", "server"]


@pytest.fixture
def store(locations: Places) -> Iterator[Store]:
    with create_store(locations("one"), from_environment()) as made:
        yield made


def begin(store: Store, name: str, if_taken: IfTaken = IfTaken.REFUSE) -> Transaction:
    return store.begin("vm", called=Called(name, if_taken))


def make(store: Store, name: str, seed: int, if_taken: IfTaken = IfTaken.REFUSE) -> Manifest:
    ram = memory(16, seed)
    with begin(store, name, if_taken) as new:
        area = new.area(RAM, size_bytes=ram.nbytes, chunk_bytes=PAGE_CHUNK_BYTES)
        area.put(np.arange(len(ram)), ram.tobytes())
        return new.commit({"name": new.name})


def names(store: Store) -> list[str]:
    return [str(one.facts["name"]) for one in store.manifests()]


def test_a_name_that_is_taken_is_refused_before_anything_is_written(store: Store) -> None:
    first = make(store, "before", 1)
    with pytest.raises(RefusedError, match="already") as refused:
        make(store, "before", 2)
    assert first.id[:12] in refused.value.why
    assert "--replace" in refused.value.remedy
    # Another VM's, and a copy's, are their own.
    save(store, memory(16, 3), vm="other", name="before")
    assert names(store) == ["before", "before"]
    assert check(store).whole


def test_names_that_vmckpt_makes_up_get_a_number(store: Store) -> None:
    for seed in range(3):
        make(store, "x" * 40, seed, IfTaken.NUMBER)
    assert names(store) == ["x" * 40, f"{'x' * 38}-2", f"{'x' * 38}-3"]


def test_of_writers_at_once_one_has_the_name(store: Store) -> None:
    told: list[str] = []
    together = threading.Barrier(4)

    def attempt(seed: int) -> None:
        with open_store(store.location, from_environment()) as mine:
            together.wait()
            try:
                make(mine, "mine", seed)
                told.append("made")
            except (BusyError, RefusedError):
                told.append("refused")

    writers = [threading.Thread(target=attempt, args=(seed,)) for seed in range(4)]
    for one in writers:
        one.start()
    for one in writers:
        one.join()
    # In object storage those that come at once may all be sent away.
    assert told.count("made") <= 1
    assert names(store) == ["mine"] * told.count("made")


def test_the_old_one_goes_when_the_new_one_is_there(store: Store) -> None:
    old = make(store, "before", 1)
    with begin(store, "before", IfTaken.REPLACE) as new:
        assert store.ids() == [old.id]
        made = new.commit({"name": new.name})
    assert (store.ids(), new.replaced) == ([made.id], [old.id])


@pytest.mark.parametrize("locations", ["directory"], indirect=True)
def test_a_new_one_that_fails_leaves_the_old_one(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    ram = memory(64, 1)
    old = save(store, ram, name="before")
    with begin(store, "before", IfTaken.REPLACE):
        pass  # given up
    assert store.ids() == [old.id]

    def full(self: LocalWriter) -> None:
        raise StorageError("cannot write", why="no space", remedy="-")

    with monkeypatch.context() as broken, pytest.raises(StorageError):
        broken.setattr(LocalWriter, "publish", full)
        make(store, "before", 2, IfTaken.REPLACE)
    assert store.ids() == [old.id]
    require_same(store, old, ram)


def test_one_that_is_pinned_or_read_is_not_replaced(store: Store) -> None:
    old = make(store, "before", 1)
    with (
        store.read(old.id),
        open_store(store.location, from_environment()) as other,
        pytest.raises(BusyError),
    ):
        make(other, "before", 2, IfTaken.REPLACE)
    pin = new_pin(old.id, "the audit", "me")
    store.pin(pin)
    with pytest.raises(RefusedError, match="is pinned"):
        make(store, "before", 2, IfTaken.REPLACE)
    store.unpin(pin)
    with ExitStack() as stack:
        new = stack.enter_context(begin(store, "before", IfTaken.REPLACE))
        with open_store(store.location, from_environment()) as other, pytest.raises(BusyError):
            other.pin(pin)
        new.commit({"name": new.name})


@pytest.mark.parametrize("locations", ["directory"], indirect=True)
def test_an_old_one_that_stays_is_told_and_the_next_replaces_both(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = make(store, "before", 1)
    failure = StorageError("cannot remove", why="the place is read-only", remedy="-")

    def fails(name: str) -> None:
        raise failure

    with begin(store, "before", IfTaken.REPLACE) as new, monkeypatch.context() as broken:
        broken.setattr(store.opened.backend, "remove", fails)
        made = new.commit({"name": new.name})
    assert (new.replaced, new.not_replaced) == ([], failure)
    assert sorted(store.ids()) == sorted([old.id, made.id])
    last = make(store, "before", 3, IfTaken.REPLACE)
    assert store.ids() == [last.id]


@pytest.mark.parametrize("locations", ["directory"], indirect=True)
def test_copies_keep_the_names_that_they_had(store: Store, locations: Places) -> None:
    make(store, "before", 1)
    with create_store(locations("two")) as second:
        make(second, "before", 2)
        copy_checkpoints(store, second, store.manifests())
        assert names(second) == ["before", "before"]
        # What was there twice before goes at once.
        make(second, "before", 3, IfTaken.REPLACE)
        assert names(second) == ["before"]
