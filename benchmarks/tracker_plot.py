"""The picture of benchmarks/tracker: what each load lost, with and without the tracker in turns."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def draw(found: dict[str, Any], path: Path) -> None:
    """Work lost and processor time besides, a bar each."""
    loads = found["loads"]
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    work, cost = figure.subplots(1, 2)
    names = [f"{name}\n{load['faults_per_s']:.0f} faults/s" for name, load in loads.items()]
    places = range(len(names))
    values = [100 * load["lost"] for load in loads.values()]
    spans = [
        [100 * (load["lost"] - load["lost_low"]) for load in loads.values()],
        [100 * (load["lost_high"] - load["lost"]) for load in loads.values()],
    ]
    work.barh(places, values, xerr=spans, color="tab:blue", capsize=3)
    work.set(yticks=list(places), yticklabels=names, xlabel="work lost while measured (%)")
    work.axvline(0, color="0.5", linewidth=0.8)
    cost.barh(places, [100 * load["more_processor"] for load in loads.values()], color="tab:orange")
    cost.set(yticks=[], xlabel="more processor time for the same work (%)")
    cost.axvline(0, color="0.5", linewidth=0.8)
    machine = found["machine"]
    figure.suptitle(
        f"vmckpt dirty-rate, page tracking: {machine['qemu'].partition(' (')[0]}, TCG, "
        f"{machine['cores']} cores; medians of {found['rounds']} turns, with 95 % bounds",
        fontsize=9,
    )
    figure.savefig(path, dpi=110)
