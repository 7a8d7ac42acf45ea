"""The picture of benchmarks/forecast."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from benchmarks.forecast_verdict import forecast_and_ended, pause_ms


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Forecast against outcome: total time and pause, a point a run with its p10 to p90."""
    mpl.use("agg")
    figure = Figure(figsize=(12, 6), layout="constrained")
    total, pause = figure.subplots(1, 2)
    ended = forecast_and_ended(row for row in rows if row["judged"] and "intent" not in row)
    for way in sorted({row["way"] for row in ended}):
        chosen = [row for row in ended if row["way"] == way]
        came = [row["total_time_s"] for row in chosen]
        _points(total, came, [row["forecast"]["total_s"] for row in chosen], way)
        pauses = [pause_ms(row) / 1e3 for row in chosen]
        _points(pause, pauses, [row["forecast"]["downtime_s"] for row in chosen], way)
    for axes, what in ((total, "total time"), (pause, "pause")):
        axes.set(xscale="log", yscale="log", xlabel=f"{what} forecast (s)", ylabel="came (s)")
        axes.xaxis.set_minor_formatter(NullFormatter())
        low, high = axes.get_ylim()
        axes.plot([low, high], [low, high], color="0.6", linewidth=0.8)
        axes.set_title(f"{what}: median and p10 to p90 against what came", loc="left")
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=110)


def _points(axes: Any, came: list[float], bands: list[Sequence[float | None]], way: str) -> None:
    # An endless bad outcome is drawn as if there were no band on that side.
    ordered = [[max(value or 0.0, 1e-4) for value in band] for band in bands]
    middle = [band[1] for band in ordered]
    below = [band[1] - min(band[0], band[1]) for band in ordered]
    above = [max(band[2] - band[1], 0.0) for band in ordered]
    axes.errorbar(middle, came, xerr=[below, above], fmt="o", markersize=4, label=way, alpha=0.7)
