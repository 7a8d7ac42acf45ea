"""vmckpt host."""

from vmckpt.cli.nouns.host.host import app

__all__ = ["app"]
