"""Typed, versioned records: what is written is on the disk, what is read is valid or damaged.

A `Schema` says what a record is, wherever its text is kept; `Documents` keeps records of one schema
in a directory of this machine. A store that hosts share would have the methods of `Documents`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from vmckpt.codec import builtins, convert
from vmckpt.errors import StorageError
from vmckpt.foreign import MalformedError, parse
from vmckpt.state.durable import damaged_record, remove_durably, write_durably

# Records are written by vmckpt alone: bounded all the same, what fills a file may be damage.
MOST_BYTES = 64 << 20
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Schema(Generic[T]):
    """Records of type `kind`: its fields, with `format`, the version.

    A record without `format` is of version 1. `remedy` is what to do about a damaged one; {name}
    in it stands for the record's name.
    """

    kind: type[T]
    remedy: str
    version: int = 1

    def encode(self, value: T) -> str:
        """The record's text."""
        return json.dumps({"format": self.version, **builtins(value)}, allow_nan=False)

    def decode(self, data: bytes | str, where: object, name: str = "") -> T:
        """The record at `where`. Raises StorageError: damaged, or of another version."""
        try:
            fields = parse(data, most_bytes=MOST_BYTES, any_text=True)
            if not isinstance(fields, dict):
                raise MalformedError(f"it holds a {type(fields).__name__}, not an object")
            if fields.get("format", 1) != self.version:
                raise MalformedError("written by another version of vmckpt")
            return convert(self.kind, fields)
        except MalformedError as exc:
            text = data if isinstance(data, str) else data.decode(errors="replace")
            remedy = self.remedy.replace("{name}", name)
            raise damaged_record(text, where, exc, remedy=remedy) from exc


class Listing(NamedTuple, Generic[T]):
    """Records by name, in the order of their names, and the damage of the others."""

    records: Mapping[str, T]
    damaged: list[StorageError]

    def require_sound(self) -> list[T]:
        """All records. Raises StorageError where one is damaged."""
        if self.damaged:
            raise self.damaged[0]
        return list(self.records.values())


@dataclass(frozen=True, slots=True)
class Documents(Generic[T]):
    """The records NAME.json of a directory."""

    directory: Path
    schema: Schema[T]

    def path(self, name: str) -> Path:
        """The file of a record."""
        return self.directory / f"{name}.json"

    def save(self, name: str, value: T) -> None:
        """Write or replace a record; it is on the disk when this returns. Raises StorageError."""
        write_durably(self.path(name), self.schema.encode(value))

    def load(self, name: str) -> T | None:
        """A record; None when there is none. Raises StorageError."""
        path = self.path(name)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise _inaccessible("read", path, exc) from exc
        return self.schema.decode(data, path, name)

    def load_all(self) -> Listing[T]:
        """Every record, and which are damaged."""
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
        """Of the records that there are, sorted."""
        return sorted(path.stem for path in self.directory.glob("*.json"))

    def remove(self, name: str) -> None:
        """Remove a record for good; none is no error. Raises StorageError."""
        try:
            remove_durably(path := self.path(name))
        except OSError as exc:
            raise _inaccessible("remove", path, exc) from exc


def _inaccessible(verb: str, path: Path, exc: OSError) -> StorageError:
    return StorageError(
        f"cannot {verb} {path}",
        why=exc.strerror or str(exc),
        remedy="correct the directory's owner and mode, or repair the storage",
    )
