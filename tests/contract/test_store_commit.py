"""The end of a commit: answers of the store that are lost, and packs that go meanwhile."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.guest_like import memory, require_same, save
from vmckpt.errors import OutcomeUnknownError, StorageError
from vmckpt.store.backends.local import LocalBackend, LocalWriter
from vmckpt.store.check import check
from vmckpt.store.collect import collect, plan_gc
from vmckpt.store.errors import DamagedError
from vmckpt.store.open import create_store, open_store

PAGES = 64


class Publishing(LocalWriter):
    """A writer whose `publish` of a checkpoint is followed by `then`."""

    def __init__(self, backend: LocalBackend, name: str, then: Callable[[], None]) -> None:
        super().__init__(backend, name)
        self._then = then if name.startswith("checkpoints/") else lambda: None

    def publish(self) -> None:
        super().publish()
        self._then()


class Losing(LocalBackend):
    """A directory where something happens just after a checkpoint was put there."""

    then: Callable[[], None] = staticmethod(lambda: None)

    def write(self, name: str) -> LocalWriter:
        return Publishing(self, name, self.then)


def lost_answer() -> None:
    raise StorageError("cannot put it", why="the answer was lost", remedy="try again")


def test_undo_leaves_packs_that_another_writer_rests_on(tmp_path: Path) -> None:
    location, ram = str(tmp_path / "store"), memory(PAGES, 1)
    create_store(location).close()
    backend = Losing(Path(location))
    with open_store(location) as other, open_store(backend) as store:

        def then() -> None:
            save(other, ram, vm="other")
            lost_answer()

        backend.then = then
        with pytest.raises(StorageError, match="cannot put it"):
            save(store, ram)
        [kept] = other.manifests()
        assert kept.vm == "other"
        require_same(other, kept, ram)
        collect(other, plan_gc(other))
        require_same(other, kept, ram)
        assert check(other).whole


def test_what_undo_leaves_is_collected(tmp_path: Path) -> None:
    location = str(tmp_path / "store")
    create_store(location).close()
    backend = Losing(Path(location))
    backend.then = lost_answer
    with open_store(backend) as store:
        with pytest.raises(StorageError, match="cannot put it"):
            save(store, memory(PAGES, 1))
        assert not store.ids()
        assert backend.names("packs")
        collect(store, plan_gc(store))
        assert not backend.names("packs")
        assert not backend.names("maps")


def test_a_commit_whose_packs_went_is_no_commit(tmp_path: Path) -> None:
    location = tmp_path / "store"
    create_store(str(location)).close()
    backend = Losing(location)

    def then() -> None:
        for pack in (location / "packs").glob("[0-9a-f]*"):
            pack.unlink()

    backend.then = then
    with open_store(backend) as store:
        with pytest.raises(DamagedError, match="was not made"):
            save(store, memory(PAGES, 1))
        assert not store.ids()


def test_a_checkpoint_that_cannot_be_taken_back_is_an_unknown_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    location, ram = str(tmp_path / "store"), memory(PAGES, 1)
    create_store(location).close()
    backend = Losing(Path(location))

    def then() -> None:
        monkeypatch.setattr(backend, "remove", lambda name: lost_answer())
        lost_answer()

    backend.then = then
    with open_store(backend) as store:
        with pytest.raises(OutcomeUnknownError, match="is not known"):
            save(store, ram)
        [there] = store.manifests()
        require_same(store, there, ram)
