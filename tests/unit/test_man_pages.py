"""Man pages say all that `--help` says."""

import re

import click
import pytest

from debian.man_pages import pages
from tests.unit.test_language import COMMANDS

pytestmark = pytest.mark.unit
PAGES = pages()
REQUESTS = {"TH", "SH", "SS", "TP", "PP", "nf", "fi"}


def shown(page: str) -> str:
    """What a reader sees of a page, but for how its lines are broken."""
    return re.sub(r"\\f[BR]|\\&", "", page).replace(r"\-", "-").replace(r"\e", "\\")


@pytest.mark.parametrize("words", COMMANDS)
def test_every_command_and_option_is_in_a_page(words: str) -> None:
    command = COMMANDS[words]
    page = shown(PAGES["-".join(["vmckpt", *words.split()[:1]])])
    context = click.Context(command, info_name=f"vmckpt {words}".strip())
    for param in command.params:
        record = param.get_help_record(context)
        if record is not None and not isinstance(command, click.Group):
            assert "\n".join((record[0], " ".join(record[1].split()))) in page
    if not isinstance(command, click.Group):
        assert " ".join([context.command_path, *command.collect_usage_pieces(context)]) in page
        assert " ".join((command.help or "").split("\n\n", maxsplit=1)[0].split()) in page


def test_there_is_a_page_for_each_command_of_the_package() -> None:
    first = {words.split()[0] for words in COMMANDS if words}
    assert PAGES.keys() == {"vmckpt", "vmckpt-fence-by-kill"} | {f"vmckpt-{one}" for one in first}


@pytest.mark.parametrize("name", PAGES)
def test_a_line_is_a_request_only_where_one_was_meant(name: str) -> None:
    lines = PAGES[name].splitlines()
    assert {line[1:3] for line in lines if line.startswith((".", "'"))} <= REQUESTS
    assert lines[0].startswith(".TH ")
    assert lines[1] == ".SH NAME"
    assert " \\- " in lines[2]
