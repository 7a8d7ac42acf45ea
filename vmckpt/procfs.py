"""/proc files that contain names chosen by others: processes, mount points, mapped files (proc(5)).

A name holds any bytes, UTF-8 or not. The kernel escapes a newline in it, but nothing else that a
reader may take for a line end: split at newlines only.
"""

import errno
from pathlib import Path

# Errors of this process or machine, not of the file: its content is unknown, not empty.
NOT_NOW = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO)


def read_text(path: Path) -> str:
    """Read a file of /proc; bytes that are not UTF-8 become U+FFFD. Raises OSError."""
    return path.read_bytes().decode(errors="replace")


def read_lines(path: Path) -> list[str]:
    """Read the file's lines. Raises OSError."""
    return lines(read_text(path))


def lines(text: str) -> list[str]:
    """The lines of such a text, without empty ones."""
    return [line for line in text.split("\n") if line]


def status_fields(text: str) -> dict[str, list[str]]:
    """The words of each field of /proc/PID/status, from the state on.

    The process's name, which comes before, is left out: it may look like any field.
    """
    _, state, rest = text.rpartition("\nState:\t")
    fields = (line.partition(":") for line in lines(f"{state}{rest}" if state else ""))
    return {name: words.split() for name, _, words in fields}
