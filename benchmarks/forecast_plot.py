"""The picture of benchmarks/forecast."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.forecast_verdict import pause_ms


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Forecast against outcome: total time and pause, a point a run with its p10 to p90."""
    mpl.use("agg")
    figure = Figure(figsize=(12, 6), layout="constrained")
    total, pause = figure.subplots(1, 2)
    ended = [row for row in rows if row["outcome"] == "completed" and row["forecast"]]
    for way in sorted({row["way"] for row in ended}):
        chosen = [row for row in ended if row["way"] == way]
        came = [row["total_time_s"] for row in chosen]
        _points(total, came, [row["forecast"]["total_s"] for row in chosen], way)
        pauses = [pause_ms(row) / 1e3 for row in chosen]
        _points(pause, pauses, [row["forecast"]["downtime_s"] for row in chosen], way)
    for axes, what in ((total, "total time"), (pause, "pause")):
        low, high = axes.get_xlim()
        axes.plot([low, high], [low, high], color="0.6", linewidth=0.8)
        axes.set(xscale="log", yscale="log", xlabel=f"{what} forecast (s)", ylabel="came (s)")
        axes.set_title(what, loc="left")
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=110)


def _points(axes: Any, came: list[float], bands: list[Sequence[float]], way: str) -> None:
    middle = [max(band[1], 1e-4) for band in bands]
    below = [m - min(max(band[0], 1e-4), m) for m, band in zip(middle, bands, strict=True)]
    above = [max(band[2] - m, 0.0) for m, band in zip(middle, bands, strict=True)]
    axes.errorbar(middle, came, xerr=[below, above], fmt="o", markersize=4, label=way, alpha=0.7)
