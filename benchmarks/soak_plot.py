"""The picture of benchmarks/soak."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

_WHOLE, _DAMAGED = "#1f6fb4", "#c0392b"


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Write the picture: the downtime of every hop, a row for each way; damaged ones in red."""
    mpl.use("agg")
    ways = list(result["summary"])
    figure = Figure(figsize=(10, 1.6 + 0.7 * len(ways)), layout="constrained")
    axes = figure.subplots()
    for place, (way, counts) in enumerate(result["summary"].items()):
        hops = [hop for hop in result["hops"] if name(hop) == way]
        for colour, lost in ((_WHOLE, False), (_DAMAGED, True)):
            found = [hop["guest_downtime_ms"] for hop in hops if bool(hop["lost"]) is lost]
            values = [value for value in found if value is not None]
            axes.plot(values, [place] * len(values), "|", color=colour, markersize=14)
        text = f"{counts['hops']} hops, {counts['damaged']} damaged"
        axes.text(1.01, place, text, transform=axes.get_yaxis_transform(), va="center", fontsize=9)
    axes.set_yticks(range(len(ways)), [f"QEMU {way}" for way in ways])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("guest-visible downtime of each hop (ms, by heartbeats from outside)")
    axes.set_title("A loaded guest moved there and back; red: it lost something", loc="left")
    figure.savefig(path, dpi=110)


def name(hop: Mapping[str, Any]) -> str:
    """The way of a hop, as the summary calls it."""
    return f"{hop['source']} -> {hop['target']}, {hop['asked']}"
