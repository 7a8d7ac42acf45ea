"""Typed values from JSON and back: the one codec of records and messages.

A frozen dataclass is an object: unknown fields are ignored (a later version may have more), a
missing field takes its default, and `__post_init__` may refuse a value (`require_within`). So is a
TypedDict, for fields whose names are none in Python. A NamedTuple is an array, an enum its value, a
path text, `object` anything. `foreign.parse` bounds what is read.
"""

import reprlib
from pathlib import Path
from typing import Any, TypeVar

from vmckpt.foreign import MOST_INTEGER, MalformedError

T = TypeVar("T")


def convert(kind: type[T], value: object) -> T:
    """The value of type `kind` that parsed JSON holds. Raises MalformedError, which names the
    field.
    """
    import msgspec  # 10 ms that commands without records do without

    try:
        return msgspec.convert(value, kind, dec_hook=_from_builtin)
    except msgspec.ValidationError as exc:
        raise MalformedError(str(exc)) from exc
    except (ValueError, OverflowError) as exc:  # an enum's text that is no Unicode
        raise MalformedError(f"it does not fit {kind.__name__}: {exc}") from exc


def require_within(
    name: str, value: float | None, most: float = MOST_INTEGER, *, least: float = 0
) -> None:
    """Raises MalformedError where a number that was read is not from `least` to `most`."""
    if value is not None and not least <= value <= most:
        raise MalformedError(f"{name} is {reprlib.repr(value)}, not from {least} to {most}")


def builtins(value: object) -> Any:
    """A typed value as dicts, lists and numbers, for programs that read JSON."""
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
