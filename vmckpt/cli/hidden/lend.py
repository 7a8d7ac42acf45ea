"""vmckpt lend: what another vmckpt starts on a host to use a store in a directory there."""

from pathlib import Path
from typing import Annotated

import typer

FIRST_WORD_S = 60.0


def lend(
    directory: Annotated[Path, typer.Argument(help="The store's directory.")],
    ear: Annotated[
        Path | None,
        typer.Argument(help="The socket to listen at; stdin and stdout when it is left out."),
    ] = None,
    append_only: Annotated[
        bool,
        typer.Option("--append-only", help="Let checkpoints be added, and nothing be removed."),
    ] = False,
) -> None:
    """Do to a store what one client asks, until it leaves.

    For ssh://HOST/DIRECTORY: sshd starts it, by a line of authorized_keys that allows nothing else:

    restrict,command="vmckpt lend --append-only /DIRECTORY" ssh-ed25519 AAAA...
    """
    import socket
    from contextlib import closing

    from vmckpt.store.backends.lent import Pipes
    from vmckpt.store.backends.lent import lend as lend_to
    from vmckpt.store.backends.local import LocalBackend

    with closing(LocalBackend(directory, append_only=append_only)) as backend:
        if ear is None:
            lend_to(backend, Pipes(0, 1), append_only=append_only)
            return
        with socket.socket(socket.AF_UNIX) as listening:
            part = ear.with_name(f".{ear.name}")
            listening.bind(str(part))
            listening.listen(1)
            listening.settimeout(FIRST_WORD_S)
            part.rename(ear)
            visitor, _ = listening.accept()
        with visitor:
            visitor.settimeout(None)
            lend_to(backend, visitor, append_only=append_only)
