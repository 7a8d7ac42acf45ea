"""Events as lines of JSON, for a reader in another process or on another host."""

import json
import reprlib
from collections.abc import Iterator
from typing import TypedDict

from vmckpt.codec import convert, convert_fields, require_within
from vmckpt.events.types import Event, JobProgress, Note, PhaseBegan, Progress
from vmckpt.foreign import MOST_BYTES, MalformedError, parse

_KINDS: dict[str, type[Event]] = {
    kind.__name__: kind for kind in (PhaseBegan, Progress, JobProgress, Note)
}


class _EventKind(TypedDict):
    """`event`: the kind."""

    event: str


def to_line(event: Event) -> str:
    """Encode an event as one line, including its newline."""
    return json.dumps({"event": type(event).__name__, **event._asdict()}) + "\n"


def from_line(line: bytes | str) -> Event:
    """The inverse. Raises MalformedError, which is a ValueError."""
    return from_record(parse(line))


def from_record(data: object) -> Event:
    """Decode an event stored as a table in a run record. Raises MalformedError."""
    name = convert(_EventKind, data)["event"]
    if (kind := _KINDS.get(name)) is None:
        raise MalformedError(f"event is {reprlib.repr(name)}, not an event")
    event = convert_fields(kind, data)
    for name, value in event._asdict().items():
        if isinstance(value, int | float):
            require_within(name, value)
    return event


class Lines:
    """Split bytes that arrive in pieces into lines; incomplete lines wait for their end.

    A malformed event becomes a note: it does not end the operation.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Event]:
        """The events that `data` completes."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MOST_BYTES:
            self._rest = b""  # its end is not an event either
        for line in whole:
            try:
                yield from_line(line)
            except MalformedError as exc:
                yield Note(0.0, "events", f"malformed command: {exc}")
