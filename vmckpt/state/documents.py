"""Typed, versioned records: a written record is durable, a read one is valid or damaged.

A `Schema` defines a record, wherever its text is stored; `Documents` keeps the records of one
schema in a local directory. A store shared by hosts would have the methods of `Documents`.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar

from vmckpt.codec import builtins, convert
from vmckpt.errors import StorageError
from vmckpt.foreign import MalformedError, parse
from vmckpt.state.durable import remove_durably, storage_errors, write_durably

# Only vmckpt writes records. Their size is limited all the same: a damaged file may be large.
MOST_BYTES = 64 << 20
EMPTY = "it is empty, as a power cut leaves a file that was not yet on the disk"
T = TypeVar("T")


class Schema(NamedTuple, Generic[T]):
    """Records of type `kind`: its fields, with `format`, the version.

    A record without `format` is version 1. `remedy` says what to do about a damaged one; in it
    {name} stands for the file's name without its suffix, {directory} for its directory.
    `omits_none`: None values are left out, for earlier versions that check which fields exist.
    """

    kind: type[T]
    remedy: str
    version: int = 1
    omits_none: bool = False

    def encode(self, value: T) -> str:
        """Encode a record. Raises StorageError: it has an infinity, which JSON cannot express."""
        fields = builtins(value)
        if self.omits_none:
            fields = {name: one for name, one in fields.items() if one is not None}
        try:
            return json.dumps({"format": self.version, **fields}, allow_nan=False)
        except ValueError as exc:
            raise StorageError(
                f"a record ({self.kind.__name__}) cannot be written",
                why=str(exc),
                remedy="report it: vmckpt has a bug",
            ) from exc

    def decode(self, data: bytes | str, path: Path, host: str = "", *, any_text: bool = False) -> T:
        """Decode the record of a file on that host. Raises StorageError: damaged, another version.

        `any_text`: as `foreign.parse` has it.
        """
        try:
            fields = parse(data, most_bytes=MOST_BYTES, any_text=any_text)
            if not isinstance(fields, dict):
                raise MalformedError(f"it holds a {type(fields).__name__}, not an object")
            if fields.get("format", 1) != self.version:
                raise MalformedError("written by another version of vmckpt")
            return convert(self.kind, fields)
        except MalformedError as exc:
            text = data if isinstance(data, str) else data.decode(errors="replace")
            raise self.damaged(path, EMPTY if is_empty(text) else str(exc), host) from exc

    def damaged(self, path: Path, why: str, host: str = "") -> StorageError:
        """The error for an implausible record, for callers who know more about it."""
        return damaged(path, why, self.remedy.format(name=path.stem, directory=path.parent), host)


def is_empty(text: str) -> bool:
    """Whether a file is empty, or has zeroes because a power cut left no content: EMPTY says so."""
    return not text.strip("\0 \n")


def damaged(path: Path, why: str, remedy: str, host: str = "") -> StorageError:
    """The error for a file of vmckpt's that cannot be decoded."""
    where = f"{path} on {host}" if host else path
    return StorageError(f"{where} is damaged", why=why, remedy=remedy)


class FilesOfHost(Protocol):
    """The file operations of `hosts.Host`, local or remote."""

    @property
    def name(self) -> str:
        """The host's name."""

    async def read_text(self, path: Path) -> str | None:
        """Read a whole file; None if it does not exist."""

    async def write_text(self, path: Path, text: str) -> None:
        """Replace a file durably."""


async def load_from(host: FilesOfHost, path: Path, schema: Schema[T]) -> T | None:
    """Load the record in a host's file; None if it is missing. Raises StorageError,
    HostDownError.
    """
    text = await host.read_text(path)
    return None if text is None else schema.decode(text, path, host.name)


async def save_to(host: FilesOfHost, path: Path, schema: Schema[T], value: T) -> None:
    """Write or replace the record in a host's file, in an existing directory. Raises as above."""
    await host.write_text(path, schema.encode(value))


class Listing(NamedTuple, Generic[T]):
    """Records by name, sorted, and the errors of the damaged ones."""

    records: Mapping[str, T]
    damaged: list[StorageError]

    def require_sound(self) -> list[T]:
        """All records. Raises StorageError if one is damaged."""
        if self.damaged:
            raise self.damaged[0]
        return list(self.records.values())


def names_in(directory: Path) -> list[str]:
    """The NAME of each NAME.json in a directory, sorted; none if the directory is missing.

    Hidden files, such as editors' own, are left out. Raises StorageError if the directory cannot be
    read, which `Path.glob` takes for an empty one.
    """
    with storage_errors(f"read {directory}"):
        try:
            found = os.listdir(directory)
        except FileNotFoundError:
            return []
    names = (name.removesuffix(".json") for name in found if name.endswith(".json"))
    return sorted(name for name in names if name and not name.startswith("."))


class Documents(NamedTuple, Generic[T]):
    """The records NAME.json of a directory."""

    directory: Path
    schema: Schema[T]

    def path(self, name: str) -> Path:
        """The file of a record."""
        return self.directory / f"{name}.json"

    def save(self, name: str, value: T) -> None:
        """Write or replace a record; it is durable when this returns. Raises StorageError."""
        write_durably(self.path(name), self.schema.encode(value))

    def load(self, name: str) -> T | None:
        """Load a record; None if it does not exist. Raises StorageError."""
        path = self.path(name)
        with storage_errors(f"read {path}"):
            try:
                data = path.read_bytes()
            except FileNotFoundError:
                return None
        return self.schema.decode(data, path, any_text=True)

    def load_all(self) -> Listing[T]:
        """Load every record, and the errors of damaged ones. Raises as `names`."""
        records, damaged = dict[str, T](), list[StorageError]()
        for name in self.names():
            try:
                found = self.load(name)
            except StorageError as exc:
                damaged.append(exc)
            else:
                if found is not None:  # it was removed meanwhile
                    records[name] = found
        return Listing(records, damaged)

    def names(self) -> list[str]:
        """The names of all records, sorted. Raises StorageError: they are unknown."""
        return names_in(self.directory)

    def remove(self, name: str) -> None:
        """Remove a record durably; a missing one is not an error. Raises StorageError."""
        path = self.path(name)
        with storage_errors(f"remove {path}"):
            remove_durably(path)
