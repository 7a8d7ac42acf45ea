"""A benchmark of parts, measured one by one or all: one file has the last of each, and verdicts."""

import asyncio
import json
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.setting import RESULTS, await_quiet, machine, write_result
from benchmarks.summary import Verdict, verdicts_as_json

BUSY_PERCENT = 10.0
Found = dict[str, Any]


def measured_before(name: str) -> Found:
    """What results/NAME.json has; nothing if there is none."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def measure(
    name: str,
    parts: Mapping[str, Callable[[], Coroutine[Any, Any, Found]]],
    verdicts: Callable[[Found], Sequence[Verdict]],
    draw: Callable[[Found, Path], None],
    patience_s: float,
) -> None:
    """The parts, printed and written to results/NAME.json as each ends, with a picture."""
    # Commands are compiled once, as in an installation.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    busy = asyncio.run(await_quiet(BUSY_PERCENT, patience_s))
    for part, work in parts.items():
        seen = asyncio.run(work())
        found = measured_before(name) | {part: seen}
        write_result(name, found | {"machine": machine(), "others_use_percent": round(busy, 1)})
    conclude(name, verdicts, draw)


def conclude(
    name: str, verdicts: Callable[[Found], Sequence[Verdict]], draw: Callable[[Found, Path], None]
) -> None:
    """What results/NAME.json has against what was promised: written there, printed, and drawn."""
    found = measured_before(name)
    found["verdicts"] = verdicts_as_json(verdicts(found))
    path = write_result(name, found)
    draw(found, path.with_suffix(".png"))
    print(f"written: {path}")
    for verdict in found["verdicts"]:
        met = "met " if verdict["met"] else "NOT "
        print(f"  {met} {verdict['promise']}: {verdict['measured']:.3g} (at most "
              f"{verdict['limit']:.3g})")  # fmt: skip
