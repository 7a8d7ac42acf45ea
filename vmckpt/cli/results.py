"""Results on stdout, as text or as one JSON object; errors as what / why / what to do."""

import json
import sys
from typing import Any

from vmckpt.cli.loop import warn_in_lines
from vmckpt.errors import VmckptError
from vmckpt.ui.colour import coloured
from vmckpt.ui.shown import lines, one_line
from vmckpt.ui.tables import wrapped

_INDENT = " " * len("error: ")


def show(result: dict[str, Any], text: str, *, as_json: bool) -> None:
    """Print the result one way or the other.

    `text` is lines of our own: what others wrote in them is one line each by then (`one_line`).
    """
    print(json.dumps(result) if as_json else coloured(lines(text), sys.stdout), flush=True)


def print_error(error: VmckptError, *, as_json: bool) -> int:
    """Print an error and return its exit code."""
    if as_json:
        print(json.dumps({"error": facts_of(error)}))
    # The last is meant for pasting; the others may contain what a program has printed, whose lines
    # would pass for ours if they started where ours do.
    what, why = (_indented(text) for text in (error.what, error.why))
    warn_in_lines(f"error: {what}\n  why: {why}\n  do:  {one_line(error.remedy)}")
    return error.exit_code


def facts_of(error: VmckptError) -> dict[str, Any]:
    """An error, for programs."""
    return {
        "kind": error.kind,
        "what": error.what,
        "why": error.why,
        "remedy": error.remedy,
        "exit_code": error.exit_code,
    }


def _indented(text: str) -> str:
    """Lines of our own, on a terminal wrapped at words, below the first one's beginning."""
    found = [one_line(line) for line in text.split("\n")]
    if sys.stderr.isatty():
        import shutil  # costs 1 ms

        width = shutil.get_terminal_size().columns - len(_INDENT)
        found = [part for line in found for part in wrapped(line, width)]
    return f"\n{_INDENT}".join(found)
