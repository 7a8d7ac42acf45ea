"""vmckpt vm."""

from vmckpt.cli.nouns.vm.vm import app

__all__ = ["app"]
