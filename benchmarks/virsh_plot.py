"""The picture of benchmarks/virsh."""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

_COLOURS = ("#888888", "#bbbbbb", "#bbbbbb", "#1f6fb4", "#2e8b57", "#7fc29b")
_QUANTITIES = {"wall_s": "total time (s)", "guest_downtime_ms": "guest-visible downtime (ms)"}


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Write the picture: every move of each way, and the medians."""
    mpl.use("agg")
    figure = Figure(figsize=(19, 4), layout="constrained")
    samples, ways = result["samples"], list(result["total_s"])
    for axes, (field, title) in zip(figure.subplots(1, 2), _QUANTITIES.items(), strict=True):
        for place, (way, colour) in enumerate(zip(ways, _COLOURS, strict=True)):
            values = [sample[field] for sample in samples if sample["way"] == way]
            steps = [place + 0.5 * (i / len(values) - 0.5) for i in range(len(values))]
            axes.plot(steps, values, "o", color=colour, markersize=4)
            axes.hlines(
                statistics.median(values), place - 0.3, place + 0.3, color=colour, linewidth=2
            )
        axes.set_xticks(range(len(ways)), [way.replace(", ", ",\n") for way in ways])
        axes.set_ylim(bottom=0)
        axes.set_title(f"{title}; lines are medians", loc="left", fontsize=10)
    figure.savefig(path, dpi=110)
