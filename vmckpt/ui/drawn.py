"""A picture that is drawn anew all the while, in a terminal."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rich.console import Console, RenderableType
from rich.live import Live

PER_S = 8


@contextmanager
def drawn(picture: RenderableType) -> Iterator[None]:
    """Draw it on stderr, as it is then, 8 times a second for the block; the last one stays."""
    live = Live(picture, console=Console(stderr=True), refresh_per_second=PER_S)
    # A terminal that has hung up is no reason to say that the operation failed.
    with suppress(OSError):
        live.start()
    try:
        yield
    finally:
        with suppress(OSError):
            live.stop()
