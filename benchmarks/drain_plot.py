"""The picture of benchmarks/drain."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

_LIMIT = "#c0392b"


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Write the picture: fleets against the bound, planning times, real drains and forecasts."""
    mpl.use("agg")
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    bound, planned, real = figure.subplots(1, 3)
    fleets, aims = result["simulated"], result["aims"]
    vms = [row["vms"] for row in fleets]
    bound.scatter(vms, [100 * row["over_bound"] for row in fleets], s=14)
    bound.axhline(100 * aims["over_bound"], color=_LIMIT, linestyle="--")
    bound.set(title="Over the lower bound (%)", xlabel="VMs that move, of 1,000", ylim=(0, None))
    planned.scatter(vms, [row["planned_s"] for row in fleets], s=14)
    planned.axhline(aims["planned_within_s"], color=_LIMIT, linestyle="--")
    planned.set(title="Planning (s)", xlabel="VMs that move, of 1,000", ylim=(0, None))
    rows = [
        (row, "tab:blue" if sitting.get("bandwidth") else "tab:green")
        for sitting in result["sittings"]
        for row in sitting["rows"]
    ]
    for number, (row, judged) in enumerate(rows):
        low, middle, high = row["forecast_s"]
        colour = "0.6" if row["teaches"] else judged
        real.plot([number, number], [low, high], color=colour, linewidth=6, alpha=0.5)
        real.plot(number, middle, "_", color=colour, markersize=14)
        real.plot(number, row["took_s"], "k.")
    real.set(
        title="8 real guests: forecast (p10-p90) and time (s)",
        xlabel="drains (grey ones teach; blue: links held back)",
        ylim=(0, None),
    )
    figure.savefig(path, dpi=110)
