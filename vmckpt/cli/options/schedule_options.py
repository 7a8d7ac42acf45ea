"""What `vmckpt schedule add` is asked, and what comes of it."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from vmckpt.cli.options.arguments import MaxPause, Window, pause_s
from vmckpt.cli.options.checkpoint_options import CheckpointKind, KindOption, Retention
from vmckpt.cli.options.stores import Stored, absolute_location

if TYPE_CHECKING:
    from vmckpt.fleet.schedule.request import CatchUp, ScheduleRequest

AUTO = "auto"
LEAST_EVERY_S = 1.0

Every = Annotated[
    str | None,
    typer.Option(
        "--every",
        help="Interval, e.g. 15m; auto: the interval with the least expected loss, from "
        "measurements.",
        metavar="DURATION",
    ),
]
Cron = Annotated[
    str | None,
    typer.Option(
        "--cron",
        help="Calendar times: five fields as in crontab(5), e.g. '0 3 * * *'.",
        metavar="EXPRESSION",
    ),
]
Zone = Annotated[
    str | None,
    typer.Option(
        "--timezone",
        help="Time zone of --cron and --window, e.g. Europe/Berlin. [default: this machine's]",
        metavar="ZONE",
    ),
]
Jitter = Annotated[
    str | None,
    typer.Option(
        "--jitter",
        help="Delay each run by up to this much, so that not all start at once.",
        metavar="DURATION",
    ),
]
CatchUpOption = Annotated[
    str,
    typer.Option(
        "--catch-up",
        help="Runs missed while the scheduler was not running: once (a single run replaces "
        "them), or skip.",
        metavar="once|skip",
    ),
]
Rpo = Annotated[
    str | None,
    typer.Option(
        "--rpo", help="With --every auto: maximum loss after a failure.", metavar="DURATION"
    ),
]
Mtbf = Annotated[
    str | None,
    typer.Option(
        "--mtbf",
        help="With --every auto: your estimate of the time between failures.",
        metavar="DURATION",
    ),
]
CopyTo = Annotated[
    list[str] | None,
    typer.Option(
        "--copy-to",
        help="Also copy each checkpoint to this store, e.g. lab-b: (repeatable).",
        metavar="LOCATION",
    ),
]
Check = Annotated[
    str | None,
    typer.Option(
        "--check",
        help="After each run, check this share of its stores' content, e.g. 2%, continuing "
        "where the last check ended.",
        metavar="PERCENT",
    ),
]
ScheduleName = Annotated[
    str | None,
    typer.Option("--name", help="Name of the schedule. [default: the VM's]", metavar="NAME"),
]


class Times(NamedTuple):
    """When checkpoints are due."""

    every: Every = None
    cron: Cron = None
    timezone: Zone = None
    window: Window = None
    jitter: Jitter = None
    catch_up: CatchUpOption = "once"
    rpo: Rpo = None
    mtbf: Mtbf = None


class TakingOptions(NamedTuple):
    """How checkpoints are taken, where they are copied, and what is checked."""

    copy_to: CopyTo = None
    check: Check = None
    kind: KindOption = CheckpointKind.epoch
    max_pause: MaxPause = None


def schedule_request(
    vm: str, times: Times, retention: Retention, taking: TakingOptions, stored: Stored
) -> "ScheduleRequest":
    """What all of them say. Raises UsageError."""
    from vmckpt.fleet.schedule.request import ScheduleRequest, When
    from vmckpt.units import parse_duration_s

    require_one_way(times.every, times.cron)
    stored.key()
    rule = retention.rule()
    is_auto = times.every == AUTO
    return ScheduleRequest(
        vm=vm,
        when=When.AUTO if is_auto else When.CRON if times.cron else When.EVERY,
        zone=times.timezone or local_zone(),
        every_s=every_s(times.every),
        cron=times.cron,
        mtbf_s=positive_s("--mtbf", times.mtbf, only_auto=not is_auto),
        rpo_s=positive_s("--rpo", times.rpo, only_auto=not is_auto),
        window=times.window,
        jitter_s=parse_duration_s(times.jitter) if times.jitter else 0.0,
        catch_up=_catch_up(times.catch_up),
        rule=None if rule.is_empty else rule,
        store=absolute_location(stored.store),
        copies=tuple(
            one for one in map(absolute_location, taking.copy_to or ()) if one is not None
        ),
        kind=_kind(taking.kind),
        max_pause_s=pause_s(taking.max_pause, taking.kind.value),
        key_file=absolute_location(stored.key_file),
        key_command=stored.key_command,
        check_percent=_check_percent(taking.check),
    )


def local_zone() -> str:
    """The time zone of this machine, by name; UTC when it has none that is known."""
    from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

    target = str(Path("/etc/localtime").resolve())
    for name in (os.environ.get("TZ", "").lstrip(":"), target.partition("zoneinfo/")[2]):
        try:
            if name:
                return ZoneInfo(name).key
        except (ZoneInfoNotFoundError, ValueError, OSError):
            continue
    return "UTC"


def require_one_way(every: str | None, cron: str | None) -> None:
    """Raises UsageError unless just one of both is given."""
    from vmckpt.errors import UsageError

    if (every is None) == (cron is None):
        raise UsageError(
            "no time is given" if every is None else "both --every and --cron are given",
            why="a schedule has one of them",
            remedy="write e.g. --every 15m, --every auto, or --cron '0 3 * * *'",
        )


def every_s(text: str | None) -> float | None:
    """How long from one run to the next; None: not by an interval that is given. UsageError."""
    from vmckpt.errors import UsageError
    from vmckpt.units import parse_duration_s

    if text is None or text == AUTO:
        return None
    found = parse_duration_s(text)
    if found < LEAST_EVERY_S:
        raise UsageError(
            f"--every {text} is too often",
            why=f"{LEAST_EVERY_S:g} s is the least; for more there is `vmckpt replicate`",
            remedy="write e.g. --every 15m",
        )
    return found


def positive_s(option: str, text: str | None, *, only_auto: bool) -> float | None:
    """A duration that an option gives. Raises UsageError: invalid, or for auto only."""
    from vmckpt.errors import UsageError
    from vmckpt.units import parse_duration_s

    if text is None:
        return None
    if only_auto:
        raise UsageError(
            f"{option} has no effect here",
            why="it applies to --every auto only",
            remedy="leave it out, or write --every auto",
        )
    found = parse_duration_s(text)
    if found <= 0:
        raise UsageError(
            f"{option} {text} is too short", why="it must be more than 0", remedy="write e.g. 1h"
        )
    return found


def _catch_up(text: str) -> "CatchUp":
    from vmckpt.errors import UsageError
    from vmckpt.fleet.schedule.request import CatchUp

    try:
        return CatchUp(text)
    except ValueError as exc:
        raise UsageError(
            f"--catch-up {text} is unknown", why="it is once or skip", remedy="write one of them"
        ) from exc


def _check_percent(text: str | None) -> float | None:
    from vmckpt.errors import UsageError
    from vmckpt.store.damage.subset import parse_subset

    if text is None:
        return None
    subset = parse_subset(text)
    if subset.parts > 1:
        raise UsageError(
            f"--check {text} names a fixed part",
            why="a schedule reads one part after each run, and the next one after the next",
            remedy="write e.g. 2%",
        )
    return subset.percent


def _kind(kind: CheckpointKind) -> str:
    from vmckpt.errors import UsageError

    if kind is CheckpointKind.internal:
        raise UsageError(
            "schedules take no checkpoints of --kind internal",
            why="they are in the VM's own image, where no rule applies",
            remedy="write --kind epoch, or --kind file",
        )
    return kind.value
