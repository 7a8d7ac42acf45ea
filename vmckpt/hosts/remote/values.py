"""Arguments, answers and errors as JSON; their types are defined only in the protocol `Host`.

A dataclass or NamedTuple is the list of its fields, a path its text, a set a sorted list.
"""

import inspect
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from vmckpt import errors
from vmckpt.errors import StorageError, VmckptError
from vmckpt.foreign import MOST_INTEGER
from vmckpt.hosts.remote.frames import broken

# Limit of each part of an error from another host.
MOST_TEXT = 4000
_PLAIN = (str, int, float, bool, NoneType)


def pack(value: object) -> Any:
    """Convert a value to JSON. Raises TypeError for types that no call of `Host` has."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, _PLAIN):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return [pack(getattr(value, field.name)) for field in fields(value)]
    if isinstance(value, frozenset):
        return sorted(pack(item) for item in value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Sequence):
        return [pack(item) for item in value]
    raise TypeError(f"{value!r} cannot travel")


def unpack(kind: Any, value: Any) -> Any:
    """The inverse, for a value of type `kind`. Raises ProtocolError if it is not one."""
    try:
        return _unpack(kind, value)
    except (TypeError, ValueError, AttributeError) as exc:
        raise broken(f"{reprlib.repr(value)} is not a {kind}: {exc}") from exc


def _unpack(kind: Any, value: Any) -> Any:
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if origin is UnionType:
        if value is None:
            return None
        [kind] = [one for one in inner if one is not NoneType]
        return _unpack(kind, value)
    if origin in _PLAIN:
        return _plain(origin, value)
    if origin is Path:
        return _path(value)
    if origin is bytes:
        return bytes.fromhex(value)
    if origin in (list, frozenset, Sequence):
        made = [_unpack(inner[0], item) for item in _list(value)]
        return frozenset(made) if origin is frozenset else made
    if isinstance(origin, type) and (is_dataclass(origin) or issubclass(origin, tuple)):
        types = [hint for name, hint in _hints(origin).items() if name != "return"]
        return origin(*(_unpack(one, item) for one, item in zip(types, _list(value), strict=True)))
    raise TypeError("of a type that cannot travel")


def _plain(kind: Any, value: Any) -> Any:
    if not isinstance(value, (int, float) if kind is float else kind):
        raise TypeError("another type")
    if isinstance(value, bool) and kind is not bool:
        raise TypeError("another type")
    if isinstance(value, int | float) and not abs(value) <= MOST_INTEGER:
        raise ValueError("more than 64 bits")
    return value


def _path(value: Any) -> Path:
    if "\0" in value:
        raise ValueError("a path holds a null")
    return Path(value)


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError("another type")
    return value


@cache
def _hints(what: Any) -> Mapping[str, Any]:
    return get_type_hints(what)


def bind(question: Callable[..., Any], *args: object, **kwargs: object) -> dict[str, Any]:
    """The arguments of a call of `Host`, by name and packed; omitted ones are not sent."""
    bound = inspect.signature(question).bind(None, *args, **kwargs)
    return {name: pack(value) for name, value in list(bound.arguments.items())[1:]}


def unbind(question: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse. Raises ProtocolError."""
    hints = _hints(question)
    if unknown := [name for name in given if name not in hints]:
        raise broken(f"{question.__name__} has no argument {', '.join(unknown)}")
    return {name: unpack(hints[name], value) for name, value in given.items()}


def unpack_answer(question: Callable[..., Any], value: Any) -> Any:
    """The call's answer. Raises ProtocolError."""
    return unpack(_hints(question)["return"], value)


def pack_error(exc: Exception, host: str) -> list[str]:
    """A host's error by its class, with what, why and remedy; any other error becomes a
    VmckptError.
    """
    if isinstance(exc, OSError):
        exc = StorageError(
            f"cannot use {exc.filename or 'a file'} on {host}",
            why=exc.strerror or str(exc),
            remedy=f"log in to {host} as vmckpt does, and check that it exists, its owner "
            "and permissions, and free space",
        )
    elif not isinstance(exc, VmckptError):
        exc = VmckptError(
            "vmckpt has a bug",
            why=f"{type(exc).__name__}: {exc} (on the far side)",
            remedy="report it",
        )
    return [_known(type(exc)).__name__, exc.what, exc.why, exc.remedy]


def _known(kind: type[VmckptError]) -> type[VmckptError]:
    """The class by which the other side knows an error: a base class, if it is defined elsewhere.

    Or the first class with its exit code, if that differs from the base class's.
    """
    ours = [one for one in vars(errors).values() if isinstance(one, type)]
    classes = [one for one in ours if issubclass(one, VmckptError)]
    nearest = min((one for one in classes if issubclass(kind, one)), key=kind.__mro__.index)
    alike = (one for one in (nearest, *classes) if one.exit_code == kind.exit_code)
    return next(alike, nearest)


def unpack_error(value: Any) -> VmckptError:
    """The inverse. Raises ProtocolError."""
    words = unpack(list[str], value)
    if len(words) != 4:
        raise broken(f"an error has {len(words)} parts")
    name, what, why, remedy = words
    kind = getattr(errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, VmckptError)):
        raise broken(f"'{name}' is not a class of errors")
    what, why, remedy = (text[:MOST_TEXT] for text in (what, why, remedy))
    return kind(what, why=why, remedy=remedy)
