"""vmckpt runs report."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vmckpt.cli.options.arguments import RunId
from vmckpt.cli.output import Json, show

if TYPE_CHECKING:
    from vmckpt.events.record import RunRecord


def report(
    run: RunId,
    html: Annotated[
        Path | None, typer.Option(help="Write an HTML page with charts.", metavar="FILE")
    ] = None,
    png: Annotated[
        Path | None, typer.Option(help="Write a picture with charts.", metavar="FILE")
    ] = None,
    json: Json = False,
) -> None:
    """Compare a migration with its forecast."""
    from vmckpt.events.record import RunRecord
    from vmckpt.hosts.inventory.directories import runs_dir
    from vmckpt.hosts.inventory.inventory import check_name
    from vmckpt.ui.charts import require_plotting
    from vmckpt.ui.tables import fields

    record = RunRecord.load(runs_dir() / f"{check_name(run, 'run')}.json")
    for path, kinds in ((html, (".html", ".htm")), (png, (".png",))):
        if path:
            require_plotting(path, kinds)
    pairs = facts(record)
    if html or png:
        from vmckpt.ui.run_charts import draw_html, draw_png

        if html:
            draw_html(record, pairs, html)
        if png:
            draw_png(record, png)
    show({"run": run, "facts": dict(pairs)}, fields(pairs), as_json=json)


def facts(record: "RunRecord") -> list[tuple[str, str]]:
    """The request, the result, and what had been expected."""
    from vmckpt.forecast.score import scored
    from vmckpt.units import format_duration, format_size

    request, result = record.request, record.result or {}
    pairs = [
        ("vm", str(request.get("vm"))),
        ("hosts", f"{request.get('source')} -> {request.get('target')}"),
        ("method", f"{result.get('method', '-')} (asked for: {request.get('method')})"),
        ("outcome", str(result.get("outcome", "no end recorded"))),
    ]
    if "why" in result:
        pairs.append(("why", f"{result.get('what', '-')}: {result['why']}"))
    if "total_time_s" in result:
        pairs.append(("time", format_duration(result["total_time_s"])))
        pairs.append(("sent", format_size(result.get("transferred_bytes", 0))))
        pauses = [result.get("guest_downtime_ms"), result.get("downtime_ms")]
        known = [pause for pause in pauses if pause is not None]
        pairs.append(("pause", f"{known[0]:.0f} ms" if known else "not measured"))
    if record.forecast:
        pairs.append(("chosen because", str(record.forecast["reason"])))
    for move in scored([record]):
        low, middle, high = (format_duration(value) for value in move.forecast.total_s)
        words = f"{middle} ({low} to {high}); it was {move.total_error:+.0%} off"
        pairs.append(("forecast time", words))
        low, middle, high = (format_duration(value) for value in move.forecast.downtime_s)
        pairs.append(("forecast pause", f"{middle} ({low} to {high})"))
    return pairs
