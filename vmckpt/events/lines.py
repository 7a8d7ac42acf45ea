"""Events as lines of JSON, for a reader in another process or on another host."""

import json
from collections.abc import Iterator
from typing import Any

from vmckpt.events.types import Event, JobProgress, Note, PhaseBegan, Progress

_KINDS: dict[str, type[Event]] = {
    kind.__name__: kind for kind in (PhaseBegan, Progress, JobProgress, Note)
}


def to_line(event: Event) -> str:
    """One line, its end included."""
    return json.dumps({"event": type(event).__name__, **event._asdict()}) + "\n"


def from_line(line: str) -> Event:
    """The inverse. Raises ValueError."""
    return from_record(json.loads(line))


def from_record(data: dict[str, Any]) -> Event:
    """The event that a run record has as a table. Raises ValueError."""
    try:
        return _KINDS[data["event"]](**{key: data[key] for key in data if key != "event"})
    except (KeyError, TypeError) as exc:
        raise ValueError(f"no event: {data!r}") from exc


class Lines:
    """Lines out of bytes that come piece by piece; a line that is not whole waits for its end."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Event]:
        """The events that `data` completes."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        for line in whole:
            yield from_line(line.decode())
