"""How a list is printed, whatever read it from the command line.

It does not import typer: a plain `vmckpt vm list` does without (`cli/entry.py`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from vmckpt.cli.results import show


class Layout(NamedTuple):
    """A table, or one with all columns and unwrapped lines; only these columns of it; or JSON."""

    is_wide: bool = False
    columns: Sequence[str] | None = None
    as_json: bool = False

    def show(
        self,
        facts: dict[str, Any],
        header: Sequence[str],
        rows: Sequence[Sequence[str]],
        *,
        wide: Sequence[str] = (),
        text: str = "",
        none: str = "",
    ) -> None:
        """Print the list.

        `wide`: columns that a wide table adds; `text`: lines below the table; `none`: instead of an
        empty table.

        Raises UsageError: an unknown column.
        """
        from vmckpt.ui.tables import chosen, table

        names = self.columns
        if names is None:
            names = [name for name in header if self.is_wide or name not in wide]
        # Before anything is printed: a wrong name is an error in either form.
        header, rows = chosen(names, header, rows)
        shown = none if none and not rows else table(header, rows, wraps=not self.is_wide)
        show(facts, "\n".join(filter(None, (shown, text))), as_json=self.as_json)
