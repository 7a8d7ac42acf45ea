"""The values of QEMU's options: `key=value,...` with doubled commas, or JSON. Pure."""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from vmckpt.vm.adopted.escape import double_commas

Value = str | int | bool


class KeyValues(NamedTuple):
    """`key=value,...` in order; if a key is repeated, the last value counts."""

    pairs: tuple[tuple[str, str], ...]

    def get(self, key: str) -> str | None:
        """The effective value of `key`, None if it is missing."""
        return next((value for name, value in reversed(self.pairs) if name == key), None)

    def all(self, key: str) -> list[str]:
        """Every value of `key`."""
        return [value for name, value in self.pairs if name == key]

    def put(self, key: str, value: Value) -> "KeyValues":
        """Set `key`, at its first position if it exists."""
        text = _word(value)
        if self.get(key) is None:
            return KeyValues((*self.pairs, (key, text)))
        first = next(n for n, (name, _) in enumerate(self.pairs) if name == key)
        rest = [pair for n, pair in enumerate(self.pairs) if pair[0] != key or n == first]
        return KeyValues(tuple((name, text if name == key else old) for name, old in rest))

    def without(self, *keys: str) -> "KeyValues":
        """Without any of `keys`, and what is below them (`key.…`)."""
        below = tuple(f"{key}." for key in keys)
        kept = (one for one in self.pairs if one[0] not in keys and not one[0].startswith(below))
        return KeyValues(tuple(kept))

    def texts(self) -> Iterator[str]:
        """Every value, under whatever key."""
        yield from (value for _, value in self.pairs)

    def __str__(self) -> str:
        return ",".join(f"{key}={double_commas(value)}" for key, value in self.pairs)


class JsonObject(NamedTuple):
    """The same for a JSON object; dotted keys reach nested objects."""

    data: dict[str, Any]

    def get(self, key: str) -> str | None:
        """The effective value of `key`, None if it is missing or is not a single value."""
        found: Any = self.data
        for part in key.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        return _word(found) if isinstance(found, Value) else None

    def all(self, key: str) -> list[str]:
        """Every value of `key`: those of a list of `{"str": value}`, or the single one."""
        listed = self.data.get(key)
        if isinstance(listed, list):
            return [str(item["str"]) for item in listed if isinstance(item, dict) and "str" in item]
        value = self.get(key)
        return [] if value is None else [value]

    def put(self, key: str, value: Value) -> "JsonObject":
        """Set `key`."""
        return JsonObject(_put(self.data, key.split("."), value))

    def without(self, *keys: str) -> "JsonObject":
        """Without any of `keys`, and what is below them."""
        data = self.data
        for key in keys:
            data = _without(data, key.split("."))
        return JsonObject(data)

    def texts(self) -> Iterator[str]:
        """Every text, under whatever key."""
        yield from _texts(self.data)

    def __str__(self) -> str:
        return json.dumps(self.data, separators=(",", ":"), ensure_ascii=False)


Settings = KeyValues | JsonObject


def parse_settings(text: str, implied: str | None = None) -> Settings:
    """An option's value as QEMU reads it (qemu-option.c, keyval.c).

    `implied` is the key of a first value that has none. Raises ValueError on broken JSON.
    """
    if text.startswith("{"):
        data = json.loads(text)
        return JsonObject(data)
    pairs = []
    for number, item in enumerate(_items(text)):
        key, equals, value = item.partition("=")
        if equals:
            pairs.append((key, _halve(value)))
        elif number == 0 and implied:
            pairs.append((implied, _halve(item)))
        elif item.startswith("no"):
            pairs.append((item.removeprefix("no"), "off"))
        else:
            pairs.append((item, "on"))
    return KeyValues(tuple(pairs))


def _items(text: str) -> list[str]:
    """The items between single commas; doubled commas stay doubled."""
    items, start, at = [], 0, 0
    while (at := text.find(",", at)) >= 0:
        if text[at + 1 : at + 2] == ",":
            at += 2
            continue
        items.append(text[start:at])
        start = at = at + 1
    items.append(text[start:])
    return [item for item in items if item]


def _halve(text: str) -> str:
    return text.replace(",,", ",")


def _word(value: Value) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)


def _without(data: dict[str, Any], path: list[str]) -> dict[str, Any]:
    first, *rest = path
    if not rest:
        return {key: value for key, value in data.items() if key != first}
    inner = data.get(first)
    return data | {first: _without(inner, rest)} if isinstance(inner, dict) else data


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _texts(one)


def _put(data: dict[str, Any], path: list[str], value: Value) -> dict[str, Any]:
    first, *rest = path
    inner = data.get(first)
    below = _put(inner if isinstance(inner, dict) else {}, rest, value) if rest else value
    return data | {first: below}
