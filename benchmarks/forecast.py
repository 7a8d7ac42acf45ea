"""How right are forecasts? Real migrations over a matrix of loads, each way run and forecast.

Run: python -m benchmarks.forecast [--cells 5:9] [--turns 3] [--minutes N] [--again]. It is
resumable: every run is kept in build/forecast as it ends, with what was measured before it and its
record, and a later call goes on where the last one stopped (`--again` forgets them). `--replay`
runs nothing. All of it is packed beside the result: after a change of the model any clone can judge
it by the same runs.

Every way of a judged cell goes `--turns` times: one move is off by noise that no forecast can know,
and of three the one in the middle is off by less. Both are judged.

The first cells teach the planner what the pair of hosts costs; the others, whole workloads of their
own, are judged, and nothing of them teaches. Forecasts are made again from what was measured before
each run, so that the verdict is about the model as it stands. Aims are the issue's. Beside the
verdict: the cells that teach, each left out of the teaching in turn, by which a model is chosen.
"""

import argparse
import asyncio
import json
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.forecast_cells import CELLS, INTENT, WAYS, Cell
from benchmarks.forecast_plot import draw
from benchmarks.forecast_replay import KEPT, kept, left_out, pack, replayed, unpack
from benchmarks.forecast_verdict import errors, verdict
from benchmarks.others import Others
from benchmarks.setting import RESULTS, await_quiet, machine, processor_s, write_result
from benchmarks.warm_memory import warm
from tests.qemu.world import World, image, qemu, world
from vmckpt.lab.guests.guest import GuestControl
from vmckpt.lab.guests.labguest import LabGuest

QUIET_PERCENT, PATIENCE_S = 25.0, 20.0
SETTLE_S = 3.0
# A run is given up after twice its bad outcome and a bit, one that shall not end after a while.
ENDLESS_S, LONGEST_S, BIT_S = 40.0, 75.0, 10.0
# Warm besides what a guest has on both sides.
SPARE_BYTES = 512 << 20


async def run_cell(
    made: World, cell: Cell, turn: int, missing: Sequence[str], until_s: float
) -> None:
    """The ways of a cell that were not run yet, one after the other, there and back."""
    name, _ = _words(cell)
    control = await _booted(made, name, cell.memory)
    if cell.load:
        await control.load_memory(cell.load)
    await control.close()
    await asyncio.sleep(SETTLE_S)
    here = "lab-a"
    for way in missing:
        if time.monotonic() > until_s:
            break
        await await_quiet(QUIET_PERCENT, PATIENCE_S, but=made.pids(name))
        there = "lab-b" if here == "lab-a" else "lab-a"
        go = by_intent if way == INTENT else by_way
        row = await asyncio.to_thread(go, made, cell, way, there)
        keep(made, row | {"judged": cell.judged, "turn": turn})
        here = there if row["outcome"] == "completed" else here
    made.ok("vm", "stop", name, "--force")
    made.ok("vm", "rm", name)


async def _booted(made: World, name: str, memory: str) -> GuestControl:
    """A guest on lab-a, without an agent: how long its clock takes to be put right is its own."""
    guest = LabGuest(name, 1, image(), memory=memory, disk=None)
    spec = made.state_dir / f"{name}.toml"
    spec.write_text(guest.spec().replace("guest_agent = true", "guest_agent = false"))
    made.ok("vm", "run", str(spec), "--host", "lab-a")
    return await guest.control(made.lab)


def by_way(made: World, cell: Cell, way: str, host: str) -> dict[str, Any]:
    """One migration as a row; one that is forecast not to end is tried all the same."""
    name, bandwidth = _words(cell)
    used_s, began_s = processor_s(made.pids(name)), time.monotonic()
    plan = made.vmckpt("plan", name, host, *bandwidth).result
    if "error" in plan:
        raise SystemExit(f"{cell.name}: {plan['error']}")
    share = (processor_s(made.pids(name)) - used_s) / (time.monotonic() - began_s)
    forecast = next((one for one in plan["ways"] if one["way"] == way), None)
    worst_s = forecast["total_s"][2] if forecast else None
    give_up_s = ENDLESS_S if worst_s is None else min(2 * worst_s + BIT_S, LONGEST_S)
    timeout = ("--timeout", f"{round(give_up_s)}s")
    others = Others(str(made.state_dir))
    done = made.vmckpt("migrate", name, host, *WAYS[way], *bandwidth, *timeout)
    row = {"cell": cell.name, "way": way, "processor_share": round(share, 3), "plan": plan}
    row |= {"give_up_s": round(give_up_s), "others_busy_percent": round(others.busy_percent())}
    return row | _came(done.code, done.result)


