"""The picture of benchmarks/any_vm."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

_OURS, _LIMIT = "#1f6fb4", "#c0392b"


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Write the picture: each checkpoint's longest pause, and each run's epochs."""
    mpl.use("agg")
    figure = Figure(figsize=(11, 5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 1))
    checkpoints = result.get("checkpoints", {})
    _dots(left, {cell: seen["pause_ms"] for cell, seen in checkpoints.items()})
    left.axhline(10.0, color=_LIMIT, linestyle="--", linewidth=1, label="limit of the median")
    left.set_ylim(top=12.0)
    left.set_title("Longest pause of a checkpoint (ms)", fontsize=10, loc="left")
    left.legend(fontsize=8)
    told = result.get("replication", {})
    _dots(right, {screen: [one["pause_p50_ms"] for one in seen] for screen, seen in told.items()})
    right.set_title("Median pause of an epoch (ms)", fontsize=10, loc="left")
    machine = result["machine"]
    figure.suptitle(f"Guests of every kind ({machine['cores']} cores, TCG, 256 MiB, 20 MB/s)")
    figure.savefig(path, dpi=110)


def _dots(axes: Axes, cells: Mapping[str, list[float]]) -> None:
    for place, values in enumerate(cells.values()):
        axes.plot([place] * len(values), values, "o", color=_OURS, markersize=4)
    labels = [cell.replace(" with", "\nwith") for cell in cells]
    axes.set_xticks(range(len(cells)), labels)
    axes.tick_params(axis="x", labelsize=8)
    axes.margins(x=0.15, y=0.15)
    axes.set_ylim(bottom=0)
