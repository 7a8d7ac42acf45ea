"""JSON that others wrote, as typed values: guests, hooks, other hosts, QEMUs, files.

`parse` bounds what is read, `Fields` reads an object field by field. What does not fit raises
MalformedError, which names the field; the caller, who knows who wrote it and what that ends,
raises its own error from that.
"""

import json
import math
import re
import reprlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn, TypeVar

MOST_BYTES = 1 << 20
# No protocol here nests deeper; the parser itself could not be sure of more than about 1000.
MOST_DEPTH = 64
# What JSON's readers agree on (RFC 8259, 6), and more than any count of bytes.
MOST_INTEGER = (1 << 63) - 1
# One that does not end goes to the end: else each quote in it would be tried as a beginning.
_TEXTS = re.compile(r'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_BRACKETS = re.compile(r"[][{}]")
T = TypeVar("T")


class MalformedError(ValueError):
    """It is no JSON, or not the JSON that was expected there."""


def parse(data: bytes | str, *, most_bytes: int = MOST_BYTES, any_text: bool = False) -> Any:
    """The value. Raises MalformedError.

    Refused as well: more than `most_bytes`, more than MOST_DEPTH levels, a name that an object has
    twice, NaN and infinities, integers beyond 64 bits, and, unless `any_text`, text that is no
    Unicode (half a surrogate pair: what Python makes of a path that is no UTF-8).
    """
    if len(data) > most_bytes:
        raise MalformedError(f"it has {len(data)} bytes; {most_bytes} are expected at most")
    try:
        text = data if isinstance(data, str) else data.decode()
        _require_flat(text)
        found = _DECODER.decode(text)
        if any_text:
            return found
        if "\\u" in text:
            json.dumps(found, ensure_ascii=False).encode()
        elif isinstance(data, str):
            data.encode()
    except (ValueError, RecursionError) as exc:
        if isinstance(exc, MalformedError):
            raise
        raise MalformedError(f"it is no JSON: {exc}") from exc
    return found


def _require_flat(text: str) -> None:
    """More brackets than levels are allowed are counted, those in text left out."""
    if text.count("[") + text.count("{") <= MOST_DEPTH:
        return
    depth = 0
    for bracket in _BRACKETS.findall(_TEXTS.sub("", text)):
        depth += 1 if bracket in "[{" else -1
        if depth > MOST_DEPTH:
            raise MalformedError(f"it nests deeper than {MOST_DEPTH} levels")


def _once_each(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(
            name for name, count in Counter(name for name, _ in pairs).items() if count > 1
        )
        raise MalformedError(f"{reprlib.repr(twice)} is there twice")
    return found


def _no_number(text: str) -> NoReturn:
    raise MalformedError(f"{text} is no number")


def _finite(text: str) -> float:
    if math.isfinite(value := float(text)):
        return value
    return _no_number(text)


def _integer(text: str) -> int:
    if len(text) > 20 or not -MOST_INTEGER - 1 <= (value := int(text)) <= 2 * MOST_INTEGER + 1:
        raise MalformedError(f"{reprlib.repr(text)} has more than 64 bits")
    return value


# Made once: that takes as long as a short message.
_DECODER = json.JSONDecoder(
    object_pairs_hook=_once_each,
    parse_constant=_no_number,
    parse_float=_finite,
    parse_int=_integer,
)


class _Required:
    """Stands for a default where there is none."""


REQUIRED: Final = _Required()


class Fields:
    """A JSON object, read field by field; `where` names it in errors.

    Each reader takes a default for a field that is missing or null; without one that is an error.
    Fields that are not read do no harm: a later version may have more.
    """

    def __init__(self, value: object, where: str = "it") -> None:
        if not isinstance(value, Mapping):
            raise MalformedError(f"{where} is {reprlib.repr(value)}, not an object")
        self._values, self.where = value, where

    @classmethod
    def parse(
        cls, data: bytes | str, where: str = "it", *, most_bytes: int = MOST_BYTES
    ) -> "Fields":
        """The object that `data` is. Raises MalformedError as `parse` and the class do."""
        return cls(parse(data, most_bytes=most_bytes), where)

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def names(self) -> Iterator[str]:
        """The fields that are there, null too."""
        return iter(self._values)

    def text(self, name: str, default: T | _Required = REQUIRED) -> str | T:
        """A text."""
        found: str | T = self._of(name, str, "a text", default)
        return found

    def flag(self, name: str, default: T | _Required = REQUIRED) -> bool | T:
        """True or false."""
        found: bool | T = self._of(name, bool, "true or false", default)
        return found

    def integer(
        self,
        name: str,
        default: T | _Required = REQUIRED,
        *,
        least: int = 0,
        most: int = MOST_INTEGER,
    ) -> int | T:
        """A whole number from `least` to `most`."""
        value: int | T = self._of(name, int, "a whole number", default)
        if name in self and isinstance(value, int) and not least <= value <= most:
            raise self.wrong(name, f"from {least} to {most}")
        return value

    def number(self, name: str, default: T | _Required = REQUIRED) -> float | T:
        """A finite number, zero or more."""
        value: float | T = self._of(name, (int, float), "a number", default)
        if name in self and isinstance(value, int | float):
            if not 0 <= value <= MOST_INTEGER:  # NaN is not either
                raise self.wrong(name, "a finite number, zero or more")
            return float(value)
        return value

    def fields(self, name: str) -> "Fields":
        """An object; an empty one where it is missing."""
        return Fields(self._values.get(name) or {}, self._place(name))

    def each(self, name: str) -> "list[Fields]":
        """The objects of an array; none where it is missing."""
        return objects(self._values.get(name) or [], self._place(name))

    def texts(self, name: str) -> tuple[str, ...]:
        """The texts of an array; none where it is missing."""
        found = self._of(name, list, "an array", [])
        if not all(isinstance(one, str) for one in found):
            raise self.wrong(name, "an array of texts")
        return tuple(found)

    def integers(self, name: str) -> tuple[int, ...]:
        """The whole numbers, zero or more, of an array; none where it is missing."""
        found = self._of(name, list, "an array", [])
        if not all(type(one) is int and 0 <= one <= MOST_INTEGER for one in found):
            raise self.wrong(name, "an array of whole numbers")
        return tuple(found)

    def wrong(self, name: str, expected: str) -> MalformedError:
        """The error for a field that is not what was expected there."""
        found = reprlib.repr(self._values.get(name))
        return MalformedError(f"{self._place(name)} is {found}, not {expected}")

    def _of(self, name: str, kind: Any, expected: str, default: Any) -> Any:
        value = self._values.get(name)
        if value is None:
            if isinstance(default, _Required):
                raise MalformedError(f"{self._place(name)} is missing")
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.wrong(name, expected)
        return value

    def _place(self, name: str) -> str:
        return name if self.where == "it" else f"{self.where}.{name}"


# What `require` is given: a type; NUMBER; a list with the shape of its items, or a tuple with that
# for a list that is not empty; a dict of fields, where "name?" may be missing, and "name??" null as
# well; None for anything.
NUMBER: Final = float
Shape = type | list["Shape"] | tuple["Shape"] | Mapping[str, "Shape"] | None
_WORDS = {str: "a text", int: "a whole number", bool: "true or false", float: "a number"}


def require(shape: "Shape", value: object, where: str = "it") -> None:
    """Raises MalformedError where a value is not of that shape.

    For what is read as it stands; fields that the shape does not name do no harm.
    """
    match shape:
        case None:
            return
        case type():
            kinds = (int, float) if shape is float else shape
            if not isinstance(value, kinds) or (isinstance(value, bool) and shape is not bool):
                raise MalformedError(
                    f"{where} is {reprlib.repr(value)}, not {_WORDS.get(shape, shape.__name__)}"
                )
            if shape is int and not -MOST_INTEGER <= value <= 2 * MOST_INTEGER + 1:  # type: ignore[operator]
                raise MalformedError(f"{where} is {reprlib.repr(value)}, more than 64 bits")
        case list() | tuple():
            if not isinstance(value, list) or (isinstance(shape, tuple) and not value):
                expected = "an array" + (" with something in it" if value == [] else "")
                raise MalformedError(f"{where} is {reprlib.repr(value)}, not {expected}")
            for number, one in enumerate(value):
                require(shape[0], one, f"{where}[{number}]")
        case _:
            _require_fields(shape, value, where)


def _require_fields(shape: "Mapping[str, Shape]", value: object, where: str) -> None:
    if not isinstance(value, Mapping):
        raise MalformedError(f"{where} is {reprlib.repr(value)}, not an object")
    for name, inner in shape.items():
        bare = name.rstrip("?")
        place = bare if where == "it" else f"{where}.{bare}"
        if value.get(bare) is None and name.endswith("??"):
            continue
        if bare in value:
            require(inner, value[bare], place)
        elif bare == name:
            raise MalformedError(f"{place} is missing")


def objects(value: object, where: str = "it") -> list[Fields]:
    """The objects of an array. Raises MalformedError."""
    if not isinstance(value, list):
        raise MalformedError(f"{where} is {reprlib.repr(value)}, not an array")
    return [Fields(one, f"{where}[{number}]") for number, one in enumerate(value)]
