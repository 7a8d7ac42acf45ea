"""vmckpt dirty-rate."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vmckpt.cli.loop import run, run_until_interrupted
from vmckpt.cli.options.arguments import MeasureFor, VmName, measure_s
from vmckpt.cli.output import Json, note, show, warn

if TYPE_CHECKING:
    from vmckpt.drivers.driver import Driver
    from vmckpt.forecast.measure.dirty_rate import DirtyRate

WATCHED_S, WATCHED_BUSY_S = 2.0, 1.0


def dirty_rate(
    vm: VmName,
    for_: MeasureFor = "30s",
    watch: Annotated[
        bool,
        typer.Option("--watch", help="Continue until Ctrl-C, with a chart of the last minute."),
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Write a chart to this file, .png or .svg.", metavar="FILE")
    ] = None,
    json: Json = False,
) -> None:
    """Measure how fast a VM dirties its memory."""
    from vmckpt.cli.found import find
    from vmckpt.errors import UsageError
    from vmckpt.forecast.measure.last_measured import keep
    from vmckpt.ui.charts import require_plotting
    from vmckpt.units import format_age

    for_s = measure_s(for_)
    if watch and (json or plot):
        raise UsageError(
            "--watch cannot be combined with --json or --plot",
            why="it draws on the terminal until Ctrl-C",
            remedy="leave out --watch; --for sets the duration",
        )
    if plot:
        require_plotting(plot)
    found = run(find(vm))
    if watch:
        run_until_interrupted(_watch(found))
        return
    note(f"measuring {found.name} for {format_age(for_s)}")
    measured = run(found.measure(for_s))
    keep(found.name, measured)
    if plot:
        from vmckpt.ui.charts import draw_dirty_rate

        draw_dirty_rate(found.name, measured, plot)
    facts = {"vm": found.name, "host": found.host.name, **measured.to_json()}
    show(facts, text(found, measured), as_json=json)


def text(vm: "Driver", measured: "DirtyRate") -> str:
    """The measurement in words and a table."""
    from vmckpt.memory.ram_file import PAGE_BYTES
    from vmckpt.ui.tables import fields, table
    from vmckpt.units import format_duration, format_rate, format_size

    pairs = [
        ("measured by", measured.source + (f": {measured.why}" if measured.why else "")),
        ("for", format_duration(measured.took_s)),
        ("memory", format_size(measured.ram_bytes)),
        ("working set", format_size(measured.working_set_bytes)),
    ]
    contents = (("of all memory", measured.ram), ("of what it dirties", measured.dirtied))
    for name, content in contents:
        if content:
            words = (
                f"{content.zero:.0%} zero, {content.compressible:.0%} compressible, "
                f"{content.incompressible:.0%} not"
            )
            pairs.append((name, words))
    if measured.took_s and measured.faults:
        faults = (
            f"{measured.faults / measured.took_s:.0f} page faults/s, "
            f"up to {measured.cost:.1%} of a processor"
        )
        pairs.append(("cost to the guest", faults))
    rows = [
        (
            format_duration(point.t_s),
            format_size(point.pages * PAGE_BYTES),
            format_rate(point.pages * PAGE_BYTES / point.t_s),
            f"{format_size(point.low_pages * PAGE_BYTES)} to "
            f"{format_size(point.high_pages * PAGE_BYTES)}",
        )
        for point in measured.curve.points
    ]
    head = f"{vm.name} on {vm.host.name}"
    curve = table(("within", "dirties", "a second", "mostly"), rows)
    return f"{head}\n{fields(pairs)}\n\n{curve}"


async def _watch(vm: "Driver") -> None:
    import asyncio

    from vmckpt.errors import BusyError
    from vmckpt.forecast.measure.last_measured import keep
    from vmckpt.ui.charts import rate_chart

    with rate_chart(f"{vm.name} on {vm.host.name}") as add:
        while True:
            try:
                measured = await vm.measure(WATCHED_S)
                keep(vm.name, measured)
                add(measured)
            except BusyError as exc:
                warn(f"{exc.what}: {exc.why}")
                await asyncio.sleep(WATCHED_BUSY_S)
