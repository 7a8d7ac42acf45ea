"""Lists as aligned text without frames, for cut and grep.

Without a terminal, each row is one line. On a terminal that is too narrow, empty columns are left
out, and cells are wrapped.
"""

import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest

from vmckpt.ui.shown import one_line

_GAP = "  "
_NOTHING = {"", "-"}


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    width: int | None = None,
    wraps: bool = True,
) -> str:
    """Columns padded to their widest cell, the header in capitals. Each row is one line.

    `width`: wrap cells at words so that lines have at most this many columns; None: the terminal's
    width, or unlimited without a terminal or if it does not wrap.
    """
    lines = [[title.upper() for title in header], *[list(map(one_line, row)) for row in rows]]
    widths = _widths(lines)
    limit = _terminal_width() if width is None and wraps else width
    if limit is not None:
        if _width(widths) > limit:
            lines = _without_empty(lines)
        widths = _fitting(lines, limit)
    return "\n".join(text for line in lines for text in _wrapped(line, widths))


def chosen(
    names: Sequence[str], header: Sequence[str], rows: Sequence[Sequence[str]]
) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """The named columns, in that order; a space in a name may be a hyphen. Raises UsageError."""
    from vmckpt.errors import UsageError

    known = [name.replace(" ", "-") for name in header]
    numbers = []
    for name in names:
        plain = "-".join(name.lower().split()).replace("_", "-")
        if plain not in known:
            raise UsageError(
                f"there is no column '{name}'",
                why=f"the columns are {', '.join(known)}",
                remedy=f"write e.g. --columns {','.join(known[:2])}",
            )
        numbers.append(known.index(plain))
    return [header[n] for n in numbers], [[row[n] for n in numbers] for row in rows]


def fields(pairs: Sequence[tuple[str, str]], *, indent: str = "", width: int | None = None) -> str:
    """One "name  value" line for each pair. `width`: as in `table`; values are wrapped."""
    limit = _terminal_width() if width is None else width
    widest = max((len(name) for name, _ in pairs), default=0)
    below = "\n" + " " * (len(indent) + widest + len(_GAP))
    lines = []
    for name, value in pairs:
        text = one_line(value)
        # A terminal that leaves no room for values wraps by itself.
        left = 0 if limit is None else limit - len(below) + 1
        parts = wrapped(text, left) if left > 0 else [text]
        lines.append(f"{indent}{name.ljust(widest)}{_GAP}{below.join(parts)}".rstrip())
    return "\n".join(lines)


def beneath(text: str, indent: str, *, width: int | None = None) -> str:
    """A line of text, wrapped as `fields` are; `indent`: of all lines after the first."""
    limit = _terminal_width() if width is None else width
    if limit is None or limit <= len(indent):
        return text
    first, *rest = wrapped(text, limit)
    more = wrapped(" ".join(rest), limit - len(indent)) if rest else []
    return f"\n{indent}".join([first, *more])


def without_empty(pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The fields that have a value."""
    return [(name, value) for name, value in pairs if value not in _NOTHING]


def in_words(facts: Mapping[str, object]) -> list[tuple[str, str]]:
    """Facts for `fields`: names without units, values formatted for people."""
    return [_in_words(name, value) for name, value in facts.items()]


def _in_words(name: str, value: object) -> tuple[str, str]:
    from vmckpt.units import format_duration, format_rate, format_size, format_time

    if isinstance(value, int | float) and not isinstance(value, bool):
        for unit, shown in (
            ("_bytes_per_s", format_rate),
            ("_bytes", format_size),
            ("_unix_s", format_time),
            ("_s", format_duration),
        ):
            if name.endswith(unit):
                return name.removesuffix(unit).replace("_", " "), shown(value)
        if name.endswith("_ms"):
            return name.removesuffix("_ms").replace("_", " "), f"{value:.1f} ms"
    return name.replace("_", " "), _value(value)


def _value(value: object) -> str:
    match value:
        case None | "":
            return "-"
        case bool():
            return "yes" if value else "no"
        case Mapping():
            given = {name: inner for name, inner in value.items() if _value(inner) != "-"}
            return ", ".join(" ".join(_in_words(*item)) for item in given.items()) or "-"
        case list() | tuple():
            return ", ".join(map(_value, value)) or "-"
        case float():
            return f"{value:g}"
    return str(value)


def wrapped(text: str, width: int) -> list[str]:
    """Wrap `text` into lines of `width`. A longer word stays whole, for copying."""
    if len(text) <= width:
        return [text]
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]


def _terminal_width() -> int | None:
    if not sys.stdout.isatty():
        return None
    import shutil  # costs 1 ms

    return shutil.get_terminal_size().columns


def _widths(lines: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, cells)) for cells in zip(*lines, strict=True)]


def _width(widths: Sequence[int]) -> int:
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def _without_empty(lines: Sequence[Sequence[str]]) -> list[list[str]]:
    columns = [cells for cells in zip(*lines, strict=True) if not _NOTHING.issuperset(cells[1:])]
    return [list(line) for line in zip(*columns, strict=True)] or [list(line) for line in lines]


def _fitting(lines: Sequence[Sequence[str]], limit: int) -> list[int]:
    """Column widths that add up to `limit` if possible: the widest shrink first, down to a word."""
    found = _widths(lines)
    least = [
        max(len(word) for cell in cells for word in cell.split(" "))
        for cells in zip(*lines, strict=True)
    ]
    while _width(found) > limit and (spare := [n for n, one in enumerate(found) if one > least[n]]):
        found[max(spare, key=lambda n: found[n])] -= 1
    return found


def _wrapped(line: Sequence[str], widths: Sequence[int]) -> Iterable[str]:
    """Wrap a row into lines."""
    cells = [wrapped(cell, width) for cell, width in zip(line, widths, strict=True)]
    for parts in zip_longest(*cells, fillvalue=""):
        padded = (part.ljust(width) for part, width in zip(parts, widths, strict=True))
        yield _GAP.join(padded).rstrip()
