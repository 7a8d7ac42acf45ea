"""Charts: live ones in the terminal, and files drawn by matplotlib (the extra `plot`)."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from vmckpt.errors import RefusedError, UsageError
from vmckpt.forecast.measure.dirty_rate import DirtyRate
from vmckpt.units import format_rate, format_size

PAGE_BYTES = 4096
MIB = 1 << 20
BARS = " ▁▂▃▄▅▆▇█"
CHART_COLUMNS, CHART_ROWS = 60, 8
KINDS = (".png", ".svg")


def require_plotting(path: Path, kinds: tuple[str, ...] = KINDS) -> None:
    """Raises UsageError for another file type, RefusedError when matplotlib is missing."""
    if path.suffix not in kinds:
        raise UsageError(
            f"'{path}' is not a supported picture file",
            why=f"its name must end in {' or '.join(kinds)}",
            remedy=f"write e.g. picture{kinds[0]}",
        )
    if find_spec("matplotlib") is None:
        raise RefusedError(
            "pictures cannot be drawn here",
            why="matplotlib is not installed",
            remedy="pip install 'vmckpt[plot]'",
        )


def draw_dirty_rate(name: str, measured: DirtyRate, path: Path) -> None:
    """Draw U(t), and the dirty rate over time, into a file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    curve, rate = figure.subplots(2)
    points = measured.curve.points
    times = [point.t_s for point in points]
    curve.plot(times, [point.pages * PAGE_BYTES / MIB for point in points], marker="o")
    low, high = ([pages * PAGE_BYTES / MIB for pages in band] for band in zip(
        *((point.low_pages, point.high_pages) for point in points), strict=True
    ))  # fmt: skip
    curve.fill_between(times, low, high, alpha=0.2)
    curve.set(xscale="log", xlabel="within (s)", ylabel="distinct pages dirtied (MiB)")
    curve.set_ylim(0, None)
    curve.set_title(f"{name}: {measured.source}, {measured.took_s:.0f} s")
    windows = measured.windows
    rate.step(
        [window.at_s for window in windows],
        [window.pages * PAGE_BYTES / MIB / window.length_s for window in windows],
        where="post",
    )
    rate.set(xlabel="time (s)", ylabel="dirtied (MiB/s)", ylim=(0, None))
    figure.savefig(path)


@contextmanager
def rate_chart(title: str) -> Iterator[Callable[[DirtyRate], None]]:
    """Show a chart on the terminal during the block; the yielded function adds a measurement."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    rates: deque[float] = deque(maxlen=CHART_COLUMNS)

    def add(measured: DirtyRate) -> None:
        rates.append(measured.curve.working_set_pages * PAGE_BYTES / measured.took_s)
        words = (
            f"now {format_rate(rates[-1])}, most {format_rate(max(rates))}; "
            f"{format_size(measured.working_set_bytes)} distinct in {measured.took_s:.1f} s "
            f"({measured.source})"
        )
        lines = [Text(title, style="bold"), *(Text(row, "cyan") for row in bars(tuple(rates)))]
        live.update(Group(*lines, Text(words)))

    with Live(Text(title, style="bold"), console=Console(), refresh_per_second=4) as live:
        yield add


def bars(values: tuple[float, ...], rows: int = CHART_ROWS) -> list[str]:
    """The values as columns of blocks, the largest as high as all rows together."""
    top = max(values, default=0.0) or 1.0
    eighths = [round(8 * rows * value / top) for value in values]
    return [
        "".join(BARS[min(max(height - 8 * row, 0), 8)] for height in eighths)
        for row in reversed(range(rows))
    ]
