"""Colour for verdicts and errors, on terminals, unless NO_COLOR is set."""

import os
import re
from typing import TextIO

_RED, _YELLOW, _GREEN = "31", "33", "32"
_COLOURS = {"error:": _RED, "refuse": _RED, "warn": _YELLOW, "warning:": _YELLOW, "ok": _GREEN}
# A verdict is the first cell of a line; an error or a warning begins with a word and a colon.
_WORD = re.compile(r"^( *)(error:|warning:|(?:refuse|warn|ok)(?=  ))", re.MULTILINE)


def coloured(text: str, stream: TextIO) -> str:
    """Add colours that `stream` supports to `text`, which has no control characters yet."""
    if not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return _WORD.sub(lambda found: f"{found[1]}\033[{_COLOURS[found[2]]}m{found[2]}\033[0m", text)
