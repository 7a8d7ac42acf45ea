"""Text of /proc in which others choose names: of processes, mount points, mapped files (proc(5)).

A name holds any bytes, UTF-8 or not. The kernel escapes a newline in it, and nothing else that a
reader may take for the end of a line: only a newline ends one.
"""

from pathlib import Path


def read_text(path: Path) -> str:
    """A file of /proc; what is no UTF-8 becomes U+FFFD. Raises OSError."""
    return path.read_bytes().decode(errors="replace")


def read_lines(path: Path) -> list[str]:
    """Its lines. Raises OSError."""
    return lines(read_text(path))


def lines(text: str) -> list[str]:
    """Lines of such a file, none of them empty."""
    return [line for line in text.split("\n") if line]


def status_fields(text: str) -> dict[str, list[str]]:
    """The words of each field of /proc/PID/status, from the state on.

    The process's name, which stands before, is left out: it may look like any field.
    """
    _, state, rest = text.rpartition("\nState:\t")
    fields = (line.partition(":") for line in lines(f"{state}{rest}" if state else ""))
    return {name: words.split() for name, _, words in fields}
