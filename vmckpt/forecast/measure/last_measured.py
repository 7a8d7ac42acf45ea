"""Each VM's last measured dirty rate, kept for `vmckpt metrics`: dirty-rates/VM.json."""

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from vmckpt.errors import StorageError
from vmckpt.forecast.measure.dirty_rate import DirtyRate
from vmckpt.hosts.inventory.directories import state_dir
from vmckpt.state.durable import write_durably


def keep(name: str, measured: DirtyRate) -> None:
    """Store a measurement that ended now; a failed write is not an error."""
    directory = _directory()
    data = measured.to_json() | {"windows": [], "at_unix_s": time.time()}
    with suppress(StorageError):
        write_durably(directory / f"{name}.json", json.dumps(data))


def all_kept() -> Iterator[tuple[str, float, DirtyRate]]:
    """Each VM's name, the time of the measurement (Unix seconds), and its result."""
    for path in sorted(_directory().glob("*.json")):
        with suppress(OSError, ValueError, KeyError, TypeError):
            data = json.loads(path.read_text())
            yield path.stem, float(data["at_unix_s"]), DirtyRate.from_json(data)


def _directory() -> Path:
    return state_dir() / "dirty-rates"
