"""Options that are given together: each is the command's own for whoever calls it."""

from typing import Annotated, NamedTuple

import pytest
import typer
from typer.testing import CliRunner

from vmckpt.cli.options.together import together


class Where(NamedTuple):
    place: Annotated[str | None, typer.Option("--place")] = None
    often: Annotated[int, typer.Option("--often", min=1)] = 2


app = typer.Typer()


@app.command()
@together
def go(name: str, *, where: Where, last: Annotated[bool, typer.Option("--last")] = False) -> None:
    print(name, where, last)


@pytest.mark.parametrize(
    ("words", "place", "often", "last"),
    [
        ("me", None, 2, False),
        ("me --often 3 --last", None, 3, True),
        ("--place here me", "here", 2, False),
    ],
)
def test_they_come_to_the_command_as_one(
    words: str, place: str | None, often: int, last: bool
) -> None:
    done = CliRunner().invoke(app, words.split())
    assert done.output == f"me {Where(place, often)} {last}\n"


def test_what_typer_checks_is_checked() -> None:
    assert CliRunner().invoke(app, ["me", "--often", "0"]).exit_code == 2
    assert CliRunner().invoke(app, []).exit_code == 2
    listed = CliRunner().invoke(app, ["--help"]).output
    assert listed.index("--place") < listed.index("--often") < listed.index("--last")
