"""The state directory is this user's alone, and so is each directory that leads to it."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from vmckpt.errors import BusyError, RefusedError, StorageError
from vmckpt.hosts.ownership import require_own
from vmckpt.state.durable import NEW_FILE, make_dir_durably, replace
from vmckpt.store.backends.archive import ArchiveBackend, NewArchive
from vmckpt.store.collect import collect, plan_gc
from vmckpt.store.open import create_store, open_store

pytestmark = pytest.mark.unit

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")


def test_one_that_is_not_there_yet_is_this_users(tmp_path: Path) -> None:
    require_own(tmp_path / "new/state")
    require_own(tmp_path)


@needs_root
@pytest.mark.parametrize("where", ["state", "above"])
def test_another_users_directory_is_refused(tmp_path: Path, where: str) -> None:
    state = tmp_path / "above/state"
    state.mkdir(parents=True)
    os.chown(state if where == "state" else state.parent, NOBODY, NOBODY)
    with pytest.raises(RefusedError, match="not private to this user") as caught:
        require_own(state)
    assert f"uid {NOBODY}" in caught.value.why


@needs_root
def test_a_link_that_another_user_can_turn_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "state"
    link.symlink_to(tmp_path / "real")
    require_own(link)
    os.chown(link, NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(RefusedError):
        require_own(link)


@pytest.mark.parametrize(
    ("above", "state", "is_own"),
    [(0o1777, 0o700, True), (0o777, 0o700, False), (0o755, 0o777, False), (0o755, 0o1777, False)],
)
def test_where_every_user_may_write_the_sticky_bit_has_to_be(
    tmp_path: Path, above: int, state: int, *, is_own: bool
) -> None:
    directory = tmp_path / "above/state"
    directory.mkdir(parents=True)
    directory.chmod(state)
    directory.parent.chmod(above)
    if is_own:
        require_own(directory)
    else:
        with pytest.raises(RefusedError, match="not private to this user"):
            require_own(directory)


def test_a_file_that_was_put_there_is_neither_followed_nor_reused(tmp_path: Path) -> None:
    """Names are guessable; where others may write they may be taken."""
    target, path = tmp_path / "target", tmp_path / "record"
    target.write_text("another's")
    for name in ("record", ".record.part"):
        (tmp_path / name).symlink_to(target)
    held = os.open(target, os.O_RDONLY)
    replace(path, "secret")
    assert target.read_text() == "another's"
    assert os.read(held, 100) == b"another's"
    os.close(held)
    assert path.read_text() == "secret"
    assert path.lstat().st_mode & 0o7777 == 0o600
    path.unlink()
    path.symlink_to(tmp_path / "gone")
    with pytest.raises(FileExistsError):
        os.open(path, NEW_FILE, 0o600)


@needs_root
def test_a_directory_that_another_makes_meanwhile_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trap = tmp_path / "state"

    def absent_at_first(path: Path) -> bool:
        if path == trap and not os.path.lexists(trap):
            trap.mkdir()
            os.chown(trap, NOBODY, NOBODY)
            return False
        return os.path.lexists(path)

    monkeypatch.setattr(Path, "exists", absent_at_first)
    with pytest.raises(FileExistsError):
        make_dir_durably(trap / "vms")


@needs_root
@pytest.mark.parametrize("planted", ["file", "link", "hard link"])
def test_an_export_is_not_written_into_a_file_that_another_user_made(
    tmp_path: Path, planted: str
) -> None:
    """Its name while it is written is known, and an export's directory may be everybody's."""
    target = tmp_path / "target"
    target.touch(0o600)
    aside = tmp_path / ".out.vmckpt.partial"
    match planted:
        case "file":
            aside.touch()
            aside.chmod(0o666)
            os.chown(aside, NOBODY, NOBODY)
        case "link":
            aside.symlink_to(target)
        case _:
            aside.hardlink_to(target)
    with pytest.raises(StorageError):
        NewArchive(tmp_path / "out.vmckpt")
    assert target.stat().st_size == aside.stat().st_size == 0


def test_an_export_goes_over_what_a_killed_one_of_this_user_left(tmp_path: Path) -> None:
    aside = tmp_path / ".out.vmckpt.partial"
    aside.touch(0o600)
    NewArchive(tmp_path / "out.vmckpt").close()
    assert not aside.exists()


@pytest.mark.parametrize("ends", [NewArchive.finish, NewArchive.close])
def test_an_export_that_ends_as_another_begins_keeps_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: Callable[[NewArchive], None]
) -> None:
    path = tmp_path / "out.vmckpt"
    first, lock = NewArchive(path), fcntl.flock

    def as_it_ends(fd: int, how: int) -> None:
        ends(first)
        lock(fd, how)

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", as_it_ends)
        with pytest.raises(BusyError):
            NewArchive(path)
    assert path.exists() is (ends is NewArchive.finish)
    if path.exists():
        ArchiveBackend(path).close()


@needs_root
@pytest.mark.parametrize("folder", ["tmp", "maps", "doomed"])
def test_no_link_of_another_user_leads_gc_out_of_a_store(tmp_path: Path, folder: str) -> None:
    """Who can write to its location would have root empty any directory."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other/kept").write_text("kept")
    link = tmp_path / "store" / folder
    with create_store(str(tmp_path / "store")) as store:
        if link.is_dir():
            link.rmdir()
        link.symlink_to(tmp_path / "other")
        os.chown(link, NOBODY, NOBODY, follow_symlinks=False)
        with pytest.raises(StorageError, match="another user"):
            collect(store, plan_gc(store))
        with pytest.raises(StorageError, match="another user"):
            store.opened.backend.remove(f"{folder}/kept")
        with pytest.raises(StorageError, match="another user"):
            store.opened.backend.write(f"{folder}/new").publish()
        assert [one.name for one in (tmp_path / "other").iterdir()] == ["kept"]
        # The owner's own, to a larger disk, is followed.
        os.chown(link, 0, 0, follow_symlinks=False)
        assert store.opened.backend.names(folder) == {"kept": 4}


def test_a_pipe_in_the_place_of_a_file_keeps_no_reader_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "store")
    with pytest.raises(StorageError):
        open_store(str(tmp_path))
