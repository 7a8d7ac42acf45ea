"""The command `vmckpt`: its nouns, and what an error looks like."""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from importlib import import_module
from inspect import getdoc
from itertools import takewhile
from typing import Any, cast

import click
import typer
from typer.core import TyperGroup
from typer.main import get_command_name
from typer.models import CommandInfo

from vmckpt import __version__
from vmckpt.cli.options.listing import asks_for_json
from vmckpt.cli.output import end_running, print_error
from vmckpt.cli.stop_requests import StopRequestedError
from vmckpt.cli.tree.defaults import default_map
from vmckpt.cli.tree.renamed import renamed
from vmckpt.cli.tree.verbosity import add_verbosity
from vmckpt.errors import CancelledByUserError, StorageError, UsageError, VmckptError
from vmckpt.state.config_files import are_there

EXIT_CODES = """Exit codes: 0 done; 1 failed; 2 bad request; 3 not found; 4 refused, nothing
changed; 5 busy; 6 host or QEMU unreachable; 7 undone; 8 timed out and undone; 9 outcome unknown;
10 VM lost; 11 file not readable or writable; 130 cancelled and undone."""

# One file each. A call imports only its own: imports take most of the start-up time.
COMMANDS = (
    "migrate",
    "check",
    "plan",
    "dirty-rate",
    "fork",
    "top",
    "drain",
    "undrain",
    "serve",
    "notify",
    "config",
)
# `checkpoint --kind internal` by its former name: not in --help.
FORMER = ("snapshot",)
# Started by vmckpt itself: not in --help.
HIDDEN = (
    "link", "job", "replica", "observe", "observe-domain", "lend", "settle-groups", "deliver",
    "domain-guard", "replica-domain",
)  # fmt: skip
NOUNS = (
    "vm",
    "replicate",
    "checkpoint",
    "guard",
    "schedule",
    "device",
    "host",
    "snapshot",
    "store",
    "pki",
    "runs",
    "metrics",
    "lab",
)


# How --help groups them.
SECTIONS = {
    "VMs": ("vm", "checkpoint", "fork", "device"),
    "Migration": ("migrate", "check", "plan", "dirty-rate", "drain", "undrain"),
    "Protection": ("replicate", "guard", "schedule", "serve"),
    "Hosts, stores and settings": ("host", "store", "pki", "config", "lab"),
    "Monitoring": ("top", "metrics", "runs", "notify"),
}


class _Sections(TyperGroup):
    """The root command: its `--help` groups the commands; each gets the common options."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        add_verbosity(self)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Each section in turn, its columns as wide as those of all."""
        widest = max(map(len, self.commands))
        limit = formatter.width - 6 - widest
        for title, names in SECTIONS.items():
            found = [(name, self.get_command(ctx, name)) for name in names]
            rows = [
                (name.ljust(widest), command.get_short_help_str(limit))
                for name, command in found
                if command is not None and not command.hidden
            ]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def command_line(words: Sequence[str], *, to_complete: bool = False) -> typer.Typer:
    """The command line: the command or noun that `words` begin with, else all of them.

    `to_complete`: all whose name the first word may become.
    """
    app = _nothing()
    names = (*COMMANDS, *NOUNS)
    if to_complete:
        chosen = [name for name in names if name.startswith("".join(words[:1]))]
    else:
        chosen = [word for word in words[:1] if word in (*names, *HIDDEN)]
    for name in chosen or names:
        found = _found(name)
        if isinstance(found, typer.Typer):
            app.add_typer(_only(found, words[1:2]), name=name, hidden=name in FORMER)
        else:
            app.command(name)(found)
    return app


def _outline() -> typer.Typer:
    """The commands and nouns as the root's help shows them, without their options, to be fast."""
    app = _nothing()
    for name in (*COMMANDS, *NOUNS):
        found = _found(name)
        if isinstance(found, typer.Typer):
            app.add_typer(typer.Typer(help=found.info.help), name=name, hidden=name in FORMER)
        else:
            app.command(name, help=getdoc(found))(_nothing)
    return app


def _found(name: str) -> typer.Typer | Callable[..., None]:
    """A noun's commands, or the function of a command. Imports its module."""
    word = name.replace("-", "_")
    if name in NOUNS:
        noun: typer.Typer = import_module(f"vmckpt.cli.nouns.{word}").app
        return noun
    folder = "hidden" if name in HIDDEN else "commands"
    command: Callable[..., None] = getattr(import_module(f"vmckpt.cli.{folder}.{word}"), word)
    return command


def _only(noun: typer.Typer, words: Sequence[str]) -> typer.Typer:
    """The noun with the command that comes next alone; without one, with all of its commands."""
    commands = [one for one in noun.registered_commands if _name_of(one) in words]
    if not commands:
        return noun
    alone = copy(noun)
    alone.registered_commands, alone.registered_groups = commands, []
    return alone


