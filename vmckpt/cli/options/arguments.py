"""Options that several commands take, and what they mean."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

if TYPE_CHECKING:
    from datetime import datetime

    from vmckpt.forecast.model.choose import Intent
    from vmckpt.options.migration import MigrationOptions


VmName = Annotated[str, typer.Argument(help="The VM's name.", metavar="VM")]
MaybeVmName = Annotated[
    str | None, typer.Argument(help="The VM's name.", metavar="VM", show_default=False)
]
SpecFile = Annotated[Path, typer.Argument(help="The VM's spec (TOML).")]
HostOption = Annotated[
    str, typer.Option("--host", help="Host (see `vmckpt host list`).", metavar="HOST")
]
RunId = Annotated[
    str, typer.Argument(help="Id of the run (see `vmckpt runs list`).", metavar="RUN")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be done; change nothing.")]
Apply = Annotated[
    bool, typer.Option("--apply", help="Apply the changes instead of only showing them.")
]
# See `measure_s`.
MeasureFor = Annotated[
    str, typer.Option("--for", help="How long to measure the guest.", metavar="DURATION")
]
# See `pause_s`.
MaxPause = Annotated[
    str | None,
    typer.Option(
        "--max-pause",
        help="Maximum time for copying memory during a pause. [default: 10ms]",
        metavar="DURATION",
    ),
]
# See `DailyWindow.parse`.
Window = Annotated[
    str | None,
    typer.Option(
        "--window",
        help="Act in this part of the day only, e.g. 22:00-06:00.",
        metavar="HH:MM-HH:MM",
    ),
]
FinishWithin = Annotated[
    str | None,
    typer.Option(
        "--finish-within",
        help="Require completion within this time, e.g. 10m; otherwise refuse.",
        metavar="DURATION",
    ),
]


class TimeLimits(NamedTuple):
    """Constraints on a migration's time and slowdown."""

    finish_within: FinishWithin = None
    finish_by: Annotated[
        str | None,
        typer.Option(help="Require completion by this time of day, e.g. 02:00.", metavar="HH:MM"),
    ] = None
    max_slowdown: Annotated[
        str | None, typer.Option(help="Maximum slowdown of the guest, e.g. 20%.", metavar="PERCENT")
    ] = None

    def intent(self, options: "MigrationOptions") -> "Intent":
        """All constraints, as a plan keeps them; its time begins now. Raises UsageError."""
        return intent(
            options.allowed_downtime_ms, *self, never_risk_postcopy=options.never_risk_postcopy
        )


SHORTEST_MEASURE_S, LONGEST_MEASURE_S = 0.2, 3600.0


def measure_s(text: str) -> float:
    """How long to look at a guest. Raises UsageError."""
    from vmckpt.errors import UsageError
    from vmckpt.units import parse_duration_s

    duration_s = parse_duration_s(text)
    if not SHORTEST_MEASURE_S <= duration_s <= LONGEST_MEASURE_S:
        raise UsageError(
            f"--for {text} cannot be measured",
            why="it takes from 200 ms to an hour",
            remedy="write e.g. --for 30s",
        )
    return duration_s


def pause_s(text: str | None, kind: str) -> float:
    """How long a checkpoint of that kind may pause its VM. Raises UsageError."""
    from vmckpt.checkpoint.facts import usual_pause_s
    from vmckpt.units import parse_duration_s

    return parse_duration_s(text) if text else usual_pause_s(kind)


def intent(
    max_downtime_ms: int | None,
    finish_within: str | None,
    finish_by: str | None,
    max_slowdown: str | None,
    *,
    never_risk_postcopy: bool,
) -> "Intent":
    """What is wanted of a migration; its time begins now. Raises UsageError for nonsense."""
    from datetime import datetime

    from vmckpt.errors import UsageError
    from vmckpt.forecast.model.choose import Intent
    from vmckpt.units import parse_duration_s

    if finish_within and finish_by:
        raise UsageError(
            "--finish-within and --finish-by are both given",
            why="both set the same limit",
            remedy="leave one of them out",
        )
    within_s = parse_duration_s(finish_within) if finish_within else None
    if finish_by:
        # Naive on purpose: with a fixed UTC offset, changes to and from summer time would be
        # missed.
        within_s = seconds_until(finish_by, datetime.now())  # noqa: DTZ005
    if within_s is not None and within_s <= 0:
        raise UsageError(
            "--finish-within is too short",
            why="it must be more than 0",
            remedy="write e.g. --finish-within 10m",
        )
    downtime_s = None if max_downtime_ms is None else max_downtime_ms / 1e3
    return Intent(downtime_s, within_s, _share(max_slowdown), never_risk_postcopy)


def seconds_until(clock: str, now: "datetime") -> float:
    """Seconds from `now` until the clock next says HH:MM. Raises UsageError.

    The clock is that of its time zone; of a `now` without one, this machine's. It may be set
    forward or back until then. Of a time that it skips, the earlier reading is meant.
    """
    from datetime import UTC, timedelta

    from vmckpt.errors import UsageError
    from vmckpt.units import whole_number

    hours, _, minutes = clock.partition(":")
    hour, minute = whole_number(hours, 23), whole_number(minutes, 59)
    if hour is None or minute is None or len(minutes) != 2:
        raise UsageError(
            f"'{clock}' is not a time of day", why="it must be HH:MM", remedy="write e.g. 02:00"
        )
    today = now.replace(hour=hour, minute=minute, second=0, microsecond=0)
    # Subtracting times of one zone compares wall clocks: only in UTC is the difference the time
    # that passes. When a clock is set back, it shows the same time twice.
    moments = [
        (today + timedelta(days=days)).replace(fold=fold).astimezone(UTC)
        for days in (0, 1)
        for fold in (0, 1)
    ]
    return min(
        left_s
        for moment in moments
        if (left_s := (moment - now.astimezone(UTC)).total_seconds()) > 0
    )


def _share(percent: str | None) -> float | None:
    from vmckpt.errors import UsageError
    from vmckpt.units import whole_number

    if percent is None:
        return None
    number = whole_number(percent.removesuffix("%"), 100)
    if number is None or not percent.endswith("%"):
        raise UsageError(
            f"'{percent}' is not a slowdown",
            why="it is a whole number of percent, 0% to 100%",
            remedy="write e.g. --max-slowdown 20%",
        )
    return number / 100
