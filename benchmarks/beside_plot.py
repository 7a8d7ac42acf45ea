"""The picture of benchmarks/beside."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Write the picture: each figure's ratio, new / old, with the range over the turns."""
    mpl.use("agg")
    rows = [
        (figure, one) for figures in result["figures"].values() for figure, one in figures.items()
    ]
    figure = Figure(figsize=(9, 0.28 * len(rows) + 1.2), layout="constrained")
    axes = figure.subplots()
    places = range(len(rows), 0, -1)
    for place, (_, one) in zip(places, rows, strict=True):
        axes.plot([one["least"], one["most"]], [place, place], color="#9db8d2", linewidth=3)
    axes.plot([one["ratio"] for _, one in rows], places, "o", color="#1f6fb4", markersize=5)
    axes.axvline(1.0, color="#888888", linewidth=1)
    axes.set_yticks(places, [name for name, _ in rows], fontsize=8)
    axes.set_xscale("log")
    ticks = (0.25, 0.5, 0.75, 1, 1.5, 2, 4)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    commits = result["commits"]
    axes.set_title(
        f"{commits['new']} / {commits['old']}: below 1 the newer one is faster "
        f"({result['turns']} turns)",
        fontsize=10,
        loc="left",
    )
    figure.savefig(path, dpi=110)
