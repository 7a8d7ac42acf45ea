"""Results on stdout, as text or as one JSON object; errors as what / why / what to do."""

import json
from typing import Any

from vmckpt.cli.loop import warn
from vmckpt.errors import VmckptError


def show(result: dict[str, Any], text: str, *, as_json: bool) -> None:
    """Print the result one way or the other."""
    print(json.dumps(result) if as_json else text, flush=True)


def print_error(error: VmckptError, *, as_json: bool) -> int:
    """Print an error and return its exit code."""
    if as_json:
        words = {"kind": error.kind, "what": error.what, "why": error.why, "remedy": error.remedy}
        print(json.dumps({"error": words | {"exit_code": error.exit_code}}))
    warn(f"error: {error.what}\n  why: {error.why}\n  do:  {error.remedy}")
    return error.exit_code
