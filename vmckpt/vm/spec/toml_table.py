"""TOML tables read key by key; every error names the line and the key."""

import math
import re
from pathlib import Path
from typing import Any, NamedTuple

from vmckpt.errors import UsageError
from vmckpt.hosts.inventory.inventory import check_name
from vmckpt.units import parse_size_bytes


class TableSource(NamedTuple):
    """The positions of keys, for errors; relative paths start from `base`."""

    text: str
    name: str
    base: Path

    def line_of(self, where: tuple[str | int, ...], key: str) -> int:
        """The line of `key` in the table `where` ("disks", 1); the table's line if it is
        missing.
        """
        lines = self.text.splitlines()
        start = self._start_of(lines, where) if where else 0
        for number in range(start, len(lines)):
            if re.match(rf'\s*"?{re.escape(key)}"?\s*[=.]', lines[number]):
                return number + 1
            if number > start and re.match(r"\s*\[", lines[number]):
                break
        # The key is a table instead of a value, or vice versa.
        headers = [] if where else self._headers(lines, key)
        return (headers[0] if headers else start) + 1

    def _start_of(self, lines: list[str], where: tuple[str | int, ...]) -> int:
        headers = self._headers(lines, str(where[0]))
        number = where[1] if len(where) > 1 and isinstance(where[1], int) else 0
        if number < len(headers):
            return headers[number]
        # An inline table, an inline array of tables, or dotted keys.
        inline = rf'\s*"?{re.escape(str(where[0]))}"?\s*[=.]'
        return next((n for n, line in enumerate(lines) if re.match(inline, line)), 0)

    @staticmethod
    def _headers(lines: list[str], name: str) -> list[int]:
        header = rf'\s*\[\[?\s*"?{re.escape(name)}"?\s*\]'
        return [number for number, line in enumerate(lines) if re.match(header, line)]


_KINDS = {
    str: "text in quotes",
    int: "a whole number",
    bool: "true or false",
    dict: "a table",
    list: "an array",
}


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value))


class TomlTable:
    """A TOML table, read key by key; unread keys are errors."""

    def __init__(
        self, data: dict[str, Any], source: TableSource, where: tuple[str | int, ...]
    ) -> None:
        self.data, self._source, self._where = data, source, where
        self._read: set[str] = set()

    def wrong(self, key: str, why: str, remedy: str) -> UsageError:
        """An error at `key`."""
        key_path = ".".join([*(str(part) for part in self._where), key])
        line = self._source.line_of(self._where, key)
        return UsageError(
            f"{self._source.name}, line {line}: '{key_path}' is wrong", why=why, remedy=remedy
        )

    def has(self, key: str) -> bool:
        """Whether `key` is there."""
        return key in self.data

    def _get(self, key: str, kind: type, default: Any = None) -> Any:
        self._read.add(key)
        if key not in self.data:
            if default is None:
                raise self.wrong(key, "it is missing", f"add {key} = ...")
            return default
        value = self.data[key]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.wrong(key, f"it must be {_KINDS[kind]}, not {value!r}", "fix its type")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        return str(self._get(key, str, default))

    def integer(self, key: str, default: int, *, least: int) -> int:
        """An integer, at least `least`."""
        value = int(self._get(key, int, default))
        if value < least:
            raise self.wrong(key, f"it must be at least {least}", "choose a larger number")
        return value

    def optional_integer(self, key: str) -> int | None:
        """An integer, or None if the key is missing."""
        return int(self._get(key, int)) if self.has(key) else None

    def texts(self, key: str) -> tuple[str, ...]:
        """An array of strings; empty if it is missing."""
        items = self._get(key, list, [])
        if not all(isinstance(item, str) for item in items):
            raise self.wrong(key, "it must be an array of texts", "put each in quotes")
        return tuple(items)

    def integers(self, key: str) -> tuple[int, ...]:
        """An array of integers; empty if it is missing."""
        items = self._get(key, list, [])
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in items):
            raise self.wrong(key, "it must be an array of whole numbers", "fix it")
        return tuple(items)

    def boolean(self, key: str, default: bool) -> bool:
        """A TOML boolean."""
        return bool(self._get(key, bool, default))

    def choice(self, key: str, values: tuple[str, ...], default: str) -> str:
        """One of `values`."""
        value = self.text(key, default)
        if value not in values:
            raise self.wrong(
                key, f"it must be one of {', '.join(values)}, not '{value}'", "choose one of them"
            )
        return value

    def size(self, key: str) -> int:
        """Bytes, from text with a unit."""
        text = self.text(key)
        try:
            return parse_size_bytes(text)
        except UsageError as exc:
            raise self.wrong(key, f"{exc.what}; {exc.why}", exc.remedy) from exc

    def name(self, key: str, what: str) -> str:
        """A name for a `what`."""
        text = self.text(key)
        try:
            return check_name(text, what)
        except UsageError as exc:
            raise self.wrong(key, f"{exc.what}: {exc.why}", exc.remedy) from exc

    def path(self, key: str, default: str | None = None) -> Path:
        """A path, made absolute against the spec's directory."""
        text = self.text(key, default)
        if not text or "\0" in text:
            raise self.wrong(key, "it is not a path", "name a file")
        return self._source.base / text

    def absolute(self, key: str) -> Path:
        """An absolute path."""
        path = Path(self.text(key))
        if not path.is_absolute():
            raise self.wrong(key, "it must be an absolute path", "begin it with /")
        return path

    def table(self, key: str) -> "TomlTable | None":
        """A sub-table; None if it is missing."""
        if not self.has(key):
            return None
        return TomlTable(self._get(key, dict), self._source, (key,))

    def free(self, key: str) -> dict[str, Any]:
        """A sub-table with QEMU's or a hook's keys; empty if it is missing."""
        return TomlTable(self._get(key, dict, {}), self._source, (*self._where, key)).plain()

    def plain(self) -> dict[str, Any]:
        """The whole table, with QEMU's keys: it can be written as JSON."""
        for key, value in self.data.items():
            if not _is_plain(value):
                why = "it must be text, a number, true or false, or an array or a table of those"
                raise self.wrong(key, why, "put it in quotes")
        return dict(self.data)

    def tables(self, key: str) -> list["TomlTable"]:
        """An array of tables; empty if it is missing."""
        items = self._get(key, list, [])
        if not all(isinstance(item, dict) for item in items):
            raise self.wrong(key, "it must be an array of tables", f"write [[{key}]]")
        return [TomlTable(item, self._source, (key, number)) for number, item in enumerate(items)]

    def no_more_keys(self) -> None:
        """Raises UsageError if there is a key that nothing has read."""
        for key in self.data:
            if key not in self._read:
                known = ", ".join(sorted(self._read))
                raise self.wrong(key, "there is no such key", f"the keys here are: {known}")
