"""vmckpt replicate status, events: how a replication is, and what happened to it."""

from typing import TYPE_CHECKING, Annotated

import typer

from vmckpt.cli.options.arguments import VmName
from vmckpt.cli.output import Json, run, show
from vmckpt.ui.shown import one_line

if TYPE_CHECKING:
    from vmckpt.replicate.operator.sides import ReplicaSide

WATCH_S = 1.0


def status(
    name: VmName,
    watch: Annotated[
        bool,
        typer.Option("--watch", help="Repeat every second; with --json, one line each time."),
    ] = False,
    json: Json = False,
) -> None:
    """Show the state of the VM's replication on both sides."""
    from time import sleep

    from vmckpt.ui.replication import status_text

    while True:
        found = run(_sides(name))
        facts = {"vm": name, "sides": [side.to_json() for side in found]}
        show(facts, status_text(name, found), as_json=json)
        if not watch:
            return
        sleep(WATCH_S)
        if not json:
            print()


def events(
    name: VmName,
    follow: Annotated[
        bool, typer.Option("--follow", help="Continue with new events until Ctrl-C.")
    ] = False,
    json: Json = False,
) -> None:
    """Show the history of the VM's replication.

    From all hosts, oldest first; with --json, an object per line.
    """
    from json import dumps
    from time import sleep

    from vmckpt.errors import NotFoundError
    from vmckpt.hosts.inventory.inventory import all_hosts
    from vmckpt.replicate.narration import read_events
    from vmckpt.ui.replication import event_text

    shown = set[str]()
    while True:
        found = run(read_events(name, all_hosts()))
        for event in found:
            if (line := dumps(event)) not in shown:
                shown.add(line)
                show(event, one_line(event_text(event)), as_json=json)
        if not found and not follow:
            raise NotFoundError(
                f"there are no events of a replication of '{name}'",
                why="no host that answers has a file of it",
                remedy=f"vmckpt replicate start {name} STANDBY",
            )
        if not follow:
            return
        sleep(WATCH_S)


async def _sides(name: str) -> "list[ReplicaSide]":
    from vmckpt.hosts.inventory.inventory import all_hosts
    from vmckpt.replicate.operator.sides import not_replicated, sides

    found = await sides(name, all_hosts())
    if not found:
        raise not_replicated(name)
    return found
