"""The picture of benchmarks/store."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

_KINDS = {"clear": "#1f6fb4", "encrypted": "#c9a227"}
_OTHER, _LIMIT = "#888888", "#c0392b"


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Write the picture: what checkpoints add, how long they take, how fast they are read."""
    mpl.use("agg")
    figure = Figure(figsize=(12, 4), layout="constrained")
    sizes, times, reads = figure.subplots(1, 3)
    _sizes(sizes, result["stores"]["clear"])
    _times(times, result["stores"])
    _reads(reads, result["stores"])
    machine = result["machine"]
    figure.suptitle(f"vmckpt store, memory of 1 GiB ({machine['cores']} cores)", fontsize=12)
    figure.savefig(path, dpi=110)


def _sizes(axes: Axes, clear: Mapping[str, Any]) -> None:
    looks = clear["incrementals"]
    numbers = range(2, 2 + len(looks))
    added = [one["added_bytes"] / 1e6 for one in looks]
    packed = [one["zstd_bytes"] / 1e6 for one in looks]
    axes.plot(numbers, added, "o-", color=_KINDS["clear"], markersize=4, label="stored")
    axes.plot(numbers, packed, "x", color=_OTHER, label="zstd of what differs")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("checkpoint")
    axes.set_title("Stored by an incremental (MB)", fontsize=10, loc="left")
    axes.legend(fontsize=8)


def _times(axes: Axes, stores: Mapping[str, Any]) -> None:
    for kind, colour in _KINDS.items():
        looks = stores[kind]["incrementals"]
        seconds = [stores[kind]["full_s"], *(one["seconds"] for one in looks)]
        axes.plot(range(1, 1 + len(seconds)), seconds, "o", color=colour, markersize=4, label=kind)
    dump_s = stores["clear"]["dump_s"]
    label = f"a plain dump, {dump_s:.1f} s"
    axes.axhline(dump_s, color=_LIMIT, linestyle="--", linewidth=1, label=label)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("checkpoint; the first is a full one")
    axes.set_title("Writing it, synced (s)", fontsize=10, loc="left")
    axes.legend(fontsize=8)


def _reads(axes: Axes, stores: Mapping[str, Any]) -> None:
    for place, (kind, colour) in enumerate(_KINDS.items()):
        fault = stores[kind]["fault_ms"]
        for name, mark in (("median", "o"), ("p99", "^")):
            axes.plot([place], [fault[name]], mark, color=colour, label=f"{kind}, {name}")
    names = [f"{kind}\n{stores[kind]['stream_bytes_per_s'] / 1e6:.0f} MB/s" for kind in _KINDS]
    axes.set_xticks(range(len(names)), names)
    axes.set_xlim(-0.5, len(names) - 0.5)
    axes.set_ylim(bottom=0)
    axes.set_title("One page of its own (ms); below, all pages", fontsize=10, loc="left")
    axes.legend(fontsize=8)
