"""A notification: what happened, for a program or a web server (docs/operations.md)."""

import json
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Self

from vmckpt.codec import builtins, convert
from vmckpt.foreign import parse

SCHEMA = 1
# Of `why`, which may quote a guest or another program.
_MOST_CHARS = 2000


class Occasion(StrEnum):
    """What one can be about."""

    FAILOVER = "failover"
    PROTECTION_LOST = "protection-lost"
    PROTECTED = "protected"
    GUEST_PAUSED = "guest-paused"
    GUEST_RESUMED = "guest-resumed"
    SCHEDULE_FAILED = "schedule-failed"
    SCHEDULE_RECOVERED = "schedule-recovered"
    STORE_DAMAGED = "store-damaged"
    TEST = "test"


@dataclass(frozen=True, slots=True, kw_only=True)
class Notification:
    """One event of a VM. Two with the same `id` are about the same event.

    `host`: the host that saw it, by its name in the inventory; `machine`: by its own.
    """

    id: str
    event: str
    vm: str
    host: str
    machine: str
    time: str
    why: str
    details: Mapping[str, object] = field(default_factory=dict)
    schema: int = SCHEMA

    @classmethod
    def now(
        cls,
        event: Occasion,
        *,
        about: str,
        vm: str,
        host: str,
        why: str,
        details: Mapping[str, object] | None = None,
    ) -> Self:
        """One about something that happens now; `about` and the event make its id."""
        time_ = datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="milliseconds")
        return cls(
            id=f"{about}/{event}",
            event=event.value,
            vm=vm,
            host=host,
            machine=socket.gethostname(),
            time=time_.replace("+00:00", "Z"),
            why="".join(char if char.isprintable() else " " for char in why[:_MOST_CHARS]),
            details=details or {},
        )

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Decode what `to_text` encoded. Raises MalformedError."""
        return convert(cls, parse(text))

    def to_text(self) -> str:
        """JSON, on one line."""
        return json.dumps(builtins(self))
