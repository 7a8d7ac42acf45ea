"""The picture of `group`: what each cut cost its guests, in order of size."""

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from benchmarks.pieces import rows

SERIES = (
    ("stall_ms", "TCP stall, a client outside", "tab:red"),
    ("held_ms", "output held", "tab:orange"),
    ("cut_pause_ms", "pause at the cut", "tab:blue"),
)


def draw(found: dict[str, Any], path: Path) -> None:
    """Write the picture."""
    cuts = [one for one in rows(found, "together", alone=True) if "said" in one]
    if not cuts:
        return
    mpl.use("agg")
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, label, colour in SERIES:
        values = np.sort([value for one in cuts for value in one[name]])
        share = 100 * (np.arange(len(values)) + 1) / len(values)
        axes.plot(values, share, color=colour, label=label, drawstyle="steps-post")
    skews = np.sort([one["skew_ms"] for one in cuts])
    share = 100 * (np.arange(len(skews)) + 1) / len(skews)
    axes.plot(skews, share, color="tab:gray", label="skew between the pauses")
    for limit, colour in ((15, "tab:blue"), (60, "tab:red")):
        axes.axvline(limit, color=colour, linestyle=":", linewidth=1)
    axes.set(xlabel="milliseconds (dotted: the aims)", ylabel="percent of guests and cuts")
    axes.set_title(f"{len(cuts)} cuts through three guests on two hosts")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=110)
