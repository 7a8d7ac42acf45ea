"""The picture of benchmarks/disk_copy."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

_WAYS = {"bare_mb_per_s": ("bare blockdev-mirror", "#888888"),
         "vmckpt_mb_per_s": ("vmckpt migrate", "#1f6fb4")}  # fmt: skip


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Write the picture: throughput of both ways, pair by pair, and every move under load."""
    mpl.use("agg")
    figure = Figure(figsize=(11, 4), layout="constrained")
    speed, moves = figure.subplots(1, 2)
    pairs = range(1, len(result["throughput"]) + 1)
    for shift, (field, (label, colour)) in zip((-0.2, 0.2), _WAYS.items(), strict=True):
        values = [row[field] for row in result["throughput"]]
        speed.bar([pair + shift for pair in pairs], values, width=0.4, color=colour, label=label)
    speed.set_xticks(list(pairs))
    speed.set_xlabel("pair, in turns in one run")
    speed.set_ylim(0, 1.3 * max(max(row.values()) for row in result["throughput"]))
    ratio = result["throughput_ratio_median"]
    speed.set_title(f"Copying a disk (MB/s); median ratio {ratio}", loc="left", fontsize=10)
    speed.legend(fontsize=8, loc="upper left", ncols=2)
    for sound, colour in ((True, "#1f6fb4"), (False, "#c0392b")):
        rows = [row for row in result["moves"] if row["sound"] is sound]
        moves.plot(
            [row["total_time_s"] for row in rows],
            [row["guest_downtime_ms"] for row in rows],
            "o",
            color=colour,
            markersize=4,
        )
    moves.set_xlim(left=0)
    moves.set_ylim(bottom=0)
    moves.set_xlabel("total time (s)")
    lost = result["runs_that_lost_records"]
    title = f"{result['runs']} moves of a disk that is written to: {lost} lost records"
    moves.set_title(f"{title}\nguest-visible downtime (ms)", loc="left", fontsize=10)
    figure.savefig(path, dpi=110)
