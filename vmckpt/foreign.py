"""JSON that others wrote: guests, hooks, other hosts, QEMUs, files.

`parse` bounds what is read; `codec.convert` makes typed values of it. What does not fit raises
MalformedError, which names the field; the caller, who knows who wrote it and what that ends,
raises its own error from that.
"""

import json
import math
import re
import reprlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

MOST_BYTES = 1 << 20
# No protocol here nests deeper; the parser itself could not be sure of more than about 1000.
MOST_DEPTH = 64
# What JSON's readers agree on (RFC 8259, 6), and more than any count of bytes.
MOST_INTEGER = (1 << 63) - 1
# One that does not end goes to the end: else each quote in it would be tried as a beginning.
_TEXTS = re.compile(r'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_BRACKETS = re.compile(r"[][{}]")


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
