"""vmckpt link: what another vmckpt starts on the target of a migration between two hosts."""

from pathlib import Path
from typing import Annotated

import typer

from vmckpt.cli.output import run


def link(directory: Annotated[Path, typer.Argument(help="Where it is told what to do.")]) -> None:
    """Let the source of a migration in, once it has the token; people have no use for it."""
    from vmckpt.hosts.inventory import state_dir
    from vmckpt.hosts.remote.tls import listen

    run(listen(directory, state_dir()))