def by_intent(made: World, cell: Cell, way: str, host: str) -> dict[str, Any]:
    """One migration by a way that the planner chose, as a row; its plan is in its record."""
    name, bandwidth = _words(cell)
    others = Others(str(made.state_dir))
    done = made.vmckpt("migrate", name, host, *bandwidth, *cell.intent)
    busy = round(others.busy_percent())
    row = {"cell": cell.name, "way": way, "intent": list(cell.intent), "others_busy_percent": busy}
    return row | _came(done.code, done.result)


def _words(cell: Cell) -> tuple[str, tuple[str, ...]]:
    name = "judged" if cell.judged else "taught"
    return name, ("--bandwidth", cell.bandwidth) if cell.bandwidth else ()


def _came(code: int, result: dict[str, Any]) -> dict[str, Any]:
    if code:
        return {"outcome": result["error"]["kind"], "why": result["error"]["why"]}
    keys = (
        "total_time_s", "transfer_time_s", "downtime_ms", "guest_downtime_ms", "rounds", "run",
        "transferred_bytes", "method",
    )  # fmt: skip
    return {"outcome": "completed"} | {key: result[key] for key in keys}


def keep(made: World, row: dict[str, Any]) -> None:
    """On disk at once: what was measured once is not measured again.

    Records of judged runs go elsewhere: the planner shall not learn from them.
    """
    with (KEPT / "rows.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    new = keep_records(made, KEPT / ("judged" if row["judged"] else "runs"))
    if row["judged"]:
        for record in new:
            record.unlink()
    took = f"{row.get('total_time_s', '')} others {row['others_busy_percent']} %"
    print(f"{row['cell']}: {row['way']}: {row['outcome']} {took}")


def keep_records(made: World, folder: Path) -> list[Path]:
    """Copy the records that are not kept yet to `folder`; which these are."""
    known = {path.name for path in (KEPT / "runs").glob("*.json")}
    found = (made.state_dir / "runs").glob("*.json")
    new = [record for record in found if record.name not in known]
    for record in new:
        shutil.copy(record, folder)
    return new


def missing_ways(cell: Cell, turn: int) -> list[str]:
    """The ways of a cell that were not run yet in this turn.

    What teaches goes once, and again goes only what came to its end before.
    """
    rows = [row for row in kept() if row["cell"] == cell.name]
    done = {row["way"] for row in rows if row["turn"] == turn}
    ended = {row["way"] for row in rows if row["outcome"] == "completed"}
    wanted = [way for way in cell.runs if turn == 0 or (cell.judged and way in ended)]
    return [way for way in wanted if way not in done]


def measure(cells: Sequence[Cell], turns: int, until_s: float) -> None:
    """Run what was not run yet, as long as there is time."""
    (KEPT / "machine.json").write_text(json.dumps(machine()))
    with world(qemu("10.0"), qemu("10.0")) as made:
        (made.state_dir / "runs").mkdir(exist_ok=True)
        for record in (KEPT / "runs").glob("*.json"):
            shutil.copy(record, made.state_dir / "runs")
        if not any((KEPT / "runs").glob("*.json")):
            with warm(SPARE_BYTES):
                made.ok("host", "calibrate", "lab-a", "lab-b")
            keep_records(made, KEPT / "runs")
        for turn, cell in product(range(turns), cells):
            missing = missing_ways(cell, turn)
            if missing and time.monotonic() < until_s:
                with warm(2 * cell.memory_bytes + SPARE_BYTES):
                    asyncio.run(run_cell(made, cell, turn, missing, until_s))


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", default=":", help="only these, by number: FIRST:END")
    parser.add_argument("--turns", type=int, default=3, help="so often goes what is judged")
    parser.add_argument("--minutes", type=float, default=600, help="begin no run after so long")
    parser.add_argument("--again", action="store_true", help="forget the runs so far")
    parser.add_argument("--no-verdict", action="store_true", help="only run, and judge later")
    parser.add_argument("--replay", action="store_true", help="only forecast the kept runs anew")
    asked = parser.parse_args()
    if asked.again:
        shutil.rmtree(KEPT, ignore_errors=True)
    elif not KEPT.exists():
        unpack()
    for name in ("runs", "judged"):
        (KEPT / name).mkdir(parents=True, exist_ok=True)
    if not asked.replay:
        # Whoever ends this from outside shall not leave a lab behind.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        first, _, end = asked.cells.partition(":")
        chosen = CELLS[int(first or 0) : int(end or len(CELLS))]
        measure(chosen, asked.turns, time.monotonic() + 60 * asked.minutes)
        if asked.no_verdict:
            return
    rows = replayed()
    where = json.loads((KEPT / "machine.json").read_text())
    left = errors(left_out())
    content = {"machine": where, **verdict(rows), "teaching_left_out": left, "rows": rows}
    print(write_result("forecast", content))
    if content["aims"]:
        draw(rows, RESULTS / "forecast.png")
        pack()
    print(json.dumps({"teaching_left_out": left, "aims": content["aims"]}, indent=1))


if __name__ == "__main__":
    main()
