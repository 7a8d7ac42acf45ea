"""vmckpt schedule: add, list, show, rm, next, run-due."""

from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime, tzinfo
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vmckpt.cli.options.arguments import VmName
from vmckpt.cli.options.checkpoint_options import Retention
from vmckpt.cli.options.listing import ListOptions
from vmckpt.cli.options.schedule_options import ScheduleName, TakingOptions, Times, schedule_request
from vmckpt.cli.options.stores import Stored
from vmckpt.cli.options.together import together
from vmckpt.cli.output import Json, note, run, show, warn
from vmckpt.codec import builtins
from vmckpt.ui.shown import one_line

if TYPE_CHECKING:
    from vmckpt.checkpoint.catalogue.retention import RetentionRule
    from vmckpt.fleet.schedule.record import ScheduleRecord
    from vmckpt.fleet.schedule.run import Event, RunResult, SchedulerTools

app = typer.Typer(
    help="Scheduled checkpoints, with copies on other hosts.\n\nThey are run by `vmckpt serve "
    "--scheduler`, or by a timer that calls `run-due`.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Name = Annotated[str, typer.Argument(help="The schedule's name.")]
Names = Annotated[
    list[str] | None,
    typer.Argument(help="Schedules. [default: all]", metavar="[NAME]..."),
]
Count = Annotated[
    int, typer.Option("--count", help="Number of runs to show.", min=1, max=10_000, metavar="N")
]


@app.command()
@together
def add(
    vm: VmName,
    *,
    times: Times,
    retention: Retention,
    taking: TakingOptions,
    name: ScheduleName = None,
    stored: Stored,
    json: Json = False,
) -> None:
    """Schedule checkpoints of a VM, with retention."""
    from vmckpt.cli.found import find
    from vmckpt.fleet.schedule.checks import require_sense, require_stores
    from vmckpt.fleet.schedule.record import add as add_
    from vmckpt.fleet.schedule.record import new_record
    from vmckpt.fleet.schedule.run import clock
    from vmckpt.hosts.inventory.inventory import check_name

    request = schedule_request(vm, times, retention, taking, stored)
    record = new_record(check_name(name or vm, "schedule"), request, clock())
    require_sense(record)
    run(require_stores(record, run(find(vm)).host))
    add_(record)
    facts = _facts(record)
    text = f"{record.name}: checkpoints of {vm}, {facts['when']}; {_next_text(record, facts)}"
    if request.rule is None:
        text += (
            "\nall checkpoints are kept, as no rule limits them: see --keep-last, --keep-daily, "
            "--max-age"
        )
    show(facts, text, as_json=json)


@app.command("list")
@together
def list_(listing: ListOptions) -> None:
    """List schedules with their runs and problems."""
    from vmckpt.fleet.schedule.record import load_all

    known = load_all()
    for error in known.damaged:
        warn(f"not listed: {error.what}: {error.why}")
    facts = [_facts(record) for record in known.records.values()]
    rows = [
        (
            record.name,
            record.vm,
            str(one["when"]),
            _time(record, one["next_unix_s"]),
            _time(record, one["last_done_unix_s"]),
            str(one["runs_done"]),
            f"{one['failures']} in a row: {one['why']}" if one["failures"] else one["why"] or "-",
        )
        for record, one in zip(known.records.values(), facts, strict=True)
    ]
    head = ("schedule", "vm", "when", "next", "last done", "done", "failures")
    result = {
        "schedules": facts,
        "silent": [{"what": one.what, "why": one.why} for one in known.damaged],
    }
    listing.layout().show(result, head, rows)


@app.command("show")
def show_(name: Name, json: Json = False) -> None:
    """Show a schedule: its options, measurements and last runs."""
    from vmckpt.fleet.schedule.record import load
    from vmckpt.ui.tables import fields, table

    record = load(name)
    facts = _facts(record) | {
        "request": builtins(record.request),
        "runs": builtins(record.runs),
        "stores": list(record.places),
    }
    rows = [
        (
            _time(record, one.due_s),
            _time(record, one.began_s),
            one.outcome,
            (one.checkpoint or "-")[:12],
            str(one.missed or "-"),
            str(one.tries),
            one.why or "-",
        )
        for one in record.runs[-20:]
    ]
    head = ("due", "begun", "outcome", "checkpoint", "missed before", "tries", "why")
    text = fields(_lines(record, facts)) + ("\n\n" + table(head, rows) if rows else "")
    show(facts, text, as_json=json)


@app.command()
def rm(name: Name, json: Json = False) -> None:
    """Remove a schedule; its checkpoints stay."""
    from vmckpt.fleet.schedule.record import forget, load, lock_path
    from vmckpt.hosts.inventory.inventory import local_host
    from vmckpt.vm.lifecycle import owner

    async def remove() -> None:
        load(name)
        async with local_host().lock(lock_path(name), owner("schedule rm")):
            forget(name)

    run(remove())
    text = f"the schedule {name} is removed; its checkpoints stay, with the tag schedule={name}"
    show({"removed": name}, text, as_json=json)


@app.command("next")
@together
def next_(names: Names = None, count: Count = 5, *, listing: ListOptions) -> None:
    """Show the next runs of all schedules."""
    from vmckpt.errors import UsageError
    from vmckpt.fleet.schedule.due import upcoming
    from vmckpt.fleet.schedule.record import load, load_all
    from vmckpt.fleet.schedule.run import clock

    now, found = clock(), list[tuple[float, "ScheduleRecord"]]()
    for record in [load(name) for name in names or ()] or load_all().records.values():
        try:
            times = islice(upcoming(record.timing, record.state, now), count)
            found += [(at, record) for at in times]
        except UsageError as exc:  # its time zone is gone
            if names:
                raise
            warn(f"not listed: {record.name}: {exc.what}: {exc.why}")
    first = sorted(found, key=lambda one: (one[0], one[1].name))[:count]
    facts = [
        {"schedule": one.name, "vm": one.vm, "at_unix_s": at, "at": _time(one, at)}
        for at, one in first
    ]
    rows = [(_time(one, at), one.name, one.vm) for at, one in first]
    listing.layout().show({"next": facts}, ("at", "schedule", "vm"), rows)


@app.command("run-due")
def run_due(names: Names = None, json: Json = False) -> None:
    """Run what is due now, for use by a timer.

    Returns when it is done. The exit code is that of the first failed run; failed runs are retried
    by the next call.
    """
    from vmckpt.fleet.schedule.scheduler import run_due as run_due_

    results = run(
        run_due_(names or [], tools(lambda event: note(f"{event.schedule}: {event.text}")))
    )
    failures = [one.error for one in results if one.error is not None]
    facts = {"runs": [_result(one) for one in results]}
    words = [one_line(f"{one.schedule}: {one.outcome or 'failed'}") for one in results]
    show(facts, "\n".join(words) or "nothing is due", as_json=json)
    if failures:
        raise typer.Exit(failures[0].exit_code)


def tools(tell: Any) -> "SchedulerTools":
    """What a scheduler works with; `tell` hears its events."""
    from vmckpt.fleet.schedule.notices import notifying
    from vmckpt.fleet.schedule.run import SchedulerTools, clock
    from vmckpt.fleet.schedule.work import Checkpoints

    return SchedulerTools(clock, Checkpoints(warn), notifying(tell))


def event_json(event: "Event") -> dict[str, Any]:
    """One line for programs."""
    import time

    words = {"schedule": event.schedule, "vm": event.vm, "event": event.event, "text": event.text}
    return {"at_unix_s": time.time(), **words, **event.more}


def _result(result: "RunResult") -> dict[str, Any]:
    error = result.error
    words = error and {"kind": error.kind, "what": error.what, "why": error.why}
    return {"schedule": result.schedule, "outcome": result.outcome or "failed", "error": words}


def _facts(record: "ScheduleRecord") -> dict[str, Any]:
    from vmckpt.fleet.schedule.run import clock
    from vmckpt.fleet.schedule.status import status

    return status(record, clock())


def _next_text(record: "ScheduleRecord", facts: dict[str, Any]) -> str:
    return f"the first is due {_time(record, facts['next_unix_s'])}"


def _lines(record: "ScheduleRecord", facts: dict[str, Any]) -> list[tuple[str, str]]:
    from vmckpt.units import format_duration

    schedule_request, found = record.request, facts["interval"]
    lines = [
        ("schedule", record.name),
        ("vm", record.vm),
        ("when", str(facts["when"])),
        ("time zone", schedule_request.zone),
        ("next", _time(record, facts["next_unix_s"])),
        ("last done", _time(record, facts["last_done_unix_s"])),
        ("runs", f"{record.done_total} done, {record.failed_total} tries failed"),
        ("catch-up", schedule_request.catch_up.value),
        (
            "jitter",
            format_duration(schedule_request.jitter_s) if schedule_request.jitter_s else "-",
        ),
        ("keeps", _rule_text(schedule_request.rule)),
        ("store", schedule_request.store or "the store of the VM's host"),
        ("copies to", ", ".join(schedule_request.copies) or "-"),
        (
            "checks",
            f"{schedule_request.check_percent:g}% after each run"
            if schedule_request.check_percent
            else "-",
        ),
    ]
    if found:
        lines += [
            ("interval", f"{format_duration(found['every_s'])}, by {found['by']}"),
            ("costs", f"{format_duration(found['cost_s'])} of pause each"),
            (
                "failures",
                f"one in {format_duration(found['mtbf_s'])} on average: "
                f"{found['observed_failures']} seen in {format_duration(found['observed_up_s'])}, "
                "and what was assumed",
            ),
        ]
    if facts["why"]:
        lines.append(("in the way", f"{record.failures} failures in a row: {facts['why']}"))
    return lines


def _rule_text(rule: "RetentionRule | None") -> str:
    if rule is None:
        return "all"
    return ", ".join(f"{name} {value:g}" for name, value in asdict(rule).items() if value)


def _time(record: "ScheduleRecord", unix_s: float | None) -> str:
    """In the schedule's time zone, or in UTC if this machine has that no longer."""
    from vmckpt.errors import UsageError
    from vmckpt.fleet.schedule.instants import parse_zone

    if unix_s is None:
        return "-"
    zone: tzinfo = UTC
    with suppress(UsageError):
        zone = parse_zone(record.request.zone)
    return f"{datetime.fromtimestamp(unix_s, zone):%Y-%m-%d %H:%M:%S %Z}"
