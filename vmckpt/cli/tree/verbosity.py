"""-q and -v, which every command has."""

from collections.abc import Iterator

import click

from vmckpt.cli.loop import warn
from vmckpt.errors import UsageError
from vmckpt.events.trace import Detail, trace, untrace
from vmckpt.ui.verbosity import Verbosity, is_plain, is_quiet, set_verbosity


def add_verbosity(root: click.Group) -> None:
    """Give `root` and every command below it these options; until it is run, none is given."""
    set_verbosity(Verbosity.USUAL)
    untrace()
    root.params += [_quiet(), _verbose()]
    for command in _leaves(root):
        command.params += [_quiet(), _verbose()]


def _leaves(group: click.Group) -> Iterator[click.Command]:
    for command in group.commands.values():
        if isinstance(command, click.Group):
            yield from _leaves(command)
        else:
            yield command


def _quiet() -> click.Option:
    words = "No progress, no notes: only results, warnings and errors."
    return click.Option(
        ["-q", "--quiet"], is_flag=True, expose_value=False, callback=_be_quiet, help=words
    )


def _verbose() -> click.Option:
    words = "Show commands to QEMU, libvirt and hosts; -vv: arguments too."
    return click.Option(
        ["-v", "--verbose"], count=True, expose_value=False, callback=_be_verbose, help=words
    )


def _be_quiet(_context: click.Context, _option: click.Parameter, wanted: bool) -> None:
    if wanted and is_plain():
        raise _both()
    if wanted:
        set_verbosity(Verbosity.QUIET)


def _be_verbose(_context: click.Context, _option: click.Parameter, count: int) -> None:
    if count and is_quiet():
        raise _both()
    if count:
        set_verbosity(Verbosity.PLAIN)
        trace(Detail(min(count, Detail.ARGUMENTS)), warn)


def _both() -> UsageError:
    return UsageError(
        "--quiet and --verbose are both given",
        why="one shows less, the other more",
        remedy="leave one of them out",
    )
