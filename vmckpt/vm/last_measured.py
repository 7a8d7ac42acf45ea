"""Each VM's last measured dirty rate, kept for who comes after: dirty-rates/VM.json."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from vmckpt.hosts.inventory import state_dir

if TYPE_CHECKING:
    from vmckpt.vm.dirty_rate import DirtyRate

# A host's pace is what it was, for so long.
FRESH_S = 60.0


def keep(name: str, host: str, measured: "DirtyRate") -> None:
    """Remember a measurement that ended now; that it cannot be written loses nothing else."""
    directory = _directory()
    part = directory / f".{name}.{os.getpid()}.part"
    data = measured.to_json() | {"windows": [], "host": host, "at_unix_s": time.time()}
    with suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        part.write_text(json.dumps(data))
        part.rename(directory / f"{name}.json")


def all_kept() -> "Iterator[tuple[str, float, DirtyRate]]":
    """The VM's name, when it was measured (Unix seconds), and what came of it."""
    from vmckpt.vm.dirty_rate import DirtyRate

    for path in sorted(_directory().glob("*.json")):
        with suppress(OSError, ValueError, KeyError, TypeError):
            data = json.loads(path.read_text())
            yield path.stem, float(data["at_unix_s"]), DirtyRate.from_json(data)


def copying_s_now(name: str, host: str) -> float | None:
    """Processor seconds that copying a GiB took on the host, where the VM was measured just now."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        data = json.loads((_directory() / f"{name}.json").read_text())
        if data["host"] == host and time.time() - data["at_unix_s"] < FRESH_S:
            seconds = data["copying_s_per_gib"]
            return None if seconds is None else float(seconds)
    return None


def _directory() -> Path:
    return state_dir() / "dirty-rates"
