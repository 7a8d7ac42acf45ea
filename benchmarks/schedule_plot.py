"""The picture of benchmarks/schedule: an interval's distance from the best one."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def draw(found: dict[str, Any], path: Path) -> None:
    """Both parts, side by side."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    known, learned = figure.subplots(1, 2)
    ratios = [one["cost_by_mtbf"] for one in found["known"]]
    for key, label in (("young_off", "Young"), ("daly_off", "Daly"), ("off", "vmckpt (exact)")):
        known.plot(ratios, [max(abs(one[key]), 1e-12) for one in found["known"]], label=label)
    known.axhline(0.01, color="0.5", linewidth=0.8, linestyle="--")
    known.set(xscale="log", yscale="log", xlabel="cost of a checkpoint / time between failures")
    known.set(ylabel="interval's distance from the optimum", title="all known")
    known.legend(fontsize=8)
    for name, rows in found["learned"].items():
        counts = [row["failures"] + 1 for row in rows]
        (line,) = learned.plot(counts, [row["off_p95"] for row in rows], label=f"assumed: {name}")
        lost = [max(row["overhead_more_p95"], 1e-9) for row in rows]
        learned.plot(counts, lost, color=line.get_color(), linestyle=":")
    learned.axhline(0.05, color="0.5", linewidth=0.8, linestyle="--")
    learned.set(xscale="log", yscale="log", xlabel="failures seen + 1")
    learned.set(title=f"learning, 95 % of {found['vms']} VMs (dotted: what it costs more)")
    learned.legend(fontsize=8)
    figure.savefig(path, dpi=110)
