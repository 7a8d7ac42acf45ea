"""vmckpt replicate."""

from vmckpt.cli.nouns.replicate.replicate import app

__all__ = ["app"]
