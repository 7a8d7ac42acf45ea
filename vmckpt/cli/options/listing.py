"""How a list is printed: as a table, a wide one, some columns of it, or JSON."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, NamedTuple

import typer

from vmckpt.cli.layout import Layout
from vmckpt.cli.output import Json


class Form(StrEnum):
    """Forms of a list."""

    table = "table"
    wide = "wide"
    json = "json"


class ListOptions(NamedTuple):
    """The options of every command that prints a list."""

    form: Annotated[
        Form | None,
        typer.Option(
            "-o", "--output", help="wide: all columns, lines not wrapped; json: as --json."
        ),
    ] = None
    columns: Annotated[
        str | None,
        typer.Option(help="Only these columns, e.g. name,host.", metavar="COLUMN,..."),
    ] = None
    json: Json = False

    def layout(self) -> Layout:
        """What the options select. Raises UsageError: they exclude each other."""
        columns = None if self.columns is None else self.columns.split(",")
        return Layout(self.form is Form.wide, columns, self.as_json())

    def as_json(self) -> bool:
        """Whether JSON is asked for. Raises UsageError: so is something else."""
        from vmckpt.errors import UsageError

        wanted = self.json or self.form is Form.json
        other = f"-o {self.form}" if self.form and self.form is not Form.json else ""
        other = "--columns" if self.columns is not None else other
        if wanted and other:
            raise UsageError(
                f"JSON and {other} are both asked for",
                why="JSON has everything, and is not a table",
                remedy="leave one of them out",
            )
        return wanted


def asks_for_json(words: Sequence[str]) -> bool:
    """Whether a command line asks for JSON, before or although it cannot be parsed."""
    pairs = zip(words, [*words[1:], ""], strict=True)
    return any(
        word in ("--json", "-ojson", "--output=json")
        or (word in ("-o", "--output") and value == "json")
        for word, value in pairs
    )
