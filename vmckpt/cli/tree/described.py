"""The command line as values, for its man pages and its reference: all that `--help` says."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import click
import typer.main

from vmckpt.cli.main import SECTIONS, command_line
from vmckpt.cli.tree.examples import examples


@dataclass(frozen=True, slots=True)
class Described:
    """One command. A group has the commands below it, those of nested groups included."""

    words: str
    usage: str
    summary: str
    paragraphs: tuple[str, ...]
    # Without --help, which each command has.
    options: tuple[tuple[str, str], ...]
    examples: tuple[str, ...]
    commands: tuple["Described", ...]


@dataclass(frozen=True, slots=True)
class CommandLine:
    """`vmckpt` itself, its commands by section of `--help`, and exit codes with their meaning."""

    root: Described
    sections: dict[str, list[Described]]
    exit_codes: list[tuple[str, str]]


def described() -> CommandLine:
    """All commands that `--help` shows."""
    root = cast("click.Group", typer.main.get_command(command_line([])))
    context = click.Context(root, info_name="vmckpt")
    commands = {one.words.split()[1]: one for one in _below(root, context, nested=False)}
    codes = " ".join((root.epilog or "").partition(": ")[2].split()).rstrip(".").split("; ")
    return CommandLine(
        _one(root, context, ()),
        {title: [commands[name] for name in names] for title, names in SECTIONS.items()},
        [(code, meaning) for code, _, meaning in (entry.partition(" ") for entry in codes)],
    )


def _one(
    command: click.Command, context: click.Context, commands: tuple[Described, ...]
) -> Described:
    records = [param.get_help_record(context) for param in command.params]
    return Described(
        words=context.command_path,
        usage=" ".join(command.collect_usage_pieces(context)),
        summary=command.get_short_help_str(limit=200),
        paragraphs=tuple(" ".join(one.split()) for one in (command.help or "").split("\n\n")),
        options=tuple(
            (term, " ".join(meaning.split()))
            for term, meaning in (record for record in records if record is not None)
        ),
        examples=tuple(examples().get(context.command_path.partition(" ")[2], [])),
        commands=commands,
    )


def _below(group: click.Group, context: click.Context, *, nested: bool) -> Iterator[Described]:
    for name, command in group.commands.items():
        if command.hidden:
            continue
        inner = click.Context(command, parent=context, info_name=name)
        if not isinstance(command, click.Group):
            yield _one(command, inner, ())
        elif nested:
            yield from _below(command, inner, nested=True)
        else:
            yield _one(command, inner, tuple(_below(command, inner, nested=True)))
