"""vmckpt checkpoint."""

from vmckpt.cli.nouns.checkpoint.checkpoint import app

__all__ = ["app"]
