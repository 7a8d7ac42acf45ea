"""Lists as aligned text: no frames, so that they can be cut and grepped."""

from collections.abc import Sequence

from vmckpt.ui.shown import one_line


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to their widest cell, the header in capitals. Each row is one line."""
    lines = [[title.upper() for title in header], *[list(map(one_line, row)) for row in rows]]
    widths = [max(len(line[n]) for line in lines) for n in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def fields(pairs: Sequence[tuple[str, str]]) -> str:
    """One "name  value" line for each pair."""
    width = max(len(name) for name, _ in pairs)
    return "\n".join(f"{name.ljust(width)}  {one_line(value)}" for name, value in pairs)
