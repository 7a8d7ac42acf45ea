"""Another directory in the place of a folder of a store: an unmounted disk's mount point."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.commands import vmckpt
from tests.guest_like import Memory, memory, require_same, save
from tests.lent_store import lent
from vmckpt.errors import OutcomeUnknownError, StorageError
from vmckpt.store.backends.local import LocalBackend
from vmckpt.store.backends.marks import mark_of
from vmckpt.store.check import check
from vmckpt.store.collect import collect, plan_gc
from vmckpt.store.damage.repair import plan_repair, repair
from vmckpt.store.files.config import OBJECT_FOLDERS
from vmckpt.store.files.manifest import Manifest
from vmckpt.store.open import create_store, open_store
from vmckpt.store.store import Store

PAGES = 64
NOT_OWN = "is not the directory of this store"


class Kept:
    """A store with a checkpoint, whose folders may be somewhere else."""

    def __init__(self, folder: Path) -> None:
        self.location, self.away = folder / "store", folder / "away"
        self.ram: Memory = memory(PAGES, 1)
        with create_store(str(self.location)) as store:
            self.id = store.config.id
            self.made: Manifest = save(store, self.ram)

    @property
    def mark(self) -> Path:
        """Without it the store is one of an older vmckpt."""
        return self.location / mark_of(self.id)

    def unmount(self, folder: str) -> Path:
        """There is an empty directory in its place."""
        (self.location / folder).rename(self.away)
        (self.location / folder).mkdir()
        return self.location / folder

    def mount(self, folder: str) -> None:
        """It is there again."""
        shutil.rmtree(self.location / folder, ignore_errors=True)
        self.away.rename(self.location / folder)

    def forget_marks(self) -> None:
        """As an older vmckpt has made it."""
        self.mark.rmdir()
        for folder in OBJECT_FOLDERS:
            (self.location / folder / self.mark.name).rmdir()

    def require_whole(self) -> None:
        with open_store(str(self.location)) as store:
            collect(store, plan_gc(store))
            assert check(store).whole
            require_same(store, self.made, self.ram)


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path)


def collected(store: Store) -> None:
    collect(store, plan_gc(store))


def added(store: Store) -> None:
    save(store, memory(PAGES, 2))


def repaired(store: Store) -> None:
    repair(store, plan_repair(store), remove_lost=True)


def emptied(location: Path) -> None:
    """By who wants none of it any longer: all but directories, as rm does."""
    for one in location.iterdir():
        if one.is_file():
            one.unlink()


@pytest.mark.parametrize("command", [collected, added, check, repaired, plan_gc])
@pytest.mark.parametrize("folder", OBJECT_FOLDERS)
def test_a_mount_point_is_no_folder_of_a_store(
    kept: Kept, folder: str, command: Callable[[Store], object]
) -> None:
    there = kept.unmount(folder)
    with (
        open_store(str(kept.location)) as store,
        pytest.raises(StorageError, match=NOT_OWN) as error,
    ):
        command(store)
    assert "not mounted" in error.value.why
    assert "store accept" in error.value.remedy
    assert not list(there.iterdir())
    kept.mount(folder)
    kept.require_whole()


@pytest.mark.parametrize("folder", OBJECT_FOLDERS)
def test_a_folder_that_is_gone_is_not_empty(kept: Kept, folder: str) -> None:
    (kept.location / folder).rename(kept.away)
    with open_store(str(kept.location)) as store:
        for command in (collected, added, repaired):
            with pytest.raises(StorageError, match=NOT_OWN):
                command(store)
    kept.away.rename(kept.location / folder)
    kept.require_whole()


def test_checkpoints_are_neither_removed_nor_listed_where_they_are_not(kept: Kept) -> None:
    kept.unmount("checkpoints")
    with open_store(str(kept.location)) as store:
        for command in (Store.catalogue, Store.ids, lambda one: one.remove([kept.made.id])):
            with pytest.raises(StorageError, match=NOT_OWN):
                command(store)
    kept.mount("checkpoints")
    kept.require_whole()


def test_maps_that_are_not_mounted_are_not_missing(kept: Kept) -> None:
    with open_store(str(kept.location)) as store:
        kept.unmount("maps")
        with pytest.raises(StorageError, match=f"maps .*{NOT_OWN}"):
            require_same(store, kept.made, kept.ram)


def test_another_stores_folder_is_not_this_ones(kept: Kept, tmp_path: Path) -> None:
    other = tmp_path / "other"
    with create_store(str(other)) as store:
        store.remove([save(store, kept.ram).id])
    shutil.copytree(other / "checkpoints", kept.unmount("checkpoints"), dirs_exist_ok=True)
    with open_store(str(kept.location)) as store, pytest.raises(StorageError, match=NOT_OWN):
        collected(store)
    kept.mount("checkpoints")
    kept.require_whole()


def test_a_disk_that_goes_while_a_checkpoint_is_made_takes_none(kept: Kept) -> None:
    class Going(LocalBackend):
        def folder(self, name: str) -> Path:
            found = super().folder(name)
            if name.startswith("checkpoints/") and not kept.away.exists():
                kept.unmount("checkpoints")
            return found

    with (
        open_store(Going(kept.location)) as store,
        pytest.raises(OutcomeUnknownError, match="not kn"),
    ):
        added(store)
    assert not list((kept.location / "checkpoints").iterdir())
    kept.mount("checkpoints")
    kept.require_whole()


def test_a_store_all_of_whose_checkpoints_were_removed_is_collected(kept: Kept) -> None:
    with open_store(str(kept.location)) as store:
        store.remove([kept.made.id])
        collected(store)
        assert not store.opened.backend.names("packs")
        added(store)
        assert check(store).whole


@pytest.mark.parametrize("command", [collected, added])
def test_a_store_of_before_is_marked_by_who_changes_it(
    kept: Kept, command: Callable[[Store], object]
) -> None:
    kept.forget_marks()
    with open_store(str(kept.location)) as store:
        assert check(store).whole
        assert not kept.mark.exists()
        doomed = save(store, memory(PAGES, 3)) if command is collected else None
        if doomed:
            store.remove([doomed.id])
            kept.forget_marks()
    with open_store(str(kept.location)) as store:
        command(store)
    assert kept.mark.exists()
    kept.unmount("checkpoints")
    with open_store(str(kept.location)) as store, pytest.raises(StorageError, match=NOT_OWN):
        collected(store)
    kept.mount("checkpoints")
    kept.require_whole()


@pytest.mark.parametrize("folder", ["checkpoints", "maps", "packs"])
def test_a_store_of_before_whose_disk_is_not_mounted_is_not_marked(kept: Kept, folder: str) -> None:
    kept.forget_marks()
    kept.unmount(folder)
    (kept.location / folder / "NOT MOUNTED").touch()
    with open_store(str(kept.location)) as store:
        with pytest.raises(StorageError, match="not certain"):
            added(store)
        if folder == "checkpoints":
            with pytest.raises(StorageError, match="not certain"):
                collected(store)
    assert not kept.mark.exists()
    kept.mount(folder)
    kept.require_whole()


def test_gc_makes_room_on_a_disk_that_is_too_full_for_marks(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with open_store(str(kept.location)) as store:
        other = save(store, memory(PAGES, 4))
        kept.forget_marks()
    with open_store(str(kept.location)) as store, monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", full)
        store.remove([other.id])
        assert collect(store, plan_gc(store)).freed_bytes
    assert not kept.mark.exists()
    kept.require_whole()


@pytest.fixture(params=["here", "lent"])
def backend(request: pytest.FixtureRequest, kept: Kept) -> Iterator[object]:
    if request.param == "here":
        yield LocalBackend(kept.location)
        return
    with lent(kept.location) as near:
        yield near


@pytest.mark.parametrize("marked", [True, False])
def test_what_is_accepted_is_the_stores(kept: Kept, backend: LocalBackend, marked: bool) -> None:
    """All checkpoints were removed by hand, mark and all."""
    if not marked:
        kept.forget_marks()
    shutil.rmtree(kept.unmount("checkpoints"))
    with open_store(backend) as store:
        with pytest.raises(StorageError, match=NOT_OWN if marked else "not certain"):
            added(store)
        backend.accept_folders()
        collected(store)
        assert not store.opened.backend.names("packs")
        added(store)
        assert check(store).whole


def test_a_client_that_may_only_add_accepts_nothing(kept: Kept) -> None:
    with lent(kept.location, append_only=True) as near:
        near.accept_folders()
        kept.unmount("checkpoints")
        with pytest.raises(StorageError, match=NOT_OWN):
            near.accept_folders()
        assert not list((kept.location / "checkpoints").iterdir())
    kept.mount("checkpoints")
    kept.require_whole()


def test_accept_as_it_is_typed(kept: Kept, tmp_path: Path) -> None:
    kept.unmount("checkpoints")
    done = vmckpt(tmp_path / "state", "store", "gc", str(kept.location))
    assert (done.returncode, NOT_OWN in done.stderr) == (11, True)
    assert not vmckpt(tmp_path / "state", "store", "accept", str(kept.location)).returncode
    assert not vmckpt(tmp_path / "state", "store", "gc", str(kept.location)).returncode


def test_marks_are_what_docs_say_and_no_objects(kept: Kept) -> None:
    for folder in ("", *OBJECT_FOLDERS):
        [mark] = (kept.location / folder).glob("of-store-*")
        assert (mark.name, mark.is_dir()) == (f"of-store-{kept.id}", True)
    backend = LocalBackend(kept.location)
    assert not any("of-store" in name for one in OBJECT_FOLDERS for name in backend.names(one))
