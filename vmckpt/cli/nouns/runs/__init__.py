"""vmckpt runs."""

from vmckpt.cli.nouns.runs.runs import app

__all__ = ["app"]
