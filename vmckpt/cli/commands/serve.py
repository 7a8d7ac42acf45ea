"""vmckpt serve --scheduler: the service that runs what is due."""

from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from vmckpt.cli.loop import run_until_interrupted
from vmckpt.cli.output import Json, show

if TYPE_CHECKING:
    from vmckpt.fleet.schedule.run import Event


def serve(
    scheduler: Annotated[bool, typer.Option("--scheduler", help="Run all schedules.")] = False,
    json: Json = False,
) -> None:
    """Run schedules until Ctrl-C.

    Prints a line per event (with --json, as JSON). Interrupted runs are continued by the next
    scheduler. Without --scheduler it is the remote end of another vmckpt's connection, and not for
    interactive use.
    """
    if not scheduler:
        from vmckpt.cli.hidden.far_side import far_side

        far_side()
        return
    from vmckpt.cli.nouns.schedule import event_json, tools
    from vmckpt.fleet.schedule.scheduler import serve as serve_

    def tell(event: "Event") -> None:
        # The reader of the output may be gone; the runs continue.
        with suppress(OSError):
            show(event_json(event), f"{event.schedule}: {event.text}", as_json=json)

    run_until_interrupted(serve_(tools(tell)))
