"""Charts of one run: bytes left and sent, rates, phases, and the forecast for comparison."""

from collections.abc import Mapping, Sequence
from html import escape
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vmckpt.events.record import RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MIB = 1 << 20
# Notes about decisions made while memory was sent.
STEERED = frozenset({"policy", "shared-link", "postcopy", "time-up"})


def draw_png(record: RunRecord, path: Path) -> None:
    """Draw the charts into a PNG file. Needs matplotlib, see charts.require_plotting."""
    figure(record).savefig(path, dpi=110)


def draw_html(record: RunRecord, facts: Sequence[tuple[str, str]], path: Path) -> None:
    """A self-contained page: the charts, and `facts` as a table."""
    drawing = StringIO()
    figure(record).savefig(drawing, format="svg")
    svg = drawing.getvalue()
    rows = "\n".join(
        f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts
    )
    title = escape(f"run {record.run}")
    path.write_text(
        f"<!doctype html>\n<html lang=en>\n<meta charset=utf-8>\n<title>{title}</title>\n"
        "<style>body{font:15px/1.4 sans-serif;margin:2em auto;max-width:60em}"
        "th{text-align:left;padding-right:2em;vertical-align:top}svg{width:100%;height:auto}"
        f"</style>\n<h1>{title}</h1>\n{svg[svg.index('<svg') :]}\n<table>\n{rows}\n</table>\n"
    )


def figure(record: RunRecord) -> "Figure":
    """Three charts over the same time axis."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(10, 9), layout="constrained")
    memory, rates, throttle = drawn.subplots(3, sharex=True, height_ratios=[3, 2, 1])
    times = [sample["at_s"] for sample in record.samples]

    def column(name: str) -> list[float]:
        return [sample[name] / MIB for sample in record.samples]

    memory.plot(times, column("remaining_bytes"), label="left")
    memory.plot(times, column("transferred_bytes"), label="sent")
    memory.set(ylabel="MiB", ylim=(0, None), title=_title(record))
    _phases(memory, record.events)
    _forecast(memory, record)
    memory.legend(loc="center right", fontsize="small")
    rates.plot(times, column("throughput_bytes_per_s"), label="link")
    rates.plot(times, column("dirty_rate_bytes_per_s"), label="dirtied")
    rates.set(ylabel="MiB/s", ylim=(0, None))
    _steering(rates, record.events)
    rates.legend(loc="upper right", fontsize="small")
    throttle.step(times, [s["throttle_percent"] for s in record.samples], where="post")
    throttle.set(ylabel="throttle (%)", ylim=(0, 100), xlabel="time (s)")
    return drawn


def _title(record: RunRecord) -> str:
    request, result = record.request, record.result or {}
    outcome = result.get("outcome", "no end recorded")
    hosts = f"{request.get('source')} -> {request.get('target')}"
    return f"{request.get('vm')}: {hosts}, {result.get('method', request.get('method'))}: {outcome}"


def _phases(chart: "Axes", events: Sequence[Mapping[str, Any]]) -> None:
    began = [event for event in events if event["event"] == "PhaseBegan"]
    top = chart.get_ylim()[1]
    for event in began:
        chart.axvline(event["at_s"], color="0.7", linewidth=0.8)
        chart.text(event["at_s"], top, event["phase"], rotation=90, va="top", fontsize=7)


def _steering(chart: "Axes", events: Sequence[Mapping[str, Any]]) -> None:
    """Mark the policy's actions in the chart of rates."""
    for event in events:
        if event["event"] == "Note" and event["code"] in STEERED:
            chart.axvline(event["at_s"], color="tab:purple", linestyle=":", linewidth=1)
            words = event["text"].partition(":")[0]
            at = (event["at_s"], chart.get_ylim()[1])
            chart.annotate(words, at, rotation=90, va="top", ha="right", fontsize=6)


def _forecast(chart: "Axes", record: RunRecord) -> None:
    if record.forecast:
        low, middle, high = record.forecast["forecast"]["total_s"]
        if None not in (low, middle, high):
            chart.axvspan(low, high, alpha=0.15, color="tab:green", label="end, forecast p10-p90")
            chart.axvline(middle, color="tab:green", linestyle="--")
    total_s = (record.result or {}).get("total_time_s")
    if total_s is not None:
        chart.axvline(total_s, color="tab:red", label="end")
