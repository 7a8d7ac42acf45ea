"""vmckpt checkpointing: what another vmckpt starts on a VM's host."""

from pathlib import Path
from typing import Annotated

import typer

from vmckpt.cli.output import run


def checkpointing(
    directory: Annotated[Path, typer.Argument(help="Where it is told what to do.")],
    recover: Annotated[bool, typer.Option("--recover", help="Its process has died.")] = False,
    last: Annotated[bool, typer.Option("--last", help="Guests come first.")] = False,
) -> None:
    """Checkpoint, restore or fork as was written down there; people have no use for it."""
    from vmckpt.checkpoint import service
    from vmckpt.hosts.inventory import local_host
    from vmckpt.hosts.scheduling import session_comes_last, take_turns

    if last:
        session_comes_last()  # as a rule it has since its first moment: see cli/entry.py
    if recover:
        take_turns()  # it was begun by a service that may have come last
        run(service.recover_from(directory))
    else:
        run(service.serve(directory, run(local_host().own_command())))
