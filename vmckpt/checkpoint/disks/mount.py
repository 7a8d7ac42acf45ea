"""Mount a checkpoint by FUSE: its disks as raw image files, read-only.

Needs the Python package mfusepy and libfuse 3, and fusermount3 unless you are root. No other module
needs them.
"""

import asyncio
import errno
import os
import stat
from collections.abc import Callable, Iterator
from ctypes.util import find_library
from functools import partial
from pathlib import Path
from typing import Any

from vmckpt.checkpoint.catalogue.catalogue import CatalogueEntry
from vmckpt.checkpoint.catalogue.location import Key
from vmckpt.checkpoint.disks.serve_disks import Failed, readers
from vmckpt.checkpoint.disks.stored_disks import DiskReader
from vmckpt.deadlines import poll
from vmckpt.errors import OperationFailedError, RefusedError, VmckptError
from vmckpt.hosts.inventory.inventory import local_host
from vmckpt.installing import Need, advice_here
from vmckpt.sequence.in_thread import in_thread
from vmckpt.sequence.steps import finish

BEGIN_S, END_S, POLL_S = 10.0, 2.0, 0.02


async def mount(
    entry: CatalogueEntry,
    folder: Path,
    failed: Failed,
    mounted: Callable[[list[str]], None],
    key: Key = None,
) -> None:
    """Mount it at `folder`, an empty directory, until it is unmounted or this is cancelled.

    The checkpoint is not removed meanwhile. `mounted` receives the file names once they exist;
    `failed` receives each read that the store could not serve (the reader gets EIO). Raises
    RefusedError, OperationFailedError, and as `readers`.
    """
    fuse = _library()
    _require_fit(folder)
    async with readers(entry, key) as disks:
        files = {f"{one.disk.name}.raw": one for one in disks}
        tree = _Tree(files, entry.manifest.created_unix_s, failed)
        options = {"fsname": f"vmckpt-{entry.id[:12]}", "ro": True, "default_permissions": True}
        run = partial(fuse, tree, str(folder), foreground=True, nothreads=True, **options)
        serving = asyncio.ensure_future(in_thread(run))
        try:
            await _until_mounted(folder, serving)
            mounted(sorted(files))
            await asyncio.shield(serving)
        except RuntimeError as exc:  # libfuse has said why on stderr
            raise OperationFailedError(
                f"{folder} could not be mounted",
                why=f"libfuse ended with {exc}",
                remedy="see above; /dev/fuse and fusermount3 are needed",
            ) from exc
        finally:
            await finish(_unmounted(folder, serving))


def _library() -> Any:
    """The FUSE binding. Raises RefusedError if it is missing."""
    path = find_library("fuse3")
    if path is None:
        raise _missing("there is no libfuse 3 on this machine")
    os.environ.setdefault("FUSE_LIBRARY_PATH", path)
    try:
        import mfusepy
    except (ImportError, OSError) as exc:
        raise _missing(str(exc)) from exc
    return mfusepy.FUSE


def _missing(why: str) -> RefusedError:
    return RefusedError(
        "a checkpoint cannot be mounted here",
        why=why,
        remedy=f"{advice_here(Need.FUSE)}, and pip install 'vmckpt[mount]'; or use "
        "`vmckpt checkpoint serve-disk` or `export-disk`, which need neither",
    )


def _require_fit(folder: Path) -> None:
    """Raises RefusedError unless `folder` is an empty directory."""
    try:
        fits = not any(folder.iterdir())
        why, remedy = "it is not empty", "choose an empty directory"
    except OSError as exc:
        fits, why, remedy = False, exc.strerror or str(exc), "make it: mkdir"
        if exc.errno == errno.ENOTCONN:
            why = "a mount there has lost its process"
            remedy = f"fusermount3 -u {folder}, or as root: umount {folder}"
    if not fits:
        raise RefusedError(f"nothing can be mounted at {folder}", why=why, remedy=remedy)


async def _until_mounted(folder: Path, serving: "asyncio.Future[Any]") -> None:
    """Raises RuntimeError (libfuse ended), OperationFailedError (the mount did not appear)."""
    is_there = await poll(
        lambda: in_thread(partial(os.path.ismount, folder)),
        lambda is_there: is_there or serving.done(),
        every_s=POLL_S,
        within_s=BEGIN_S,
    )
    if is_there:
        return
    if serving.done():
        serving.result()  # unmounted already
    else:
        raise OperationFailedError(
            f"{folder} could not be mounted",
            why=f"it did not appear within {BEGIN_S:g} s",
            remedy="check that /dev/fuse can be opened",
        )


async def _unmounted(folder: Path, serving: "asyncio.Future[Any]") -> None:
    """Unmount it; files that are still open return errors."""
    lazily: tuple[str, ...] = ()
    for _ in range(2):
        if serving.done():
            return
        unmount = ["umount"] if os.geteuid() == 0 else ["fusermount3", "-u"]
        await local_host().run([*unmount, *lazily, str(folder)])
        await asyncio.wait({serving}, timeout=END_S)
        lazily = ("-l",) if os.geteuid() == 0 else ("-z",)


class _Tree:
    """A directory of raw images as FUSE operations; called by libfuse's single thread."""

    use_ns = True

    def __init__(self, files: dict[str, DiskReader], unix_s: float, failed: Failed) -> None:
        self._files, self._failed = files, failed
        ns = int(unix_s * 1e9)
        self._same: dict[str, Any] = {"st_uid": os.getuid(), "st_gid": os.getgid()}
        self._same |= dict.fromkeys(("st_atime", "st_mtime", "st_ctime"), ns)

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        """A file's attributes."""
        if path == "/":
            return self._same | {"st_mode": stat.S_IFDIR | 0o500, "st_nlink": 2}
        size = self._found(path).size_bytes
        return self._same | {"st_mode": stat.S_IFREG | 0o400, "st_nlink": 1, "st_size": size}

    def readdir(self, path: str, fh: int) -> Iterator[str]:
        """The file names."""
        yield from (".", "..", *self._files)

    def open(self, path: str, flags: int) -> int:
        """Open read-only."""
        self._found(path)
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return 0

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        """Read bytes of a disk."""
        reader = self._found(path)
        try:
            return reader.read(offset, size)
        except VmckptError as exc:
            self._failed(exc)
            raise OSError(errno.EIO, os.strerror(errno.EIO)) from exc

    def _found(self, path: str) -> DiskReader:
        found = self._files.get(path[1:])
        if found is None:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        return found
