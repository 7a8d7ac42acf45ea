"""How right are forecasts? Real migrations over a matrix of loads, each way run and forecast.

Run: python -m benchmarks.forecast [--cells N] [--again]. It is resumable: every run is kept in
build/forecast as it ends, with its run record, and a later call goes on where the last one stopped
(`--again` forgets them). The first cells teach the planner what the pair of hosts costs; the
others, whole workloads of their own, are judged. Aims are the issue's, each with what was found.
"""

import argparse
import asyncio
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.forecast_plot import draw
from benchmarks.forecast_verdict import verdict
from benchmarks.setting import RESULTS, await_quiet, machine, write_result
from tests.qemu.world import World, image, qemu, world
from vmckpt.lab.labguest import LabGuest

KEPT = Path("build/forecast")
QUIET_PERCENT, PATIENCE_S = 25.0, 120.0
SETTLE_S, GIVE_UP = 3.0, "60s"
# Wanted of a run only so that it is planned: every way keeps it.
ANY_TIME = ("--finish-within", "300d")
WAYS = {
    "precopy": ("--method", "precopy"),
    "auto-converge": ("--method", "precopy", "--auto-converge"),
    "multifd": ("--method", "precopy", "--parallel", "2"),
    "zstd": ("--method", "precopy", "--compress", "zstd"),
    "hybrid": ("--method", "hybrid"),
    "postcopy": ("--method", "postcopy"),
}
FEW = ("precopy", "hybrid", "postcopy")


class Cell(NamedTuple):
    """One workload, and the ways it goes. `judged` cells are held out from teaching."""

    memory: str
    load: str
    bandwidth: str | None
    ways: tuple[str, ...]
    judged: bool

    @property
    def name(self) -> str:
        """As rows call it."""
        return f"{self.memory} {self.load or 'idle'} {self.bandwidth or 'unlimited'}"


def _load(rate: str, size: str, pattern: str, content: str) -> str:
    return f"rate={rate} set={size} pattern={pattern} content={content}"


ALL = tuple(WAYS)
CELLS = (
    Cell("256M", "", None, ALL, judged=False),
    Cell("512M", _load("20M", "128M", "uniform", "random"), None, ALL, judged=False),
    Cell("512M", _load("20M", "128M", "uniform", "random"), "60MB", FEW, judged=False),
    Cell("1G", _load("40M", "256M", "sequential", "random"), "200MB", FEW, judged=False),
    Cell("512M", _load("10M", "256M", "zipf", "random"), None, ALL, judged=True),
    Cell("512M", _load("10M", "256M", "zipf", "text"), "100MB", ALL, judged=True),
    Cell("512M", _load("30M", "64M", "bursty", "random"), "60MB", ALL, judged=True),
    Cell("512M", _load("20M", "128M", "phases", "text"), "100MB", ALL, judged=True),
    Cell("1G", _load("80M", "16M", "uniform", "random"), "60MB", ALL, judged=True),
    Cell("1G", _load("100M", "512M", "uniform", "random"), "60MB", ALL, judged=True),
    Cell("1G", _load("50M", "512M", "zipf", "zero"), "500MB", ALL, judged=True),
    Cell("2G", _load("20M", "1G", "sequential", "text"), "200MB", ALL, judged=True),
    Cell("256M", _load("5M", "2M", "uniform", "random"), "20MB", ALL, judged=True),
)


async def run_cell(made: World, cell: Cell, done: set[tuple[str, str]]) -> None:
    """The ways of a cell that were not run yet, one after the other, there and back."""
    missing = [way for way in cell.ways if (cell.name, way) not in done]
    if not missing:
        return
    guest = LabGuest("judged", 1, image(), memory=cell.memory, disk=None)
    made.run_guest(guest, "lab-a")
    control = await guest.control(made.lab)
    if cell.load:
        await control.load_memory(cell.load)
    await control.close()
    await asyncio.sleep(SETTLE_S)
    here = "lab-a"
    for way in missing:
        busy = await await_quiet(QUIET_PERCENT, PATIENCE_S)
        there = "lab-b" if here == "lab-a" else "lab-a"
        row = await asyncio.to_thread(move, made, cell, way, there)
        keep(made, row | {"busy_percent": round(busy), "judged": cell.judged})
        here = there if row["outcome"] == "completed" else here
    made.ok("vm", "stop", "judged", "--force")
    made.ok("vm", "rm", "judged")


def move(made: World, cell: Cell, way: str, host: str) -> dict[str, Any]:
    """One planned migration as a row; one that is forecast not to end is tried all the same."""
    bandwidth = ("--bandwidth", cell.bandwidth) if cell.bandwidth else ()
    words = ("migrate", "judged", host, *WAYS[way], *bandwidth, "--timeout", GIVE_UP)
    done = made.vmckpt(*words, *ANY_TIME)
    endless = done.code == 4
    if endless:
        done = made.vmckpt(*words)
    row: dict[str, Any] = {"cell": cell.name, "way": way, "forecast_ends": not endless}
    if done.code:
        return row | {"outcome": done.result["error"]["kind"], "why": done.result["error"]["why"]}
    result = done.result
    keys = ("total_time_s", "transfer_time_s", "downtime_ms", "guest_downtime_ms", "rounds")
    record = json.loads(Path(result["run_record"]).read_text())
    forecast = record["forecast"]["forecast"] if record["forecast"] else None
    facts = {key: result[key] for key in keys} | {"sent_bytes": result["transferred_bytes"]}
    return row | facts | {"outcome": "completed", "run": result["run"], "forecast": forecast}


def keep(made: World, row: dict[str, Any]) -> None:
    """On disk at once: what was measured once is not measured again."""
    with (KEPT / "rows.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    for record in (made.state_dir / "runs").glob("*.json"):
        shutil.copy(record, KEPT / "runs")
    print(f"{row['cell']}: {row['way']}: {row['outcome']} {row.get('total_time_s', '')}")


def kept() -> list[dict[str, Any]]:
    """All rows so far."""
    path = KEPT / "rows.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def measure(cells: Sequence[Cell]) -> None:
    """Run what was not run yet."""
    done = {(row["cell"], row["way"]) for row in kept()}
    with world(qemu("10.0"), qemu("10.0")) as made:
        (made.state_dir / "runs").mkdir(exist_ok=True)
        for record in (KEPT / "runs").glob("*.json"):
            shutil.copy(record, made.state_dir / "runs")
        if not done:
            made.ok("host", "calibrate", "lab-a", "lab-b")
        for cell in cells:
            asyncio.run(run_cell(made, cell, done))


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=int, default=len(CELLS), help="only the first so many")
    parser.add_argument("--again", action="store_true", help="forget the runs so far")
    asked = parser.parse_args()
    if asked.again:
        shutil.rmtree(KEPT, ignore_errors=True)
    (KEPT / "runs").mkdir(parents=True, exist_ok=True)
    measure(CELLS[: asked.cells])
    rows = kept()
    content = {"machine": machine(), **verdict(rows), "rows": rows}
    print(write_result("forecast", content))
    draw(rows, RESULTS / "forecast.png")
    print(json.dumps(content["aims"], indent=1))


if __name__ == "__main__":
    main()
