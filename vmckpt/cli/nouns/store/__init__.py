"""vmckpt store."""

from vmckpt.cli.nouns.store.store import app

__all__ = ["app"]
