"""The picture of benchmarks/checkpoint."""

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

_OURS, _THEIRS, _OTHER, _LIMIT = "#1f6fb4", "#888888", "#c9a227", "#c0392b"


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Write the picture: pauses, sizes, times of coming back; limits dashed."""
    mpl.use("agg")
    figure = Figure(figsize=(12, 8), layout="constrained")
    rows = figure.subplots(2, 2)
    _pauses(rows[0][0], result)
    _sizes(rows[0][1], result.get("stored", {}))
    _restores(rows[1][0], result)
    _forks(rows[1][1], result.get("forks"))
    machine = result["machine"]
    figure.suptitle(f"vmckpt checkpoints ({machine['cores']} cores, TCG)", fontsize=12)
    figure.savefig(path, dpi=110)


def _pauses(axes: Axes, result: Mapping[str, Any]) -> None:
    cells = [
        (part.removeprefix("pauses-"), rate, seen)
        for part, rates in result.items()
        if part.startswith("pauses-")
        for rate, seen in rates.items()
    ]
    ways = (
        ("checkpoint create", _OURS, "ours_ms"),
        ("to a file (mapped-ram)", _OTHER, "mapped_ram_ms"),
        ("savevm", _THEIRS, "savevm_ms"),
    )
    for label, colour, field in ways:
        for place, (_, _, seen) in enumerate(cells):
            values = seen[field]
            axes.plot([place] * len(values), values, "o", color=colour, markersize=4)
        axes.plot([], [], "o", color=colour, label=label)
    axes.axhline(10.0, color=_LIMIT, linestyle="--", linewidth=1, label="limit for ours")
    axes.set_yscale("log")
    axes.set_xticks(range(len(cells)), [f"{memory}\n{rate}B/s" for memory, rate, _ in cells])
    axes.tick_params(axis="x", labelsize=8)
    axes.set_title("How long the guest stands still (ms)", fontsize=10, loc="left")
    axes.legend(fontsize=8, loc="upper left", ncols=2)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * 6)


def _sizes(axes: Axes, stored: Mapping[str, Any]) -> None:
    for (rate, seen), colour in zip(stored.items(), (_OURS, _OTHER), strict=False):
        numbers = range(2, 2 + len(seen["ratios"]))
        added = [size / 1e6 for size in seen["added_bytes"]]
        axes.plot(numbers, added[1:], "o-", color=colour, markersize=4, label=f"{rate}B/s: stored")
        packed = [size / 1e6 for size in seen["zstd_of_changes_bytes"]]
        axes.plot(numbers, packed, "x", color=colour, label=f"{rate}B/s: zstd of what differs")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("checkpoint")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title("Stored by an incremental (MB)", fontsize=10, loc="left")
    if stored:
        axes.legend(fontsize=8)


def _restores(axes: Axes, result: Mapping[str, Any]) -> None:
    cells = [
        (key, runs)
        for part, keys in result.items()
        if part.startswith("restore-")
        for key, runs in keys.items()
    ]
    for field, label, colour, limit in (
        ("running_ms", "runs", _OURS, 60.0),
        ("answered_ms", "first answer (TCP)", _OTHER, 150.0),
    ):
        for place, (_, runs) in enumerate(cells):
            axes.plot([place] * len(runs), [run[field] for run in runs], "o", color=colour)
        axes.plot([], [], "o", color=colour, label=label)
        axes.axhline(limit, color=colour, linestyle="--", linewidth=1, label=f"limit {limit:g} ms")
    axes.set_xticks(range(len(cells)), [key for key, _ in cells])
    axes.tick_params(axis="x", labelsize=8)
    axes.set_ylim(bottom=0)
    axes.set_title("Restore, from the end of the checks (ms)", fontsize=10, loc="left")
    axes.legend(fontsize=8, ncols=2)


def _forks(axes: Axes, forks: Mapping[str, Any] | None) -> None:
    if forks is None:
        return
    took = forks["took_ms"]
    axes.plot(range(1, len(took) + 1), took, "o", color=_OURS)
    axes.axhline(100.0, color=_LIMIT, linestyle="--", linewidth=1, label="limit")
    ratio = forks["sixteen_bytes"] / forks["one_bytes"]
    axes.set_ylim(bottom=0)
    axes.set_xlabel("fork")
    axes.set_title(
        f"Each fork (ms), median {median(took):.0f}; memory of all: {ratio:.2f} x one's",
        fontsize=10,
        loc="left",
    )
    axes.legend(fontsize=8)
