"""Untrusted JSON and TOML: from guests, hooks, other hosts, QEMUs, files.

`parse` and `parse_toml` bound the input; `codec.convert` makes typed values of it. Malformed input
raises MalformedError, which names the field. The caller knows who wrote the input and what the
failure means, and raises its own error from that one.
"""

import json
import math
import re
import reprlib
from collections import Counter
from collections.abc import Sequence
from typing import Any, NoReturn

MOST_BYTES = 1 << 20
# No protocol here nests deeper; the parser itself is only reliable to about 1000 levels.
MOST_DEPTH = 64
# The command line of an adopted VM is in its spec.
MOST_TOML_CHARACTERS = 4 << 20
# The integers that JSON parsers agree on (RFC 8259, 6); larger than any byte count.
MOST_INTEGER = (1 << 63) - 1
# An unterminated string extends to the end: otherwise each quote in it would be tried as a start.
_TEXTS = re.compile(r'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_BRACKETS = re.compile(r"[][{}]")


class MalformedError(ValueError):
    """The input is not JSON or TOML, or not what was expected of it."""


def parse(data: bytes | str, *, most_bytes: int = MOST_BYTES, any_text: bool = False) -> Any:
    """Parse untrusted JSON. Raises MalformedError.

    Also refused: more than `most_bytes`, more than MOST_DEPTH levels, a duplicate name in an
    object, NaN and infinities, integers beyond 64 bits, and, unless `any_text`, text that is not
    valid Unicode (half a surrogate pair: what Python makes of a path that is not UTF-8).
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
        raise MalformedError(f"it is not valid JSON: {exc}") from exc
    return found


def parse_toml(text: str) -> dict[str, Any]:
    """Parse untrusted TOML. Raises MalformedError.

    Also refused: more than MOST_TOML_CHARACTERS, more than MOST_DEPTH levels, integers beyond 64
    bits.
    """
    import tomllib

    if len(text) > MOST_TOML_CHARACTERS:
        raise MalformedError(f"it has {len(text)} characters; {MOST_TOML_CHARACTERS} at most")
    try:
        found = tomllib.loads(text)
        _require_bounded(found, MOST_DEPTH)
    except RecursionError as exc:
        raise MalformedError(f"it nests deeper than {MOST_DEPTH} levels") from exc
    except ValueError as exc:  # includes tomllib.TOMLDecodeError
        raise MalformedError(str(exc)) from exc
    return found


def _require_bounded(value: object, levels: int) -> None:
    if isinstance(value, int) and not -MOST_INTEGER - 1 <= value <= MOST_INTEGER:
        raise MalformedError("a number has more than 64 bits")
    if not isinstance(value, dict | list):
        return
    if not levels:
        raise MalformedError(f"it nests deeper than {MOST_DEPTH} levels")
    for inner in value.values() if isinstance(value, dict) else value:
        _require_bounded(inner, levels - 1)


def _require_flat(text: str) -> None:
    """Refuse more brackets than allowed levels; brackets in text do not count."""
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
        raise MalformedError(f"{reprlib.repr(twice)} occurs twice")
    return found


def _no_number(text: str) -> NoReturn:
    raise MalformedError(f"{text} is not a number")


def _finite(text: str) -> float:
    if math.isfinite(value := float(text)):
        return value
    return _no_number(text)


def _integer(text: str) -> int:
    if len(text) > 20 or not -MOST_INTEGER - 1 <= (value := int(text)) <= 2 * MOST_INTEGER + 1:
        raise MalformedError(f"{reprlib.repr(text)} has more than 64 bits")
    return value


# Created once: creating it takes as long as parsing a short message.
_DECODER = json.JSONDecoder(
    object_pairs_hook=_once_each,
    parse_constant=_no_number,
    parse_float=_finite,
    parse_int=_integer,
)
