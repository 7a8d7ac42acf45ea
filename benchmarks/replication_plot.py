"""The picture of benchmarks/replication."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

_OURS, _OTHERS, _PLAIN = "#1f6fb4", "#888888", "#d0d0d0"


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Write the picture: pauses beside the alternatives', what it costs, and failovers."""
    mpl.use("agg")
    figure = Figure(figsize=(11, 7), layout="constrained")
    (pauses, work), (latency, failovers) = figure.subplots(2, 2)
    _pauses(pauses, result)
    _work(work, result["paces"])
    _latency(latency, result["paces"])
    _failovers(failovers, result["kills"])
    figure.suptitle("vmckpt replicate, a guest of 256 MiB under TCG")
    figure.savefig(path, dpi=110)


def _pauses(axes: Axes, result: Mapping[str, Any]) -> None:
    bars = [
        (f"epoch, {label}", pace["figures"]["pause_p50_ms"], _OURS)
        for label, pace in result["paces"].items()
    ]
    bars += [(label, way["pause_p50_ms"], _OTHERS) for label, way in result["rivals"].items()]
    labels, values, colours = zip(*bars, strict=True)
    axes.bar_label(axes.barh(labels, values, color=colours), fmt="%.1f", padding=3, fontsize=8)
    axes.set_xscale("log")
    axes.set_xlim(1, 4 * max(values))
    axes.invert_yaxis()
    axes.set_title("The guest stands still (ms, median)", loc="left", fontsize=10)


def _work(axes: Axes, paces: Mapping[str, Any]) -> None:
    for shift, size, colour in ((-0.2, "1M", _OURS), (0.2, "4M", _OTHERS)):
        places = [at + shift for at in range(len(paces))]
        values = [100 * (1 - pace["work_lost"][size]) for pace in paces.values()]
        label = f"{size} of noise rewritten in each epoch"
        drawn = axes.bar(places, values, width=0.38, color=colour, label=label)
        axes.bar_label(drawn, fmt="%.0f", fontsize=8)
    axes.set_xticks(range(len(paces)), labels=list(paces))
    axes.set_ylim(0, 135)
    axes.legend(fontsize=8, loc="upper left")
    axes.set_title("Work that the guest does (%; unprotected: 100)", loc="left", fontsize=10)


def _latency(axes: Axes, paces: Mapping[str, Any]) -> None:
    for shift, field, label, colour in (
        (-0.2, "added_latency_mean_ms", "measured", _OURS),
        (0.2, "formula_latency_mean_ms", "by the formula", _OTHERS),
    ):
        places = [at + shift for at in range(len(paces))]
        values = [pace[field] for pace in paces.values()]
        drawn = axes.bar(places, values, width=0.38, color=colour, label=label)
        axes.bar_label(drawn, fmt="%.0f", fontsize=8)
    axes.set_xticks(range(len(paces)), labels=list(paces))
    axes.legend(fontsize=8, loc="upper left")
    axes.set_title("Added to an answer over TCP (ms, mean)", loc="left", fontsize=10)


def _failovers(axes: Axes, kills: Mapping[str, Any]) -> None:
    for field, label, colour in (
        ("took_over_ms", "resume alone", _OURS),
        ("to_first_answer_ms", "kill to the client's next answer", _OTHERS),
    ):
        _cumulative(axes, kills[field], label, colour)
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1.02)
    axes.legend(fontsize=8, loc="center")
    title = f"{kills['count']} kills, {kills['lost']} lost an answer (ms, cumulative)"
    axes.set_title(title, loc="left", fontsize=10)


def _cumulative(axes: Axes, values: Sequence[float], label: str, colour: str) -> None:
    shares = [(number + 1) / len(values) for number in range(len(values))]
    axes.step(sorted(values), shares, where="post", label=label, color=colour)
