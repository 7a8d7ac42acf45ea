"""Every command line in help, README and docs is one that vmckpt takes; so are former names."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer.main

from vmckpt.cli.main import FORMER, command_line
from vmckpt.cli.tree.examples import examples
from vmckpt.cli.tree.renamed import renamed
from vmckpt.fleet.guard.record import GuardProof, OnFailure, Where

pytestmark = pytest.mark.unit
ROOT = Path(__file__).parents[2]
COMMAND = typer.main.get_command(command_line([]))
# In a code block: to a comment, a pipe, or the end; a line that ends with \ continues.
_LINE = re.compile(r"^(?:    |\$ |# )*(?:sudo )?vmckpt ((?:[^\n\\]|\\\n|\\.)+)$", re.MULTILINE)
_FENCED = re.compile(r"^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:^ {4}.*\n)+", re.MULTILINE)


def parse(words: list[str]) -> str:
    """The command, by its words; raises click.ClickException for what it does not take."""
    command, path = COMMAND, list[str]()
    while isinstance(command, click.Group):
        if not words or words[0] in ("--help", "-h", "--version"):
            return " ".join(path)
        # A group may have a command that needs no name (`guard VM`).
        name, found, words = command.resolve_command(click.Context(command), words)
        assert name is not None and found is not None
        path.append(name)
        command = found
    if not {"--help", "-h"} & set(words):
        with command.make_context(path[-1], words):
            pass
    return " ".join(path)


def every_command(group: click.Command, *words: str) -> Iterator[str]:
    if isinstance(group, click.Group):
        for name, one in group.commands.items():
            if not one.hidden:
                yield from every_command(one, *words, name)
    else:
        yield " ".join(words)


def in_pages() -> Iterator[tuple[str, str]]:
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = page.read_text()
        for block in [*_FENCED.findall(text), *_INDENTED.findall(text)]:
            for line in _LINE.findall(block):
                yield page.name, line.replace("\\\n", " ")


def words_of(line: str) -> list[str]:
    lexer = shlex.shlex(line.partition(" 2>")[0], posix=True, punctuation_chars="|;&<>")
    lexer.whitespace_split = True
    words = list[str]()
    for word in lexer:
        if set(word) <= set("|;&<>"):
            break
        words.append(word)
    return words


def test_every_command_has_two_examples() -> None:
    found = {words: len(lines) for words, lines in examples().items()}
    assert found.keys() == set(every_command(COMMAND))
    assert [words for words, count in found.items() if count < 2] == []


@pytest.mark.parametrize("words", examples())
def test_each_example_is_one_of_its_command(words: str) -> None:
    for line in examples()[words]:
        assert parse(shlex.split(line)[1:]) == words, line


@pytest.mark.parametrize("line", examples()["guard run"])
def test_examples_of_guards_name_what_there_is(line: str) -> None:
    """These options are any text to the parser."""
    words = shlex.split(line)
    for option, kind in (("--in", Where), ("--on-failure", OnFailure), ("--proof", GuardProof)):
        if option in words:
            assert kind(words[words.index(option) + 1])


@pytest.mark.parametrize(("page", "line"), list(in_pages()))
def test_each_command_line_of_the_pages_is_taken(page: str, line: str) -> None:
    words = words_of(line)
    if words and words[0] not in FORMER:
        parse(words)


def test_pages_have_command_lines() -> None:
    assert len(list(in_pages())) > 80


@pytest.mark.parametrize(
    ("former", "today"),
    [
        ("report R --png a.png", "runs report R --png a.png"),
        ("replay R --policy p", "runs replay R --policy p"),
        ("host doctor a b", "host check --fixes a b"),
        ("host remove a", "host rm a"),
        ("store key remove 1a --key-file k", "store key rm 1a --key-file k"),
        (
            "checkpoint prune web --daily 7 --weekly=2",
            "checkpoint prune web --keep-daily 7 --keep-weekly=2",
        ),
        (
            "migrate web h2 --max-pause 200ms --max-slowdown 20%",
            "migrate web h2 --plan --max-downtime 200ms --max-slowdown 20%",
        ),
        ("migrate web h2 --max-pause=1s", "migrate web h2 --plan --max-downtime=1s"),
        ("plan web h2 --max-pause 200ms", "plan web h2 --max-downtime 200ms"),
        ("checkpoint create web --max-pause 5ms", "checkpoint create web --max-pause 5ms"),
        ("schedule add web --hourly 7", "schedule add web --keep-hourly 7"),
        ("checkpoint create web --kind savevm", "checkpoint create web --kind internal"),
        ("checkpoint list web --kind=savevm", "checkpoint list web --kind=internal"),
        (
            "guard run web -- host remove --kind savevm",
            "guard run web -- host remove --kind savevm",
        ),
        ("vm show report", "vm show report"),
        ("migrate report b", "migrate report b"),
    ],
)
def test_former_names_are_taken(former: str, today: str) -> None:
    assert renamed(former.split()) == today.split()
    parse(today.split())


def test_former_snapshot_commands_are_there_and_not_shown() -> None:
    for verb in ("save web x", "list web", "load web x", "delete web x"):
        parse(["snapshot", *verb.split()])
    assert "snapshot" not in COMMAND.get_help(click.Context(COMMAND))
