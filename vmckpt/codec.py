"""Typed values from JSON and back: the one codec of records and messages.

A frozen dataclass is an object: unknown fields are ignored (a later version may have more), a
missing field takes its default, and `__post_init__` may refuse a value (`require_within`). A
TypedDict works the same and allows field names that are not Python identifiers. A NamedTuple is an
array (to `convert_fields` an object), an enum its value, a path text, `object` anything.
`foreign.parse` bounds what is read.
"""

import reprlib
from functools import cache
from pathlib import Path
from typing import Any, NotRequired, TypedDict, TypeVar, get_type_hints

from vmckpt.foreign import MOST_INTEGER, MalformedError

T = TypeVar("T")


def convert(kind: type[T], value: object) -> T:
    """Convert parsed JSON to a value of type `kind`. Raises MalformedError, naming the field."""
    import msgspec  # costs 10 ms, which commands without records save

    try:
        return msgspec.convert(value, kind, dec_hook=_from_builtin)
    except msgspec.ValidationError as exc:
        raise MalformedError(str(exc)) from exc
    except (ValueError, OverflowError) as exc:  # an enum's text that is not Unicode
        raise MalformedError(f"it does not fit {kind.__name__}: {exc}") from exc


def convert_fields(kind: type[T], value: object) -> T:
    """Convert a parsed JSON object that has the fields of a NamedTuple `kind`. Raises as above."""
    named: Any = kind
    return kind(**convert(_object_of(named), value))


@cache
def _object_of(kind: Any) -> Any:
    """The TypedDict of a NamedTuple's fields."""
    fields = {
        name: NotRequired[hint] if name in kind._field_defaults else hint
        for name, hint in get_type_hints(kind).items()
    }
    make: Any = TypedDict
    return make(kind.__name__, fields)


def require_within(
    name: str, value: float | None, most: float = MOST_INTEGER, *, least: float = 0
) -> None:
    """Raises MalformedError if the number read is not between `least` and `most`."""
    if value is not None and not least <= value <= most:
        raise MalformedError(f"{name} is {reprlib.repr(value)}, not from {least} to {most}")


def builtins(value: object) -> Any:
    """Convert a typed value to dicts, lists and numbers, for programs that read JSON."""
    import msgspec

    return msgspec.to_builtins(value, enc_hook=_to_builtin)


def _from_builtin(kind: type, value: Any) -> Any:
    if kind is object:
        return value
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise ValueError(f"Expected `{kind.__name__}`, got `{type(value).__name__}`")


def _to_builtin(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} has no JSON")
