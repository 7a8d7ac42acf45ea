"""vmckpt link: what another vmckpt starts on the destination of a migration between two hosts.

It imports no typer: a migration waits for it.
"""

from pathlib import Path

from vmckpt.cli.loop import run


def link(directory: Path) -> None:
    """Let the source of a migration in, once it has the token (internal)."""
    from vmckpt.hosts.inventory.directories import state_dir
    from vmckpt.hosts.remote.tls import listen

    run(listen(directory, state_dir()))
