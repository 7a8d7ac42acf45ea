"""The kept runs of benchmarks/forecast, forecast again by the model as it stands."""

import json
import tarfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.setting import RESULTS
from vmckpt.events.record import RunRecord, load_all
from vmckpt.forecast.guest_of import guest_of
from vmckpt.forecast.learned import learned, sending
from vmckpt.forecast.measure.dirty_rate import DirtyRate
from vmckpt.forecast.model.choose import Intent, choose, judge
from vmckpt.forecast.model.forecast import Forecast, MigrationLimits, TransferMode, forecast
from vmckpt.forecast.model.link import LinkModel
from vmckpt.options.migration import MigrationOptions
from vmckpt.units import parse_rate_bytes_per_s

KEPT = Path("build/forecast")
PACKED = RESULTS / "forecast_runs.tar.xz"
# The ways that are both run and forecast.
RUN = tuple(way for way in TransferMode if way is not TransferMode.STOP)


def kept() -> list[dict[str, Any]]:
    """All rows so far, as they were kept."""
    path = KEPT / "rows.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def pack() -> None:
    """Put all that is kept into one file beside the result."""
    with tarfile.open(PACKED, "w:xz") as archive:
        for path in sorted(path for path in KEPT.resolve().rglob("*") if path.is_file()):
            archive.add(path, path.relative_to(KEPT.resolve()))


def unpack() -> None:
    """The inverse, where there is such a file."""
    if PACKED.exists():
        with tarfile.open(PACKED, "r:xz") as archive:
            archive.extractall(KEPT)  # its own files; Debian 12's Python knows no filters


def replayed() -> list[dict[str, Any]]:
    """All rows so far, with what the planner says today by what was measured before each run.

    It learns from calibration and teaching cells alone; a teaching run from all of these too, so
    that its error is one of explaining, not of forecasting.
    """
    records = load_all(KEPT / "runs")
    return [_by_intent(row) if "intent" in row else _anew(row, records) for row in kept()]


def left_out() -> list[dict[str, Any]]:
    """The teaching rows, each forecast by what all cells but its own teach.

    The judge of choices of the model: by the judged rows it must not be fitted.
    """
    records, rows = load_all(KEPT / "runs"), kept()
    return [_anew(row, of_others(row, rows, records)) for row in rows if not row["judged"]]


def of_others(
    row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], records: Sequence[RunRecord]
) -> list[RunRecord]:
    """The records of all but the row's own cell."""
    own = {one.get("run") for one in rows if one["cell"] == row["cell"]}
    return [record for record in records if record.run not in own]


def _anew(row: Mapping[str, Any], records: Sequence[RunRecord]) -> dict[str, Any]:
    began_s = time.process_time()
    found = {one.mode: one for one in forecasts(row, records)}
    choice = choose([judge(one, Intent()) for one in found.values()], Intent())
    took_s = time.process_time() - began_s
    one = found[TransferMode(row["way"])]
    rest = {key: value for key, value in row.items() if key != "plan"}
    return rest | {
        "forecast_ends": one.ends,
        "forecast": one.to_json(),
        "chosen": choice.mode,
        "forecast_ms": round(1e3 * took_s, 2),
    }


def forecasts(row: Mapping[str, Any], records: Sequence[RunRecord]) -> list[Forecast]:
    """Every way of a kept row, from its measurement."""
    plan = row["plan"]
    # The first rows were measured when only the benchmark looked at the processor.
    measured = DirtyRate.from_json({"busy": row["processor_share"]} | plan["dirty_rate"])
    links = learned(records, plan["source"], plan["target"], plan["vm"])
    limits = MigrationLimits(MigrationOptions().max_downtime_ms / 1e3, bandwidth_bytes_per_s(row))
    guest = guest_of(measured, moves_now=True)
    return [forecast(way, guest, _link(links, way), limits) for way in RUN]


def bandwidth_bytes_per_s(row: Mapping[str, Any]) -> float:
    """The cell's limit; 0 without one."""
    word = str(row["cell"]).rpartition(" ")[2]
    return 0.0 if word == "unlimited" else float(parse_rate_bytes_per_s(word))


def _link(links: Mapping[str, LinkModel], way: TransferMode) -> LinkModel:
    return links[sending(way, encrypted=False)]


def _by_intent(row: Mapping[str, Any]) -> dict[str, Any]:
    """A run by intent stands as it was: its way was chosen then."""
    if row["outcome"] != "completed":
        return dict(row)
    record = RunRecord.load(KEPT / "judged" / f"{row['run']}.json")
    forecast = record.forecast["forecast"] if record.forecast else None
    return dict(row) | {"forecast": forecast, "chosen": forecast["way"] if forecast else None}
