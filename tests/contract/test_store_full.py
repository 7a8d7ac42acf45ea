"""A disk that is full at any write: a clear error, and the store as it was."""

import errno
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.guest_like import memory, require_same, save
from tests.store_work import make, require_right
from vmckpt.errors import StorageError
from vmckpt.store import chunk_sink
from vmckpt.store.backends.archive import NewArchive
from vmckpt.store.backends.files import storage_error
from vmckpt.store.check import check
from vmckpt.store.collect import collect, plan_gc
from vmckpt.store.copying import copy_checkpoints
from vmckpt.store.open import create_store, new_archive, open_store
from vmckpt.store.store import Store


class Full:
    """Lets so many calls that may need space through; the next ones fail as on a full disk."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.left: int | None = None
        self.calls = 0
        for name in ("write", "fsync"):
            patch.setattr(os, name, self._failing(getattr(os, name)))
        patch.setattr(Path, "rename", self._failing(Path.rename))
        patch.setattr(Path, "mkdir", self._failing(Path.mkdir))

    def _failing(self, call: Callable[..., object]) -> Callable[..., object]:
        def made(*args: object, **more: object) -> object:
            self.calls += 1
            if self.left is not None:
                if self.left == 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self.left -= 1
            return call(*args, **more)

        return made


@contextmanager
def lifted(full: Full) -> Iterator[None]:
    """There is space, for the block."""
    full.left, kept = None, full.left
    try:
        yield
    finally:
        full.left = kept


def attempts(
    store: Store, full: Full, folder: Path, archive: Path
) -> dict[str, Callable[[], object]]:
    """All that writes."""
    parent = store.manifests()[-1]

    def export() -> None:
        with new_archive(archive, store) as target:
            copy_checkpoints(store, target, store.manifests()[:1])

    def copy() -> None:
        with create_store(str(folder / "copy")) as target:
            copy_checkpoints(store, target, store.manifests())

    def incremental() -> None:
        make(store, 99, parent)

    def whole() -> None:
        make(store, 98, None)

    def gc() -> None:
        shutil.copytree(store.location, folder)
        with open_store(str(folder)) as same:
            *older, last = same.manifests()
            try:
                same.remove([manifest.id for manifest in older])
                assert plan_gc(same).rewrites
                collect(same, plan_gc(same))
            finally:
                with lifted(full):
                    assert check(same).whole
                    require_right(same, last)
                    collect(same, plan_gc(same))
                    assert plan_gc(same).freed_bytes == 0
                    require_right(same, last)

    return {"incremental": incremental, "full": whole, "export": export, "copy": copy, "gc": gc}


@pytest.mark.parametrize("what", ["incremental", "full", "export", "copy", "gc"])
def test_every_write_may_be_the_one_that_finds_no_space(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with create_store(str(tmp_path / "store")) as store:
        parent = None
        for seed in range(2):
            parent = make(store, seed, parent, pages=90)
        full = Full(monkeypatch)
        failures = 0
        while True:
            folder = tmp_path / str(failures)
            archive = tmp_path / f"{failures}.export"
            attempt = attempts(store, full, folder, archive)[what]
            before = [manifest.id for manifest in store.manifests()]
            full.left = failures
            try:
                attempt()
            except StorageError as exc:
                assert exc.why == "No space left on device"
                full.left = None
            else:
                full.left = None
                break
            failures += 1
            now = [manifest.id for manifest in store.manifests()]
            assert now == before
            assert not archive.exists()
            report = check(store)
            assert report.whole, report.findings
            for manifest in store.manifests():
                require_right(store, manifest)
        assert failures > 5
        assert check(store).whole
        collect(store, plan_gc(store))
        assert not store.opened.backend.leftovers()


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system with so much room."""
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(["mount", *options], check=False).returncode:
        pytest.skip("a small disk takes root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_disk_that_is_really_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path / "state"))
    ram = memory(1024, 1)
    with small_disk(tmp_path / "disk", "3M") as disk, create_store(str(disk / "store")) as store:
        first = save(store, ram)
        with pytest.raises(StorageError, match="No space left"):
            for seed in range(2, 9):
                save(store, memory(1024, seed))
        kept = store.manifests()
        assert check(store).whole
        require_same(store, first, ram)
        # Room comes back, and it goes on.
        store.remove([manifest.id for manifest in kept])
        collect(store, plan_gc(store))
        require_same(store, save(store, ram), ram)
        again = [sys.executable, "-m", "vmckpt.cli.entry", "store", "check", store.location]
        assert subprocess.run(again, check=False).returncode == 0


def test_an_export_that_finds_no_space_at_its_end_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packs of RAM and of disks take turns in the file, and are taken back in that order."""
    monkeypatch.setattr(chunk_sink, "MOST_BYTES", 256 << 10)
    add, left = NewArchive.add, 0

    def failing(archive: NewArchive, name: str, source: int, size: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            exc = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise storage_error(exc, name, archive.location)
        add(archive, name, source, size)

    monkeypatch.setattr(NewArchive, "add", failing)
    with create_store(str(tmp_path / "store")) as store:
        save(store, memory(208, 1))
        for count in itertools.count():
            left = count
            try:
                with new_archive(tmp_path / "export", store) as target:
                    copy_checkpoints(store, target, store.manifests())
            except StorageError as exc:
                assert exc.why == "No space left on device"
            else:
                break
            assert not (tmp_path / "export").exists()
    assert count > 8
