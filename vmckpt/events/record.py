"""Run records: one JSON file per operation with its request, samples, events and result."""

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from vmckpt.errors import NotFoundError
from vmckpt.events.types import Event, Progress
from vmckpt.state.durable import make_dir_durably, replace

# Notes with these codes mean that a run's times teach nothing about others: the link was shared, or
# broke; the last figures are missing.
SHARED_LINK, LINK_BROKE, FIGURES_MISSING = "shared-link", "link", "figures"

FORMAT = 1
# How many records keep their samples and events; older records lose them if longer than this.
WHOLE_KEPT, SHORT_BYTES = 1000, 8 << 10


@dataclass(slots=True)
class RunRecord:
    """The record of one operation, written once at its end (and, unfinished, at its start)."""

    run: str
    operation: str
    request: Mapping[str, Any]
    began_unix_s: float = field(default_factory=time.time)
    events: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    result: Mapping[str, Any] | None = None
    forecast: Mapping[str, Any] | None = None

    def add(self, event: Event) -> None:
        """Keep an event."""
        if isinstance(event, Progress):
            self.samples.append(event._asdict())
        else:
            self.events.append({"event": type(event).__name__, **event._asdict()})

    def save(self, directory: Path) -> Path:
        """Write the record as RUN.json below `directory`, atomically.

        Returns its path. Raises OSError.
        """
        make_dir_durably(directory)
        path = directory / f"{self.run}.json"
        fields = {name: getattr(self, name) for name in self.__slots__}
        replace(path, json.dumps({"format": FORMAT, **fields}))
        if self.result is None:  # another run begins
            _shorten_old(directory)
        return path

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a record. Raises NotFoundError if it does not exist or is not a record."""
        try:
            data = json.loads(path.read_text())
            if data.pop("format") != FORMAT:
                raise ValueError("written by another version of vmckpt")
            return cls(**data)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
            raise NotFoundError(
                f"there is no run '{path.stem}'",
                why=str(exc) or type(exc).__name__,
                remedy="see `vmckpt runs list`",
            ) from exc


def _shorten_old(directory: Path) -> None:
    """Strip all but the newest records: the request and the result remain.

    Every forecast, every plan and every metrics scrape reads all records.
    """
    for path in sorted(directory.glob("*.json"))[:-WHOLE_KEPT]:
        with suppress(OSError, NotFoundError):
            if path.stat().st_size <= SHORT_BYTES:
                continue
            record = RunRecord.load(path)
            if record.result is not None and (record.samples or record.events):
                record.samples, record.events = [], []
                record.save(directory)


def load_all(directory: Path) -> list[RunRecord]:
    """Every record below `directory`, oldest first; files that are not records are left out."""
    records = []
    for path in directory.glob("*.json"):
        try:
            records.append(RunRecord.load(path))
        except NotFoundError:
            continue
    return sorted(records, key=lambda record: record.began_unix_s)