def _name_of(command: CommandInfo) -> str:
    return command.name or get_command_name(command.callback.__name__ if command.callback else "")


def _nothing() -> typer.Typer:
    """The root without commands."""
    app = typer.Typer(
        name="vmckpt",
        cls=_Sections,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
        help="Move, protect and checkpoint whole virtual machines on stock QEMU.",
        epilog=EXIT_CODES,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_root)
    return app


def _version(wanted: bool) -> None:
    if wanted:
        print(f"vmckpt {__version__}")
        raise typer.Exit


def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Show the version and exit."
    ),
) -> None:
    pass


def main(*, with_defaults: bool = True) -> int:
    """Run the command line; the exit code. Every error ends as what / why / what to do.

    What vmckpt starts itself has no defaults: a malformed file must not stop a recovery.
    """
    # Guests' memory, disks, consoles and monitors are private to this user.
    os.umask(0o077)
    try:
        _require_text(sys.argv[1:])
        words = renamed(sys.argv[1:])
        partial = _to_complete()
        has_defaults = with_defaults and words[:1] != [] and words[0] in (*COMMANDS, *NOUNS)
        has_defaults = has_defaults and are_there(words[0])
        if partial is not None:
            app = command_line(partial, to_complete=True)
        elif {*COMMANDS, *NOUNS, *HIDDEN}.isdisjoint(words):
            app = _outline()
        else:
            # A file of defaults may name every command of a noun.
            app = command_line(words[:1] if has_defaults else words)
        # `get_group` would be without completion.
        command = cast("click.Group", typer.main.get_command(app))
        if partial is not None:
            from vmckpt.cli.tree.complete import add_names

            add_names(command)
        if not {"-h", "--help"}.isdisjoint(words):
            from vmckpt.cli.tree.examples import add_examples

            add_examples(command)
        found = default_map(command, (*COMMANDS, *NOUNS)) if has_defaults else None
        code = command(words, "vmckpt", standalone_mode=False, default_map=found)
    except Exception as exc:  # noqa: BLE001 - any error is reported
        code = report(exc)
    finally:
        end_running()
    return code if isinstance(code, int) else 0


def _to_complete() -> list[str] | None:
    """What the shell asks to complete, without `vmckpt`; None: it does not ask."""
    if "_VMCKPT_COMPLETE" not in os.environ:
        return None
    # Bash passes them in the first, zsh and fish in the other.
    line = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS") or ""
    return line.split()[1:]


def _require_text(words: Sequence[str]) -> None:
    """Raises UsageError: only valid UTF-8 can be recorded. A guard's command may be other bytes."""
    ours = takewhile(lambda word: word != "--", words) if words[:1] == ["guard"] else words
    for word in ours:
        try:
            word.encode()
        except UnicodeEncodeError as exc:
            raise UsageError(
                f"'{word}' is not text", why="it is not UTF-8", remedy="write it in UTF-8"
            ) from exc


def report(error: Exception | StopRequestedError) -> int:
    """Tell what a command ended with; the exit code."""
    # What follows `--` is another program's command line.
    as_json = asks_for_json(list(takewhile(lambda word: word != "--", sys.argv)))
    match error:
        case VmckptError():
            return print_error(error, as_json=as_json)
        case click.exceptions.Abort() | StopRequestedError():
            cancelled = CancelledByUserError(
                "cancelled",
                why="asked to stop",
                remedy="operations that had begun may have taken effect: see `vmckpt vm show`",
            )
            return print_error(cancelled, as_json=as_json)
        case click.ClickException():
            usage = UsageError(
                error.format_message(), why="see above", remedy="add --help to the command"
            )
            error.show()
            return print_error(usage, as_json=True) if as_json else error.exit_code
        case BrokenPipeError():
            # The reader of the output is gone; there is nothing left to write to.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        case OSError():
            storage = StorageError(
                f"cannot use {error.filename or 'a file'}",
                why=error.strerror or str(error),
                remedy="check that it exists, its permissions, and free space",
            )
            return print_error(storage, as_json=as_json)
        case _:  # anything else is a bug of ours, reported as one
            return print_error(_bug(error), as_json=as_json)


def _bug(exc: Exception) -> VmckptError:
    """The error for an unexpected exception; its traceback goes to a file, if one can be made."""
    import tempfile
    import traceback

    kept = "what it says"
    with suppress(OSError):  # the disk is full
        with tempfile.NamedTemporaryFile(
            "w", prefix="vmckpt-bug-", suffix=".txt", delete=False
        ) as file:
            traceback.print_exception(exc, file=file)
        kept = file.name
    return VmckptError(
        "vmckpt has a bug",
        why=f"{type(exc).__name__}: {exc}",
        remedy=f"report it with {kept}; `vmckpt vm list` shows the state of the VMs",
    )
