"""vmckpt guard: risky work on a VM with a way back."""

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import click
import typer
from typer.core import TyperGroup

from vmckpt.cli.options.arguments import MaxPause, VmName, pause_s
from vmckpt.cli.options.listing import ListOptions
from vmckpt.cli.options.stores import AnyStore, absolute_location
from vmckpt.cli.options.together import together
from vmckpt.cli.output import Json, note, run, show, warn
from vmckpt.ui.shown import lines, one_line

if TYPE_CHECKING:
    from vmckpt.fleet.guard.guard import GuardTools
    from vmckpt.fleet.guard.record import GuardRecord

ROLLED_BACK = 7


class _GuardGroup(TyperGroup):
    """`guard VM ...` is `guard run VM ...`; a VM that is called like a command needs the `run`."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args = ["run", *args]
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_GuardGroup,
    help="Run a risky command with a tested rollback.\n\nvmckpt guard VM [OPTIONS] -- "
    "COMMAND... takes a checkpoint, proves it, runs the command, watches the VM, and "
    "rolls it back on failure.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Guarded = Annotated[str, typer.Argument(help="VM, or the guard's run id.", metavar="VM")]


In = Annotated[
    str,
    typer.Option(
        "--in",
        help="Where to run the command: here, host (the VM's), or guest (by its agent).",
        metavar="here|host|guest",
    ),
]
Checks = Annotated[
    list[str] | None,
    typer.Option(
        "--check",
        help="Health check: agent, tcp:PORT, tcp:ADDRESS:PORT, a URL, or a command (repeatable).",
        metavar="CHECK",
    ),
]
Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        help="The guest's address, for tcp:PORT. [default: as the guest agent reports]",
        metavar="ADDRESS",
    ),
]
For = Annotated[
    str,
    typer.Option("--for", help="How long to watch the VM after the command.", metavar="DURATION"),
]
Every = Annotated[str, typer.Option("--every", help="Interval between checks.", metavar="DURATION")]
Failures = Annotated[
    int,
    typer.Option(
        "--failures",
        help="Number of consecutive failed checks that count as failure.",
        min=1,
        metavar="N",
    ),
]
Timeout = Annotated[
    str | None, typer.Option("--timeout", help="Time limit of the command.", metavar="DURATION")
]
Failing = Annotated[
    str,
    typer.Option(
        "--on-failure", help="What to do on failure: roll-back or ask.", metavar="roll-back|ask"
    ),
]
ProofOption = Annotated[
    str,
    typer.Option(
        "--proof",
        help="How to prove the checkpoint: run a copy of it, or only read all of it.",
        metavar="run|read",
    ),
]
Keep = Annotated[
    str,
    typer.Option("--keep", help="How long to keep the checkpoint afterwards.", metavar="DURATION"),
]
AfterRollback = Annotated[
    list[str] | None,
    typer.Option(
        "--after-rollback", help="Command to run after a rollback (repeatable).", metavar="COMMAND"
    ),
]


@app.command("run")
def run_(
    vm: VmName,
    command: Annotated[list[str], typer.Argument(help="Command to run, after --.")],
    in_: In = "here",
    check: Checks = None,
    address: Address = None,
    for_: For = "0s",
    every: Every = "5s",
    failures: Failures = 3,
    timeout: Timeout = None,
    on_failure: Failing = "roll-back",
    proof: ProofOption = "run",
    keep: Keep = "24h",
    after_rollback: AfterRollback = None,
    max_pause: MaxPause = None,
    store: AnyStore = None,
    json: Json = False,
) -> None:
    """Guard a command.

    Exit code 0: succeeded; 7: rolled back; 9: open; others: not started.
    """
    from vmckpt.checkpoint.facts import EPOCH
    from vmckpt.fleet.guard.guard import guard
    from vmckpt.fleet.guard.health import parse_check, parse_command
    from vmckpt.fleet.guard.record import GuardProof, GuardRequest, OnFailure, Where
    from vmckpt.jobs.files import new_run
    from vmckpt.units import parse_duration_s

    for text in check or ():
        parse_check(text, address)
    for text in after_rollback or ():
        parse_command(text)
    request = GuardRequest(
        vm=vm,
        command=tuple(command),
        where=Where(_one_of("--in", in_, [one.value for one in Where])),
        checks=tuple(check or ()),
        address=address,
        watch_s=parse_duration_s(for_),
        every_s=parse_duration_s(every),
        failures=failures,
        command_timeout_s=parse_duration_s(timeout) if timeout else None,
        on_failure=OnFailure(_one_of("--on-failure", on_failure, [one.value for one in OnFailure])),
        proof=GuardProof(_one_of("--proof", proof, [one.value for one in GuardProof])),
        keep_s=parse_duration_s(keep),
        max_pause_s=pause_s(max_pause, EPOCH),
        after_rollback=tuple(after_rollback or ()),
        store=absolute_location(store),
    )
    _show_record(run(guard(new_run(), request, _tools(as_json=json))), as_json=json)


@app.command("list")
@together
def list_(listing: ListOptions) -> None:
    """List guards that are open or whose checkpoint exists."""
    from vmckpt.fleet.guard.guard import expire, who_is_at_work
    from vmckpt.fleet.guard.record import load_all

    async def states() -> list[tuple["GuardRecord", str]]:
        await expire()
        known = load_all()
        for damage in known.damaged:
            warn(str(damage))
        return [(record, await who_is_at_work(record)) for record in known.records.values()]

    found = run(states())
    rows = [
        (one.run, one.vm, _state(one, at_work), (one.checkpoint or "-")[:12], one.why or "-")
        for one, at_work in found
    ]
    facts = [one.facts | {"at_work": at_work} for one, at_work in found]
    listing.layout().show({"guards": facts}, ("guard", "vm", "state", "checkpoint", "why"), rows)


@app.command()
def commit(guarded: Guarded, json: Json = False) -> None:
    """End an open guard and keep the result of its command."""
    from vmckpt.fleet.guard.guard import commit as commit_
    from vmckpt.fleet.guard.record import find

    tools = _tools(as_json=json)
    _show_record(run(commit_(find(guarded), tools.tell)), as_json=json)


@app.command()
def rollback(guarded: Guarded, json: Json = False) -> None:
    """Roll the VM back to its guard's checkpoint."""
    from vmckpt.fleet.guard.guard import undo
    from vmckpt.fleet.guard.record import find

    _show(run(undo(find(guarded), _tools(as_json=json))), as_json=json)


