"""Events as lines of JSON, for a reader in another process or on another host."""

import json
from collections.abc import Iterator
from types import UnionType
from typing import Any, get_type_hints

from vmckpt.events.types import Event, JobProgress, Note, PhaseBegan, Progress
from vmckpt.foreign import MOST_BYTES, Fields, MalformedError, parse

_KINDS: dict[str, type[Event]] = {
    kind.__name__: kind for kind in (PhaseBegan, Progress, JobProgress, Note)
}
_HINTS = {kind: get_type_hints(kind) for kind in _KINDS.values()}


def to_line(event: Event) -> str:
    """One line, its end included."""
    return json.dumps({"event": type(event).__name__, **event._asdict()}) + "\n"


def from_line(line: bytes | str) -> Event:
    """The inverse. Raises MalformedError, which is a ValueError."""
    return from_record(parse(line))


def from_record(data: object) -> Event:
    """The event that a run record has as a table. Raises MalformedError."""
    told = Fields(data)
    kind = _KINDS.get(told.text("event"))
    if kind is None:
        raise told.wrong("event", "an event")
    there = set(told.names())
    values: dict[str, Any] = {
        name: _value(told, name, hint) for name, hint in _HINTS[kind].items() if name in there
    }
    try:
        return kind(**values)
    except TypeError as exc:
        raise MalformedError(f"a {kind.__name__} lacks something: {exc}") from exc


def _value(told: Fields, name: str, hint: object) -> str | int | float | None:
    if name not in told and isinstance(hint, UnionType):
        return None
    if hint is str:
        return told.text(name)
    if hint in (int, int | None):
        return told.integer(name)
    return told.number(name)


class Lines:
    """Lines out of bytes that come piece by piece; a line that is not whole waits for its end.

    One that is no event is told as a note: what is told of an operation does not end it.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Event]:
        """The events that `data` completes."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MOST_BYTES:
            self._rest = b""  # its end is no event either
        for line in whole:
            try:
                yield from_line(line)
            except MalformedError as exc:
                yield Note(0.0, "events", f"malformed command: {exc}")
