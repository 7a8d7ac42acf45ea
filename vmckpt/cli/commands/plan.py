"""vmckpt plan."""

import time
from typing import TYPE_CHECKING, Annotated

import typer

from vmckpt.cli.options.arguments import MeasureFor, TimeLimits, VmName, measure_s
from vmckpt.cli.options.together import Only, together
from vmckpt.cli.output import Json, note, run, show
from vmckpt.options.migration import MigrationOptions
from vmckpt.ui.shown import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vmckpt.forecast.model.choose import Offer
    from vmckpt.forecast.model.forecast import Band, TransferMode
    from vmckpt.forecast.planner import MigrationPlan


@together
def plan(
    vm: VmName,
    host: Annotated[str, typer.Argument(help="Destination host.")],
    *,
    limits: TimeLimits,
    options: Annotated[
        MigrationOptions,
        Only(("max_downtime_ms", "never_risk_postcopy", "bandwidth_bytes_per_s")),
    ],
    for_: MeasureFor = "8s",
    json: Json = False,
) -> None:
    """Forecast all migration methods for a VM and choose one.

    Changes nothing. Exit code 4 if no method satisfies the constraints; names the smallest change
    that would make one possible.
    """
    from vmckpt.cli.found import find
    from vmckpt.hosts.inventory.inventory import find_host
    from vmckpt.units import format_age

    began_s = time.monotonic()
    wanted = limits.intent(options)
    destination, for_s = find_host(host), measure_s(for_)
    found = run(find(vm))
    note(f"measuring {vm} for {format_age(for_s)}")
    made = run(found.plan(destination, options, wanted, began_s=began_s, for_s=for_s))
    show(made.to_json(), text(made), as_json=json)
    if made.choice.mode is None:
        raise typer.Exit(4)


def text(made: "MigrationPlan") -> str:
    """The table of methods, and the choice with its reason."""
    from vmckpt.ui.tables import beneath, table
    from vmckpt.units import format_duration, format_rate, format_size

    rows = [_row(offer, chosen=offer.forecast.mode is made.choice.mode) for offer in made.offers]
    header = ("", "method", "total", "downtime", "sent", "slowdown", "verdict")
    measured = made.measured
    head = (
        f"{made.vm}: {made.source} -> {made.destination}\n"
        f"{format_size(measured.ram_bytes)} of memory, working set "
        f"{format_size(measured.working_set_bytes)} in {format_duration(measured.took_s)}, at most "
        f"{format_rate(_fastest(made))}\n"
        f"Measured by {measured.source}. Figures: median (p10 to p90)"
    )
    choice = made.choice
    end = one_line(f"choice: {choice.reason}")
    if choice.mode is None:
        end = f"no method meets the constraints: {choice.reason}\n  do: {choice.change}"
    left_out = [*_by_reason("not possible", made.closed), *_by_reason("unknown", made.unknown)]
    notes = [*left_out, *_devices(made), *(f"note: {note}" for note in (*made.notes, *made.warned))]
    notes = [beneath(one_line(note), "  ") for note in notes]
    shown = [table(header, rows), ""] if rows else []
    return "\n".join([head, "", *shown, *notes, end])


def _by_reason(title: str, modes: "Iterable[tuple[TransferMode, str]]") -> list[str]:
    """Methods without a forecast: a line for each reason."""
    methods: dict[str, list[str]] = {}
    for mode, reason in modes:
        methods.setdefault(reason, []).append(mode.value)
    return [f"{title}: {', '.join(names)}: {reason}" for reason, names in methods.items()]


def _devices(made: "MigrationPlan") -> list[str]:
    """What the phases of passed-through devices come to."""
    from vmckpt.units import format_duration, format_size

    found = made.devices
    if found is None:
        return []
    head = f"devices: {format_size(found.device_bytes)} to save"
    if found.out_s is None or found.back_s is None:
        return [f"{head}; the first migration between these hosts measures how long it takes"]
    out, back = _words(found.out_s, format_duration), _words(found.back_s, format_duration)
    return [f"{head}: out {out}, back {back}, in the totals; the job is stopped from out to back"]


def _fastest(made: "MigrationPlan") -> float:
    points = made.measured.curve.points
    return max((point.pages * 4096 / point.t_s for point in points), default=0.0)


def _row(offer: "Offer", *, chosen: bool) -> tuple[str, ...]:
    from vmckpt.units import format_duration, format_size

    found = offer.forecast
    mark = "=>" if chosen else ""
    misses = " and ".join(miss.needed for miss in offer.misses)
    verdict = f"needs {misses}" if misses else "ok"
    if not found.ends:
        return (mark, found.mode, "does not end", "", "", "", verdict)
    return (
        mark,
        found.mode,
        _words(found.total_s, format_duration),
        _words(found.downtime_s, format_duration),
        format_size(found.sent_bytes.p50),
        f"{found.slowdown.p50:.0%}",
        verdict,
    )


def _words(band: "Band", say: "Callable[[float], str]") -> str:
    import math

    parts = [say(value) if math.isfinite(value) else "no end" for value in band]
    return f"{parts[1]} ({parts[0]} to {parts[2]})"
