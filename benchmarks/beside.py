"""Two commits beside each other: the same benchmarks, in turns, on one machine.

    python -m benchmarks.beside OLD NEW [--turns 3]

OLD and NEW are checkouts in which `make setup` was run. Each turn runs every benchmark of one and
then of the other, the order alternating, so that what else the machine does meets both. A figure's
ratio is that of its medians, new / old, over all turns; below 1 the new commit is faster.
"""

import argparse
import json
import os
import statistics
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.beside_plot import draw
from benchmarks.setting import machine, write_result

Found = Mapping[str, Any]
Values = Mapping[str, Sequence[float]]
SLOWER = 1.03
NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"


def _overhead(found: Found) -> Iterator[tuple[str, Sequence[float]]]:
    for way in ("vmckpt", "vmckpt, one channel"):
        samples = [one for one in found["samples"] if one["way"] == way]
        yield f"migrate ({way}): s", [one["wall_s"] for one in samples]
        for limit_ms in (300, 30):
            downtimes = [
                one["guest_downtime_ms"]
                for one in samples
                if one["downtime_limit_ms"] == limit_ms and one["guest_downtime_ms"] is not None
            ]
            yield f"migrate ({way}, limit {limit_ms} ms): guest downtime, ms", downtimes
    for command, values in found["commands_ms"].items():
        yield f"start of `{command}`, ms", values


def _replication(found: Found) -> Iterator[tuple[str, Sequence[float]]]:
    for pace in ("25 ms", "5 a second"):
        figures = found["paces"][pace]["figures"]
        for figure in ("pause_p50_ms", "pause_p99_ms", "safe_after_p50_ms"):
            yield f"replicate ({pace}): {figure}", [figures[figure]]
    for figure in ("to_first_answer_ms", "took_over_ms"):
        yield f"failover: {figure}", found["kills"][figure]


def _checkpoint(found: Found) -> Iterator[tuple[str, Sequence[float]]]:
    for load, runs in found["pauses-256M"].items():
        yield f"checkpoint ({load}): pause, ms", runs["ours_ms"]
        yield f"checkpoint ({load}): time, s", runs["took_s"]
    for kind, runs in found["restore-256M"].items():
        for figure in ("running_ms", "answered_ms"):
            yield f"restore ({kind}): {figure}", [one[figure] for one in runs]
    yield "fork: ms", found["forks"]["took_ms"]


def _group(found: Found) -> Iterator[tuple[str, Sequence[float]]]:
    rows = [row for piece in found["together"]["pieces"] for row in piece["rows"]]
    yield "group: skew, ms", [row["skew_ms"] for row in rows]
    yield "group: time, s", [row["took_s"] for row in rows]
    yield "group: longest pause, ms", [max(row["longest_pause_ms"]) for row in rows]


BENCHMARKS: Mapping[
    str, tuple[Sequence[str], Callable[[Found], Iterator[tuple[str, Sequence[float]]]]]
] = {
    "overhead": (("--rounds", "6", "--starts", "7"), _overhead),
    "replication": (("--seconds", "5"), _replication),
    "checkpoint": (("pauses-256M", "restore-256M", "forks"), _checkpoint),
    "group": (("together", "--cuts", "25", "--again"), _group),
}


def measured(checkout: Path, name: str) -> dict[str, list[float]]:
    """One run of a benchmark there: its figures' values."""
    words, figures = BENCHMARKS[name]
    python = checkout / ".venv/bin/python"
    subprocess.run([python, "-m", f"benchmarks.{name}", *words], cwd=checkout, check=True)
    found = json.loads((checkout / f"benchmarks/results/{name}.json").read_text())
    return {figure: list(values) for figure, values in figures(found)}


def commit(checkout: Path) -> str:
    """What is checked out there."""
    words = ["git", "-C", str(checkout), "describe", "--always", "--dirty"]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


def compile_bytecode(checkout: Path) -> None:
    """As an installation has it: where Python may not write it, each start would compile again."""
    python = str(checkout / ".venv/bin/python")
    environment = {key: text for key, text in os.environ.items() if key != NO_BYTECODE}
    words = [python, "-m", "compileall", "-q", "vmckpt", "benchmarks", "tests"]
    subprocess.run(words, cwd=checkout, env=environment, check=True)


def compared(values: Sequence[Values], others: Sequence[Values]) -> dict[str, dict[str, float]]:
    """By figure: the medians of all values of both, and their ratio."""
    found = {}
    for figure in values[0]:
        new = statistics.median(value for turn in values for value in turn[figure])
        old = statistics.median(value for turn in others for value in turn[figure])
        turns = [
            statistics.median(one[figure]) / statistics.median(other[figure])
            for one, other in zip(values, others, strict=True)
        ]
        found[figure] = {
            "old": old,
            "new": new,
            "ratio": new / old,
            "least": min(turns),
            "most": max(turns),
        }
    return found


def main() -> None:
    """Measure, write after each turn, draw, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only", choices=BENCHMARKS, nargs="*", default=list(BENCHMARKS))
    given = parser.parse_args()
    checkouts = {"old": given.old.resolve(), "new": given.new.resolve()}
    commits = {side: commit(path) for side, path in checkouts.items()}
    for path in checkouts.values():
        compile_bytecode(path)
    turns: dict[str, dict[str, list[dict[str, list[float]]]]] = {}
    for turn in range(given.turns):
        for name in given.only:
            sides = turns.setdefault(name, {"old": [], "new": []})
            for side in ("old", "new") if turn % 2 == 0 else ("new", "old"):
                sides[side].append(measured(checkouts[side], name))
        found = {name: compared(sides["new"], sides["old"]) for name, sides in turns.items()}
        result = {"machine": machine(), "commits": commits, "turns": turn + 1, "figures": found}
        path = write_result("beside", result)
        draw(result, path.with_suffix(".png"))
    for figures in found.values():
        for figure, one in figures.items():
            print(f"{figure:55} {one['old']:9.2f} {one['new']:9.2f}  {one['ratio']:.2f}  "
                  f"({one['least']:.2f} to {one['most']:.2f})"
                  f"{'  slower' if one['ratio'] > SLOWER else ''}")  # fmt: skip


if __name__ == "__main__":
    main()
