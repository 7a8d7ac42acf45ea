"""Defaults of options: from /etc/vmckpt/config.toml, the user's config.toml, and the environment.

    [migrate]
    bandwidth = "500MB/s"

    [checkpoint.create]
    store = "s3://backups/vms"

Each table is a command, each key one of its options. $VMCKPT_CHECKPOINT_CREATE_STORE does the same.
The command line comes first, then the environment, the user's file, and /etc. A command
without defaults costs two checks whether a file exists.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vmckpt.state.config_files import files, variable

if TYPE_CHECKING:
    import click

_MOST_BYTES = 1 << 20
# Options without defaults. The output format depends on the program that reads it. That a host is
# dead, or that a VM of a silent host should run on another one, must be said each time: otherwise
# two guests could run. So must which of a VM's two homes is meant.
_DEAD = frozenset({"primary-is-dead", "standby-is-dead", "silent-hosts-are-off"})
_NEVER = frozenset({"json", "output", "columns", "help"}) | _DEAD
_NEVER_OF = frozenset({("restore", "host"), ("stop", "host"), ("rm", "host")})


class Setting(NamedTuple):
    """The default of one option, and the file or variable that it is from."""

    command: tuple[str, ...]
    option: str
    value: Any
    origin: str


def settings(root: "click.Group", known: Sequence[str]) -> list[Setting]:
    """Those of the commands in `root`, in order: a later one replaces an earlier one.

    `known`: all first words there are. Raises UsageError: a file that is malformed, names what no
    command has, or that another user may write.
    """
    found = list[Setting]()
    # Not an error if this user may not read it: HOME may be another user's.
    for path in filter(os.path.exists, files()):
        for word, table in _read(path).items():
            if word not in known:
                raise _refused(path, f"there is no command '{word}'", "see: vmckpt --help")
            if (command := root.commands.get(word)) is not None:
                found += _of_table(command, (word,), table, path)
    return found + [one for leaf in _leaves(root, ()) for one in _of_environment(*leaf)]


def default_map(root: "click.Group", known: Sequence[str]) -> dict[str, Any]:
    """As click takes them: nested by command, each by its parameter's name. Raises UsageError."""
    found: dict[str, Any] = {}
    leaves = dict(_leaves(root, ()))
    for one in settings(root, known):
        inner = found
        for word in one.command:
            inner = inner.setdefault(word, {})
        inner[_options(leaves[one.command])[one.option].name or ""] = one.value
    return found


def _read(path: Path) -> dict[str, Any]:
    from vmckpt.foreign import parse_toml

    try:
        with path.open("rb") as file:
            about = os.fstat(file.fileno())
            if about.st_uid not in (0, os.geteuid()) or about.st_mode & 0o022:
                raise _refused(path, "another user may write it", f"chown and chmod go-w {path}")
            if about.st_size > _MOST_BYTES:
                raise _refused(path, "it has more than 1 MiB", "make it shorter")
            return parse_toml(file.read(_MOST_BYTES).decode())
    except FileNotFoundError:
        return {}
    except ValueError as exc:  # includes MalformedError and UnicodeDecodeError
        raise _refused(path, str(exc), "correct the file, or remove it") from exc


def _of_table(
    command: "click.Command", words: tuple[str, ...], table: object, path: Path
) -> Iterator[Setting]:
    import click

    if not isinstance(table, dict):
        raise _refused(path, f"`{' '.join(words)}` is not a table", f"write [{'.'.join(words)}]")
    if isinstance(command, click.Group):
        for name, inner in table.items():
            if name not in command.commands:
                why = f"there is no command '{' '.join((*words, name))}'"
                raise _refused(path, why, f"see: vmckpt {' '.join(words)} --help")
            yield from _of_table(command.commands[name], (*words, name), inner, path)
        return
    options = _options(command)
    for name, value in table.items():
        help_text = f"see: vmckpt {' '.join(words)} --help"
        if name not in options:
            raise _refused(path, f"`{' '.join(words)}` has no option --{name} to set", help_text)
        if isinstance(value, list) is not options[name].multiple or isinstance(value, dict):
            kind = "a list" if options[name].multiple else "one value"
            raise _refused(path, f"{name} of {' '.join(words)} is not {kind}", help_text)
        yield Setting(words, name, value, str(path))


def _of_environment(words: tuple[str, ...], command: "click.Command") -> Iterator[Setting]:
    import shlex

    for name, option in _options(command).items():
        name_there = variable((*words, name))
        if value := os.environ.get(name_there):
            try:
                given = shlex.split(value) if option.multiple else value
            except ValueError as exc:
                raise _refused(f"${name_there}", str(exc), "quote it as for a shell") from exc
            yield Setting(words, name, given, f"${name_there}")


def _leaves(
    group: "click.Group", words: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], "click.Command"]]:
    import click

    for name, one in group.commands.items():
        if isinstance(one, click.Group):
            yield from _leaves(one, (*words, name))
        elif not one.hidden:
            yield (*words, name), one


def _options(command: "click.Command") -> Mapping[str, "click.Option"]:
    """Those that may have a default here, by their long names without the dashes."""
    import click

    return {
        name.removeprefix("--"): one
        for one in command.params
        if isinstance(one, click.Option) and not one.hidden
        for name in one.opts
        if name.startswith("--") and _may_be_set(command, name.removeprefix("--"))
    }


def _may_be_set(command: "click.Command", option: str) -> bool:
    return option not in _NEVER and (command.name, option) not in _NEVER_OF


def _refused(origin: Path | str, why: str, remedy: str) -> Exception:
    from vmckpt.errors import UsageError

    return UsageError(f"{origin} cannot be used", why=why, remedy=remedy)
