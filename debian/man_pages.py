"""Writes vmckpt's man pages, made from the command line itself.

    python3 debian/man_pages.py FOLDER

One page for vmckpt and one for each of its commands; subcommands are sections of that page.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import click
import typer.main

from vmckpt import __version__
from vmckpt.cli.examples import examples
from vmckpt.cli.main import SECTIONS, command_line
from vmckpt.replicate.fencing import by_kill


def pages() -> dict[str, str]:
    """The text of each page, by its name without the section, which is 1."""
    root = typer.main.get_group(command_line([]))
    context = click.Context(root, info_name="vmckpt")
    made = {"vmckpt": _root(root, context), "vmckpt-fence-by-kill": _agent()}
    for name in (name for names in SECTIONS.values() for name in names):
        command = root.commands[name]
        inner = click.Context(command, parent=context, info_name=name)
        made[f"vmckpt-{name}"] = _page(f"vmckpt-{name}", command, inner)
    return made


def _root(root: click.Group, context: click.Context) -> str:
    lines = [*_begin("vmckpt", root, context), *_options(root, context)]
    for title, names in SECTIONS.items():
        lines.append(f".SH {title.upper()}")
        for name in names:
            summary = root.commands[name].get_short_help_str(limit=200)
            lines += [".TP", rf"\fBvmckpt\-{_text(name)}\fR(1)", _text(summary)]
    title, _, codes = (root.epilog or "").partition(": ")
    lines.append(f".SH {title.upper()}")
    for entry in " ".join(codes.split()).rstrip(".").split("; "):
        code, _, meaning = entry.partition(" ")
        lines += [".TP", rf"\fB{code}\fR", _text(meaning)]
    return "\n".join(lines) + "\n"


def _page(name: str, command: click.Command, context: click.Context) -> str:
    lines = [*_begin(name, command, context), *_options(command, context)]
    inner = list(_leaves(command, context))
    if inner:
        lines.append(".SH COMMANDS")
    for one, its_context in inner:
        lines += [f".SS {_usage(one, its_context)}", *_prose(one.help), *_list(one, its_context)]
        lines += _examples(its_context)
    lines += _examples(context)
    return "\n".join([*lines, ".SH SEE ALSO", r"\fBvmckpt\fR(1)"]) + "\n"


def _agent() -> str:
    """The page of the fencing agent, which has no options: its module says how it is used."""
    first, *paragraphs = (by_kill.__doc__ or "").strip().split("\n\n")
    name, _, summary = first.partition(": ")
    lines = [*_heading(name, summary), ".SH SYNOPSIS", _text(paragraphs[0].strip())]
    lines += [".SH DESCRIPTION", *_prose("\n\n".join(paragraphs[1:]))]
    return "\n".join([*lines, ".SH SEE ALSO", r"\fBvmckpt\-replicate\fR(1)"]) + "\n"


def _begin(name: str, command: click.Command, context: click.Context) -> list[str]:
    summary = command.get_short_help_str(limit=200)
    usage = [".SH SYNOPSIS", _usage(command, context)]
    return [*_heading(name, summary), *usage, ".SH DESCRIPTION", *_prose(command.help)]


def _heading(name: str, summary: str) -> list[str]:
    title = f'.TH "{_text(name.upper())}" 1 "" "vmckpt {__version__}" "vmckpt"'
    return [title, ".SH NAME", rf"{_text(name)} \- {_text(summary.rstrip('.'))}"]


def _usage(command: click.Command, context: click.Context) -> str:
    pieces = _text(" ".join(command.collect_usage_pieces(context)))
    return rf"\fB{_text(context.command_path)}\fR {pieces}"


def _options(command: click.Command, context: click.Context) -> list[str]:
    found = _list(command, context)
    return [".SH OPTIONS", *found] if found else []


def _list(command: click.Command, context: click.Context) -> list[str]:
    lines = []
    for param in command.params:  # without --help, which each command has
        record = param.get_help_record(context)  # None for hidden options
        if record is not None:
            term, meaning = record
            lines += [".TP", rf"\fB{_text(term)}\fR", _text(" ".join(meaning.split()))]
    return lines


def _examples(context: click.Context) -> list[str]:
    found = examples().get(context.command_path.partition(" ")[2], [])
    return [".PP", "Examples:", ".nf", *map(_text, found), ".fi"] if found else []


def _prose(text: str | None) -> list[str]:
    paragraphs = (text or "").strip().split("\n\n")
    return [line for one in paragraphs for line in (".PP", _text(" ".join(one.split())))]


def _leaves(
    command: click.Command, context: click.Context
) -> Iterator[tuple[click.Command, click.Context]]:
    """The commands below a group, including those of nested groups."""
    if not isinstance(command, click.Group):
        return
    for name, one in command.commands.items():
        if one.hidden:
            continue
        inner = click.Context(one, parent=context, info_name=name)
        if isinstance(one, click.Group):
            yield from _leaves(one, inner)
        else:
            yield one, inner


def _text(words: str) -> str:
    """`words` as roff takes them: a hyphen is a real one, and no line begins like a request."""
    escaped = words.replace("\\", r"\e").replace("-", r"\-")
    return rf"\&{escaped}" if escaped.startswith((".", "'")) else escaped


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for page, text in pages().items():
        (folder / f"{page}.1").write_text(text)
