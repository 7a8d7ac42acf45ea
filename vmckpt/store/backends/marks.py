"""Marks that distinguish a store's directories from empty mount points in their place.

The store's directory and its content directories (`config.OBJECT_FOLDERS`) each have an empty
directory `of-store-ID`, which listings of objects ignore. The store's own mark is made last: once
it exists, a content directory without a mark is a different one, and listing it would make its
content look removed, so that gc would remove the rest.

Marks are made with the first object that is added or removed without them, also in a store of an
older vmckpt if its directories are consistent.
"""

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from vmckpt.errors import StorageError
from vmckpt.store.files.config import OBJECT_FOLDERS

_MARK = re.compile(r"of-store-[0-9a-f]{32}")
# Prefix of object names; a README has none.
_OBJECT = re.compile(r"[0-9a-f]{32}")
_REMEDY = (
    "mount it; if you emptied it, or moved or restored it without its of-store-...: "
    "vmckpt store accept, with this location"
)


def mark_of(store_id: str) -> str:
    """The name of a store's marks."""
    return f"of-store-{store_id}"


def marks_in(root: Path) -> tuple[str, ...]:
    """The marks in a store's directory. If there are several, its file `store` was replaced.

    Raises OSError.
    """
    try:
        return tuple(name for name in os.listdir(root) if _MARK.fullmatch(name))
    except FileNotFoundError:
        return ()


def is_marked(folder: int, marks: Collection[str]) -> bool:
    """Whether an open directory has one of these marks. Raises OSError."""
    for mark in marks:
        try:
            os.stat(mark, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            continue
        return True
    return False


def put_mark(folder: int, mark: str) -> None:
    """Put the mark into an open directory, durably. Raises OSError."""
    try:
        os.mkdir(mark, 0o700, dir_fd=folder)
    except FileExistsError:
        return
    os.fsync(folder)


def belong_together(objects: Mapping[str, Collection[str]]) -> bool:
    """Whether the content of a store's folders is consistent.

    Each checkpoint needs maps, and packs or bundles.
    """
    has = {folder: any(map(_OBJECT.match, names)) for folder, names in objects.items()}
    return has["checkpoints"] == has["maps"] == (has["packs"] or has["bundles"])


def not_own(folder: str, location: str) -> StorageError:
    """The error for a folder without the store's mark."""
    return StorageError(
        f"{folder} in {location} is not the directory of this store",
        why=f"it has no {mark_of('...')}: its disk is perhaps not mounted, or another one is",
        remedy=_REMEDY,
    )


def not_certain(objects: Mapping[str, Collection[str]], location: str) -> StorageError:
    """The error for an older vmckpt's folders that must not be marked."""
    full = [name for name in OBJECT_FOLDERS if any(map(_OBJECT.match, objects[name]))]
    empty = [name for name in OBJECT_FOLDERS if name not in full]
    return StorageError(
        f"it is not certain that all folders in {location} are this store's",
        why=f"{', '.join(full)} have content, {', '.join(empty)} none: a disk is perhaps not "
        "mounted",
        remedy=_REMEDY,
    )
