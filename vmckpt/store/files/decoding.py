"""Validate the content of a store's files: types and limits, or DamagedError.

Anyone who can write to a location can write anything there, and checkpoints are imported from
elsewhere. Each function raises ValueError; `decoding` turns that, and any other error from
unexpected content, into the file's DamagedError.
"""

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from typing import Any, NoReturn
from uuid import UUID

from vmckpt.store.errors import damaged, too_large

# Nesting limit of a checkpoint maker's facts.
MOST_DEPTH = 64
MOST_NAME = 255
# A few KiB of zstd become hundreds of MiB of values. No file has more: 2^22 packs, and the rest.
_MOST_VALUES = (1 << 22) + (1 << 20)
_SHOWN = 60


@contextmanager
def decoding(name: str) -> Iterator[None]:
    """Any error from a file's content in the block is raised as damage of the file."""
    try:
        yield
    except MemoryError as exc:
        raise too_large(name, "it takes more memory than there is") from exc
    except RecursionError as exc:
        raise damaged(f"{name} is damaged", f"it nests more than {MOST_DEPTH} deep") from exc
    except (
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        ArithmeticError,
        struct.error,
    ) as exc:
        raise damaged(f"{name} is damaged", f"it is malformed: {str(exc)[:200]}") from exc


def json_of(data: bytes, most_values: int = _MOST_VALUES) -> Any:
    """Parse JSON within the limits of nesting and of values."""
    if data.count(b",") > most_values:
        raise ValueError(f"it has more than {most_values} values")
    found = json.loads(data, parse_constant=_refuse)
    level, depth = [found], 0
    while level:
        depth += 1
        if depth > MOST_DEPTH:
            raise ValueError(f"it nests more than {MOST_DEPTH} deep")
        nested: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                nested += one.values()
            elif isinstance(one, list):
                nested += one
        level = nested
    return found


def mapping(
    value: Any, *, of: tuple[str, ...] | None = None, maybe: tuple[str, ...] = ()
) -> dict[str, Any]:
    """An object; `of`: with exactly these keys, and optionally those in `maybe`."""
    if not isinstance(value, dict):
        raise _not(value, "an object")
    if of is not None and value.keys() - set(maybe) != set(of):
        raise ValueError(f"its words are {_shown(sorted(value))}, not {', '.join(of)}")
    return value


def listed(value: Any, most: int) -> list[Any]:
    """A list of at most `most` elements."""
    if not isinstance(value, list) or len(value) > most:
        raise _not(value, f"a list of at most {most}")
    return value


def row(value: Any, columns: int) -> list[Any]:
    """A list of exactly this length."""
    if not isinstance(value, list) or len(value) != columns:
        raise _not(value, f"a list of {columns}")
    return value


def count(value: Any, most: int, least: int = 0) -> int:
    """An integer within limits."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise _not(value, f"a whole number from {least} to {most}")
    return value


def number(value: Any, most: float) -> float:
    """A number from 0 to `most`."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not isfinite(value):
        raise _not(value, "a number")
    if not 0 <= value <= most:
        raise _not(value, f"a number from 0 to {most:g}")
    return value


def text(value: Any, most: int = MOST_NAME) -> str:
    """Printable text."""
    if not isinstance(value, str) or len(value) > most or not value.isprintable():
        raise _not(value, f"printable text of at most {most} characters")
    return value


def uuid_of(value: Any) -> str:
    """A UUID in vmckpt's spelling."""
    if not isinstance(value, str) or str(UUID(value)) != value:
        raise _not(value, "a UUID")
    return value


def id_of(value: Any) -> bytes:
    """16 bytes from hexadecimal digits in vmckpt's spelling."""
    found = bytes.fromhex(value) if isinstance(value, str) and len(value) == 32 else b""
    if found.hex() != value:
        raise _not(value, "an id of 32 hexadecimal digits")
    return found


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number of JSON")


def _not(value: Any, wanted: str) -> ValueError:
    return ValueError(f"{_shown(value)} is not {wanted}")


def _shown(value: Any) -> str:
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 128:
        return "a huge number"
    found = repr(value)
    return found if len(found) <= _SHOWN else f"{found[:_SHOWN]}..."
