"""What every command has: `--json`, the loop that it runs on, how it reports its outcome."""

from typing import Annotated

import typer

from vmckpt.cli.loop import at_end, end_running, note, run, warn
from vmckpt.cli.results import print_error, show

__all__ = ["Json", "at_end", "end_running", "note", "print_error", "run", "show", "warn"]

Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout, progress on stderr.")
]