@app.command()
def resume(guarded: Guarded, json: Json = False) -> None:
    """Continue an interrupted guard.

    Happens by itself when the guard's process is killed.
    """
    from vmckpt.fleet.guard.guard import resume as resume_
    from vmckpt.fleet.guard.record import find

    before = find(guarded)
    record = run(resume_(before, _tools(as_json=json)))
    if record is None:
        text = f"the command of {before.vm}'s guard was not started: nothing of it remains"
        show({"run": before.run, "vm": before.vm, "phase": None}, text, as_json=json)
        return
    _show_record(record, as_json=json)


def _tools(*, as_json: bool) -> "GuardTools":
    from vmckpt.fleet.guard.guard import GuardTools
    from vmckpt.sequence.in_thread import in_thread

    async def ask(why: str) -> bool | None:
        if as_json or not (sys.stdin.isatty() and sys.stderr.isatty()):
            return None
        warn(f"it failed: {why}")
        # Standard output may be a file; and it has the command's own.
        print("roll back? [y/n/later] ", end="", file=sys.stderr, flush=True)
        try:
            answer = await in_thread(sys.stdin.readline)
        except OSError:  # the terminal is closed
            return None
        return {"y": True, "n": False}.get(answer.strip().lower()[:1])

    def say(text: str) -> None:
        # The reader of the output may be gone; the command continues.
        with suppress(OSError):
            print(lines(text), end="", file=sys.stderr, flush=True)

    return GuardTools(
        tell=lambda text: note(f"  {text}"),
        say=say,
        ask=ask,
        output=2 if as_json else 1,
    )


def _show_record(record: "GuardRecord", *, as_json: bool) -> None:
    from vmckpt.fleet.guard.record import GuardPhase

    _show(record, as_json=as_json)
    if record.phase is GuardPhase.ROLLED_BACK:
        raise typer.Exit(ROLLED_BACK)


def _show(record: "GuardRecord", *, as_json: bool) -> None:
    from vmckpt.fleet.guard.record import GuardPhase
    from vmckpt.units import format_duration

    point, kept_for = (record.checkpoint or "-")[:12], format_duration(record.request.keep_s)
    if record.phase is GuardPhase.KEPT:
        text = f"{record.vm}: succeeded; rollback checkpoint {point} kept for {kept_for}"
    else:
        text = (
            f"{record.vm}: rolled back: {one_line(record.why)}\n"
            "  what it has sent since the checkpoint cannot be undone\n"
            f"  checkpoint {point} kept for {kept_for}"
        )
    show(record.facts, text, as_json=as_json)


def _state(record: "GuardRecord", at_work: str) -> str:
    if record.phase.is_over:
        return record.phase.words
    return f"{record.phase.words} ({at_work})" if at_work else f"interrupted: {record.phase.words}"


def _one_of(option: str, text: str, known: list[str]) -> str:
    from vmckpt.errors import UsageError

    if text not in known:
        raise UsageError(
            f"{option} {text} is unknown",
            why=f"it is {' or '.join(known)}",
            remedy="write one of them",
        )
    return text
