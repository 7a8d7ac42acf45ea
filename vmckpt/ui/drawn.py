"""Repeatedly redraws a picture in a terminal."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rich.console import Console, RenderableType
from rich.live import Live

PER_S = 8


@contextmanager
def drawn(picture: RenderableType) -> Iterator[None]:
    """Draw the picture on stderr 8 times a second during the block; the last one remains."""
    live = Live(picture, console=Console(stderr=True), refresh_per_second=PER_S)
    # A closed terminal does not mean that the operation failed.
    with suppress(OSError):
        live.start()
    try:
        yield
    finally:
        with suppress(OSError):
            live.stop()
