"""vmckpt runs: list, show, attach, score, report, replay."""

from typing import TYPE_CHECKING

import typer

from vmckpt.cli import output
from vmckpt.cli.nouns.runs.replay import replay
from vmckpt.cli.nouns.runs.report import report
from vmckpt.cli.options.arguments import RunId
from vmckpt.cli.options.listing import ListOptions
from vmckpt.cli.options.together import together
from vmckpt.cli.output import Json, show

if TYPE_CHECKING:
    from vmckpt.events.record import RunRecord
    from vmckpt.migrate.outcome.recover import Recovery
    from vmckpt.migrate.report import MigrationReport

# The fields of a request and a result that `runs show` prints first.
_HEAD = ("run", "vm", "source", "target")

app = typer.Typer(help="Records of past operations.", no_args_is_help=True, rich_markup_mode=None)


@app.command("list")
@together
def list_(listing: ListOptions) -> None:
    """List the run records, oldest first."""
    from vmckpt.events.record import load_all
    from vmckpt.hosts.inventory.directories import runs_dir
    from vmckpt.units import format_time
    from vmckpt.vm.inventory import running_operations

    busy = output.run(running_operations())
    rows = []
    for record in load_all(runs_dir()):
        result = record.result or {"outcome": _unfinished(record, busy)}
        destination = f"{record.request.get('source')} -> {record.request.get('target')}"
        total = f"{result['total_time_s']:.2f} s" if "total_time_s" in result else "-"
        what = (record.operation, str(record.request.get("vm")), destination)
        how = (str(result.get("method", "-")), str(result["outcome"]), total)
        rows.append((record.run, format_time(record.began_unix_s), *what, *how))
    header = ("run", "began", "operation", "vm", "hosts", "method", "outcome", "total")
    objects = [dict(zip(header, row, strict=True)) for row in rows]
    # A run's id starts with its start time.
    listing.layout().show({"runs": objects}, header, rows, wide=("began", "operation"))


@app.command("show")
def show_(
    run: RunId,
    json: Json = False,
) -> None:
    """Show one run: request, phases, notes, result."""
    from vmckpt.events.record import RunRecord
    from vmckpt.hosts.inventory.directories import runs_dir
    from vmckpt.hosts.inventory.inventory import check_name
    from vmckpt.ui.progress import PHASES
    from vmckpt.ui.tables import fields, in_words, without_empty
    from vmckpt.units import format_time
    from vmckpt.vm.inventory import running_operations

    record = RunRecord.load(runs_dir() / f"{check_name(run, 'run')}.json")
    facts = {name: getattr(record, name) for name in record.__slots__}
    result = record.result or {"outcome": _unfinished(record, output.run(running_operations()))}
    # Leave out empty values, and what `head` shows already.
    request = {key: value for key, value in record.request.items() if value and key not in _HEAD}
    head = [
        ("run", record.run),
        ("operation", record.operation),
        ("vm", str(record.request.get("vm"))),
        ("hosts", f"{record.request.get('source')} -> {record.request.get('target')}"),
        ("began", format_time(record.began_unix_s)),
    ]
    course = []
    for event in record.events:
        at = f"{event['at_s']:8.2f} s"
        if event["event"] == "PhaseBegan":
            course.append((at, PHASES.get(event["phase"], event["phase"])))
        elif event["event"] == "Note":
            course.append((at, f"note: {event['text']}"))
    end = {key: value for key, value in result.items() if value and key not in (*_HEAD, "warnings")}
    warnings = [("warning", str(text)) for text in result.get("warnings") or ()]
    parts = [[*head, *in_words(request)], course, [*in_words(end), *warnings]]
    text = "\n\n".join(fields(without_empty(part)) for part in parts if part)
    show(facts, text, as_json=json)


@app.command()
def attach(
    run: RunId,
    json: Json = False,
) -> None:
    """Show a migration from its start to its end.

    Its job may run on any host.
    """
    from vmckpt.cli.commands.moving import show_outcome

    show_outcome(output.run(_attach(run)), as_json=json)


async def _attach(run: str) -> "MigrationReport | Recovery":
    from vmckpt.hosts.inventory.inventory import check_name
    from vmckpt.migrate.elsewhere.replay import is_done_here, replay_run
    from vmckpt.migrate.elsewhere.watch import find_job, watch
    from vmckpt.ui.progress import display

    if is_done_here(check_name(run, "run")):
        with display(f"run {run}") as emit:
            return await replay_run(run, emit)
    job = await find_job(run)
    with display(f"run {run} on {job.host.name}") as emit:
        return await watch(job, emit)


def _unfinished(record: "RunRecord", busy: set[str]) -> str:
    """What has become of a run without a result, as far as this machine knows."""
    from vmckpt.migrate.elsewhere.watch import JOB_ON

    if record.run in busy:
        return "running"
    return "see attach" if JOB_ON in record.request else "cut off"


@app.command()
def score(json: Json = False) -> None:
    """Show the accuracy of past forecasts, by method."""
    from vmckpt.errors import NotFoundError
    from vmckpt.events.record import load_all
    from vmckpt.forecast import score as scores
    from vmckpt.hosts.inventory.directories import runs_dir
    from vmckpt.ui.tables import table
    from vmckpt.units import format_duration

    records = load_all(runs_dir())
    moves, wrong = scores.scored(records), scores.unforeseen(records)
    lines = scores.score(moves)
    if not lines:
        raise NotFoundError(
            "no forecast has been tested yet",
            why="no completed migration on record had a plan and an exclusive link",
            remedy="migrate with a plan: vmckpt migrate VM HOST --plan",
        )
    rows = [
        (
            line.way,
            str(line.moves),
            f"{line.total_error:.0%}",
            f"{line.total_error_p90:.0%}",
            f"{line.total_inside:.0%}",
            "-" if line.pause_error_s is None else format_duration(line.pause_error_s),
            "-" if line.pause_inside is None else f"{line.pause_inside:.0%}",
        )
        for line in lines
    ]
    header = ("way", "moves", "time off by", "p90", "inside", "pause off by", "inside")
    text = table(header, rows)
    if wrong:
        text += f"\ncompleted, or did not, contrary to the forecast: {', '.join(wrong)}"
    if shared := scores.in_company(records):
        text += f"\nnot scored, because others used the link too: {', '.join(shared)}"
    facts = {"ways": [line._asdict() for line in lines], "unforeseen": wrong, "shared": shared}
    show(facts | {"moves": scores.facts(moves)}, text, as_json=json)


app.command()(report)
app.command()(replay)
