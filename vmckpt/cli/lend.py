"""vmckpt lend: what another vmckpt starts on a host to use a store in a directory there."""

from pathlib import Path
from typing import Annotated

import typer

FIRST_WORD_S = 60.0


def lend(
    place: Annotated[Path, typer.Argument(help="The store's directory.")],
    ear: Annotated[Path, typer.Argument(help="The socket to listen at.")],
) -> None:
    """Do to a store what one visitor asks, until it goes; people have no use for it."""
    import socket

    from vmckpt.store.backends.lent import lend as lend_to
    from vmckpt.store.backends.local import LocalBackend

    with socket.socket(socket.AF_UNIX) as listening:
        part = ear.with_name(f".{ear.name}")
        listening.bind(str(part))
        listening.listen(1)
        listening.settimeout(FIRST_WORD_S)
        part.rename(ear)
        visitor, _ = listening.accept()
    backend = LocalBackend(place)
    with visitor:
        visitor.settimeout(None)
        lend_to(backend, visitor)
    backend.close()
