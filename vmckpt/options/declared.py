"""Options of commands, each declared once, as a field of a frozen dataclass.

Programs use the field's type and default; its declaration says how it is typed, what `--help` says
about it, how text becomes the value, and what it affects.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, field, fields
from enum import Enum, Flag, auto
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
_KEY = "declared"


class About(Flag):
    """What an option affects."""

    NOTHING = 0
    # It selects how memory is moved.
    MEMORY = auto()
    # It changes a migration in a way that is not forecast.
    UNFORECAST = auto()


class Declared(NamedTuple):
    """How a field is set on the command line.

    `typed` is the type there, `usual` the value when it is not given, `read` converts what is given
    to the field's value (None: no conversion). `span`: the least and greatest number. `part_of`:
    another field that the same text sets. `metavar`: the name of the value in help.
    """

    flags: tuple[str, ...] = ()
    help: str = ""
    typed: Any = None
    usual: Any = None
    read: Callable[[Any], Any] | None = None
    span: tuple[int | None, int | None] = (None, None)
    about: About = About.NOTHING
    part_of: str | None = None
    metavar: str | None = None


class GivenOption(NamedTuple):
    """An option that was given: its field, its declaration, and its flag as shown in messages."""

    name: str
    declared: Declared
    flag: str


def option(
    default: T,
    flags: str,
    words: str,
    *,
    typed: Any = None,
    usual: Any = None,
    read: Callable[[Any], T] | None = None,
    span: tuple[int, int] | None = None,
    about: About = About.NOTHING,
) -> T:
    """Declare a field that is an option: `flags` as in "--bandwidth RATE", `words` for `--help`.

    `typed` is omitted for a switch, a choice, a number with a `span`, or text.
    """
    chosen = isinstance(default, bool | Enum)
    kind = typed or (type(default) if chosen else int | None if span else str | None)
    given = default if chosen else usual
    names = [word for word in flags.split() if word.startswith("-")]
    metavar = next((word for word in flags.split() if word not in names), None)
    limits = span or (None, None)
    found = Declared(tuple(names), words, kind, given, read, limits, about, metavar=metavar)
    return field(default=default, metadata={_KEY: found})


def also(default: T, name: str, read: Callable[[Any], T]) -> T:
    """Declare a field that is set by the same option as the field `name`."""
    return field(default=default, metadata={_KEY: Declared(read=read, part_of=name)})


def group(kind: type[T]) -> T | None:
    """Declare a field whose own fields are options; None if none of them is given."""
    return field(default=None, metadata={_KEY: kind})


def is_declared(kind: Any) -> bool:
    """Whether a type's fields are options."""
    found = getattr(kind, "__dataclass_fields__", {}).values()
    return any(_KEY in one.metadata for one in found)


def declarations(kind: Any) -> Iterator[tuple[str, Declared]]:
    """All options of a type, by their fields' names, including those of its groups."""
    for one in _fields(kind):
        found = one.metadata[_KEY]
        if not isinstance(found, Declared):
            yield from declarations(found)
        elif found.part_of is None:
            yield one.name, found


def read(kind: type[T], given: Mapping[str, Any]) -> T:
    """Build the value from what was typed, by field names; missing fields were not given.

    Raises UsageError.
    """
    values = dict[str, Any]()
    for one in _fields(kind):
        found = one.metadata[_KEY]
        if not isinstance(found, Declared):
            inner = read(found, given)
            values[one.name] = None if inner == found() else inner
            continue
        text = given.get(found.part_of or one.name, found.usual)
        if found.read is None:
            values[one.name] = text
        elif text is not None:
            values[one.name] = found.read(text)
    return kind(**values)


def changed_options(value: Any) -> Iterator[GivenOption]:
    """The options whose values differ from the usual."""
    for one in _fields(type(value)):
        found, now = one.metadata[_KEY], getattr(value, one.name)
        if now == one.default:
            continue
        if not isinstance(found, Declared):
            yield from changed_options(now)
            continue
        if found.part_of is not None:
            found = type(value).__dataclass_fields__[found.part_of].metadata[_KEY]
        is_choice = isinstance(found.typed, type) and issubclass(found.typed, Enum)
        flag = found.flags[0]
        yield GivenOption(one.name, found, f"{flag} {now}" if is_choice else flag)


def about(kind: Any, what: About) -> Mapping[str, Any]:
    """The fields that affect it, each with its default."""
    return {
        one.name: one.default
        for one in _fields(kind)
        if isinstance(found := one.metadata[_KEY], Declared) and what in found.about
    }


def _fields(kind: Any) -> Iterator[Field[Any]]:
    for one in fields(kind):
        if _KEY in one.metadata and one.default is not MISSING:
            yield one
