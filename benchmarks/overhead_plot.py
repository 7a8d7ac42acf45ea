"""The picture of benchmarks/overhead."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

_WAYS = {"bare": "#888888", "vmckpt": "#1f6fb4", "vmckpt, one channel": "#2e8b57"}
_LABELS = {name: name for name in _WAYS} | {"bare": "bare script"}
_LIMIT = "#c0392b"


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Write the picture: every move as a point, medians as lines, limits dashed."""
    mpl.use("agg")
    figure = Figure(figsize=(12, 6.6), layout="constrained")
    rows = figure.subplots(2, 2)
    samples = result["samples"]
    ways = result["summary"]["ways"]
    _moves(rows[0][0], samples, "wall_s", "Total time (s)", ways["bare"]["wall_ms"]["median"] / 1e3)
    _downtimes(rows[0][1], samples)
    _where_time_went(rows[1][0], result)
    _starts(rows[1][1], result["commands_ms"])
    machine = result["machine"]
    figure.suptitle(
        f"vmckpt migrate against a bare QMP script, one guest in turns "
        f"({result['parameters']['guest_memory']}, {machine['cores']} cores, TCG)",
        fontsize=12,
    )
    figure.savefig(path, dpi=110)


def _moves(
    axes: Axes, samples: Sequence[Mapping[str, Any]], field: str, title: str, theirs: float
) -> None:
    for way, colour in _WAYS.items():
        rounds = [sample["round"] for sample in samples if sample["way"] == way]
        values = [sample[field] for sample in samples if sample["way"] == way]
        axes.plot(rounds, values, "o", color=colour, markersize=4, label=_LABELS[way])
        axes.axhline(median(values), color=colour, linewidth=1.2)
    axes.axhline(1.10 * theirs, color=_LIMIT, linestyle="--", linewidth=1.2, label="limit")
    # Room above the points for the legend.
    axes.set_ylim(0, 1.5 * max(1.10 * theirs, *(sample[field] for sample in samples)))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel("round (lines: medians)")
    axes.legend(fontsize=8, loc="upper left", ncols=2)


def _downtimes(axes: Axes, samples: Sequence[Mapping[str, Any]]) -> None:
    """The share of moves with at most so much downtime; one curve a way and a limit."""
    for limit, style in zip(
        sorted({sample["downtime_limit_ms"] for sample in samples}), ("-", ":"), strict=True
    ):
        for way, colour in _WAYS.items():
            values = sorted(
                sample["guest_downtime_ms"]
                for sample in samples
                if sample["way"] == way and sample["downtime_limit_ms"] == limit
            )
            shares = [(place + 1) / len(values) for place in range(len(values))]
            label = f"{_LABELS[way]}, limit {limit} ms"
            axes.step(values, shares, style, where="post", color=colour, label=label)
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1.02)
    axes.set_title("Guest-visible downtime (ms), cumulative", fontsize=10, loc="left")
    axes.legend(fontsize=7, loc="lower right")


def _where_time_went(axes: Axes, result: Mapping[str, Any]) -> None:
    ways = result["summary"]["ways"]
    parts = (
        ("before_ms", "before", "#a8cbe8"),
        ("transfer_ms", "QEMU transfers", "#d9d9d9"),
        ("after_ms", "after", "#5a9bd0"),
    )
    names = list(_WAYS)
    begin = [0.0 for _ in names]
    for field, label, colour in parts:
        lengths = [ways[way][field]["median"] for way in names]
        bars = axes.barh([_LABELS[way] for way in names], lengths, left=begin, color=colour)
        bars.set_label(label)
        axes.bar_label(bars, fmt="%.0f", label_type="center", fontsize=8)
        begin = [at + length for at, length in zip(begin, lengths, strict=True)]
    axes.set_title("Where the time went (ms, medians)", fontsize=10, loc="left")
    axes.set_ylim(-0.6, 3.1)
    axes.legend(fontsize=8, ncols=3, loc="upper left")


def _starts(axes: Axes, commands: Mapping[str, Sequence[float]]) -> None:
    limits = [200.0 if "--help" in name else 300.0 for name in commands]
    places = range(len(commands))
    for place, (values, limit) in enumerate(zip(commands.values(), limits, strict=True)):
        axes.plot(values, [place] * len(values), "o", color=_WAYS["vmckpt"], alpha=0.5)
        axes.plot([limit] * 2, [place - 0.3, place + 0.3], color=_LIMIT, linestyle="--")
    axes.set_yticks(list(places), list(commands))
    axes.set_ylim(-0.6, len(commands) - 0.4)
    axes.set_xlim(left=0)
    axes.set_title("Whole command (ms); dashed: limit", fontsize=10, loc="left")
