"""Plain words in help and documentation (docs/glossary.md), and help that is complete."""

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer.main

from vmckpt.cli.main import SECTIONS, command_line

pytestmark = pytest.mark.unit
ROOT = Path(__file__).parents[2]
DIALECT = re.compile(
    r"\b(nobody|somebody|whoever|whomever|(?:is|are|was|were|be|been) told|any more|anew"
    r"|(?:go|goes|gone|going) on with"
    r"|st(?:ands?|ood|anding) still|for ever|mend(?:s|ed|ing)?|wish(?:es|ed)?|in (?:the )?clear"
    r"|fold(?:s|ed|ing)?|aside)\b",
    re.IGNORECASE,
)
PAGES = [
    ROOT / "README.md",
    ROOT / "ARCHITECTURE.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "ansible").rglob("README.md")),
    *sorted((ROOT / "vmckpt").rglob("README.md")),
    *sorted((ROOT / "tests").rglob("README.md")),
]
# Output of commands, as it is.
_LITERAL = re.compile(r"^(?: {4}[^\n]*|```.*?^```)$|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every command with its words, groups too."""

    def of(command: click.Command, words: str) -> Iterator[tuple[str, click.Command]]:
        if command.hidden:
            return
        yield words, command
        if isinstance(command, click.Group):
            for name, one in command.commands.items():
                yield from of(one, f"{words} {name}".strip())

    yield from of(typer.main.get_command(command_line([])), "")


COMMANDS = dict(commands())


@pytest.mark.parametrize("words", COMMANDS)
def test_help_says_all_in_plain_words(words: str) -> None:
    command = COMMANDS[words]
    context = click.Context(command)
    texts = [command.help or ""]
    for one in command.params:
        if isinstance(one, click.Option) and not one.hidden:
            texts.append(one.help or "")
            assert one.help, one.opts
            assert one.is_flag or one.make_metavar(context) not in ("PATH", "FILENAME"), one.opts
    found = [match[0] for text in texts for match in DIALECT.finditer(text)]
    assert found == []


@pytest.mark.parametrize("words", [words for words in COMMANDS if words])
def test_a_commands_summary_fits_into_80_columns(words: str) -> None:
    text = COMMANDS[words].get_short_help_str(62)
    assert text
    assert not text.endswith("...") or "COMMAND..." in text


def test_every_command_is_in_one_section_of_help() -> None:
    named = [name for names in SECTIONS.values() for name in names]
    assert sorted(named) == sorted(word for word in COMMANDS if word and " " not in word)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_use_the_terms_of_the_glossary(page: Path) -> None:
    text = _LITERAL.sub("", page.read_text())
    if page.name == "glossary.md":  # its last column has the others
        text = re.sub(r"\|[^|\n]*\|$", "", text, flags=re.MULTILINE)
    assert [match[0] for match in DIALECT.finditer(text)] == []


def sentences(path: Path) -> Iterator[tuple[int, str]]:
    """Comments, docstrings and messages without the code that they quote, and their first lines."""
    # Literals with spaces; since 3.12 those of an f-string are tokens of their own.
    texts = {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type == tokenize.COMMENT or (token.type in texts and " " in token.string):
                yield token.start[0], re.sub(r"`[^`]*`|\S*[/(){}_.]\w+\S*", "", token.string)


def test_comments_docstrings_and_messages_use_the_terms_of_the_glossary() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {match[0]}"
        for path in sorted((ROOT / "vmckpt").rglob("*.py"))
        for line, text in sentences(path)
        for match in DIALECT.finditer(text)
    ]
    assert found == []


def strings_that_nothing_uses(tree: ast.Module) -> Iterator[int]:
    """The lines of strings that are statements, and no docstrings."""
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            body = getattr(node, name, None)
            for number, one in enumerate(body if isinstance(body, list) else ()):
                has_docstring = isinstance(
                    node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
                )
                if not isinstance(one, ast.Expr) or (has_docstring and number == 0):
                    continue
                if isinstance(one.value, ast.JoinedStr) or (
                    isinstance(one.value, ast.Constant) and isinstance(one.value.value, str)
                ):
                    yield one.lineno


def test_no_message_ends_before_its_last_line() -> None:
    """A second line without parentheses around both is a statement: the message was cut off."""
    cut = "reason = 'a (port '\nf'{1})'\n"
    assert list(strings_that_nothing_uses(ast.parse(cut))) == [2]
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / "vmckpt").rglob("*.py"))
        for line in strings_that_nothing_uses(ast.parse(path.read_text()))
    ]
    assert found == []
