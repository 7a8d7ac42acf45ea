"""Writes vmckpt's man pages, made from the command line itself.

    python3 debian/man_pages.py FOLDER

One page for vmckpt and one for each of its commands; subcommands are sections of that page.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

from vmckpt import __version__
from vmckpt.cli.tree.described import CommandLine, Described, described
from vmckpt.replicate.fencing import by_kill


def pages() -> dict[str, str]:
    """The text of each page, by its name without the section, which is 1."""
    line = described()
    made = {"vmckpt": _root(line), "vmckpt-fence-by-kill": _agent()}
    for command in (one for section in line.sections.values() for one in section):
        made[_name(command)] = _page(command)
    return made


def _root(line: CommandLine) -> str:
    lines = [*_begin(line.root), *_options(line.root)]
    for title, commands in line.sections.items():
        lines.append(f".SH {title.upper()}")
        for one in commands:
            lines += [".TP", rf"\fB{_text(_name(one))}\fR(1)", _text(one.summary)]
    lines.append(".SH EXIT CODES")
    for code, meaning in line.exit_codes:
        lines += [".TP", rf"\fB{code}\fR", _text(meaning)]
    return "\n".join(lines) + "\n"


def _page(command: Described) -> str:
    lines = [*_begin(command), *_options(command)]
    if command.commands:
        lines.append(".SH COMMANDS")
    for one in command.commands:
        lines += [f".SS {_usage(one)}", *_prose(one.paragraphs), *_list(one), *_examples(one)]
    lines += _examples(command)
    return "\n".join([*lines, ".SH SEE ALSO", r"\fBvmckpt\fR(1)"]) + "\n"


def _agent() -> str:
    """The page of the fencing agent, which has no options: its module says how it is used."""
    first, *paragraphs = (by_kill.__doc__ or "").strip().split("\n\n")
    name, _, summary = first.partition(": ")
    lines = [*_heading(name, summary), ".SH SYNOPSIS", _text(paragraphs[0].strip())]
    lines += [".SH DESCRIPTION", *_prose(" ".join(one.split()) for one in paragraphs[1:])]
    return "\n".join([*lines, ".SH SEE ALSO", r"\fBvmckpt\-replicate\fR(1)"]) + "\n"


def _name(command: Described) -> str:
    return command.words.replace(" ", "-")


def _begin(command: Described) -> list[str]:
    usage = [".SH SYNOPSIS", _usage(command), ".SH DESCRIPTION", *_prose(command.paragraphs)]
    return [*_heading(_name(command), command.summary), *usage]


def _heading(name: str, summary: str) -> list[str]:
    title = f'.TH "{_text(name.upper())}" 1 "" "vmckpt {__version__}" "vmckpt"'
    return [title, ".SH NAME", rf"{_text(name)} \- {_text(summary.rstrip('.'))}"]


def _usage(command: Described) -> str:
    return rf"\fB{_text(command.words)}\fR {_text(command.usage)}"


def _options(command: Described) -> list[str]:
    found = _list(command)
    return [".SH OPTIONS", *found] if found else []


def _list(command: Described) -> list[str]:
    return [
        line
        for term, meaning in command.options
        for line in (".TP", rf"\fB{_text(term)}\fR", _text(meaning))
    ]


def _examples(command: Described) -> list[str]:
    found = command.examples
    return [".PP", "Examples:", ".nf", *map(_text, found), ".fi"] if found else []


def _prose(paragraphs: Iterable[str]) -> list[str]:
    return [line for one in paragraphs for line in (".PP", _text(one))]


def _text(words: str) -> str:
    """`words` as roff takes them: a hyphen is a real one, and no line begins like a request."""
    escaped = words.replace("\\", r"\e").replace("-", r"\-")
    return rf"\&{escaped}" if escaped.startswith((".", "'")) else escaped


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for page, text in pages().items():
        (folder / f"{page}.1").write_text(text)
