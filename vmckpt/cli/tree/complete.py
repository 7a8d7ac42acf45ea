"""Completion of names: VMs, hosts, checkpoints, runs and schedules, without asking any host.

VMs of hosts elsewhere, and checkpoints, are those that `vm list` and `checkpoint list` showed last.
"""

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from vmckpt.errors import VmckptError
from vmckpt.hosts.inventory.directories import runs_dir, state_dir

VMS, CHECKPOINTS = "vms", "checkpoints"
# A name has at most 40 characters: more names than this are no help.
_MOST_BYTES = 1 << 20
# Others choose names, and a shell inserts them into its line, or evaluates them (zsh), unchanged.
_PLAIN = re.compile(r"\w[\w.:@+=,/-]*")


def remember(kind: str, names: Iterable[str]) -> None:
    """Keep names for completion. That they cannot be kept stops no command."""
    from vmckpt.state.durable import write_durably

    plain = filter(_PLAIN.fullmatch, dict.fromkeys(names))
    with suppress(OSError, VmckptError):
        if state_dir().is_dir():
            write_durably(_path(kind), "".join(f"{name}\n" for name in plain))


def remember_new(kind: str, name: str) -> None:
    """As `remember`, of one more."""
    with suppress(OSError, VmckptError):
        remember(kind, [name, *_remembered(kind)])


def add_names(root: click.Group) -> None:
    """Have every argument and option below `root` that takes a name complete it."""
    for command in root.commands.values():
        if isinstance(command, click.Group):
            add_names(command)
            continue
        for one in command.params:
            # As help shows it: [VM], HOST..., NAME.
            shown = one.make_metavar(click.Context(command)).strip("[].")
            names = _schedules if (shown, root.name) == ("NAME", "schedule") else _NAMES.get(shown)
            if names is not None:
                setattr(one, "shell_complete", _completing(names))  # noqa: B010 - it is a method


def _completing(names: Callable[[], Iterable[str]]) -> Callable[..., list[CompletionItem]]:
    def complete(_context: click.Context, incomplete: str) -> list[CompletionItem]:
        with suppress(OSError, VmckptError):
            found = {name for name in names() if name.startswith(incomplete)}
            # A file that another program wrote may have any names.
            return [CompletionItem(name) for name in sorted(filter(_PLAIN.fullmatch, found))]
        return []

    return complete


def _path(kind: str) -> Path:
    return state_dir() / "completion" / kind


def _remembered(kind: str) -> list[str]:
    with suppress(FileNotFoundError), _path(kind).open(encoding="utf-8", errors="replace") as file:
        return file.read(_MOST_BYTES).splitlines()
    return []


def _vms() -> list[str]:
    here = [one.name for one in (state_dir() / "vms").glob("[!.]*") if one.is_dir()]
    return [*here, *_remembered(VMS)]


def _stems(directory: Path) -> list[str]:
    return [path.stem for path in directory.glob("[!.]*.json")]


def _schedules() -> list[str]:
    return _stems(state_dir() / "schedules")


_NAMES: dict[str, Callable[[], Iterable[str]]] = {
    "VM": _vms,
    "HOST": lambda: ["local", *_stems(state_dir() / "hosts")],
    "CHECKPOINT|VM": lambda: [*_vms(), *_remembered(CHECKPOINTS)],
    "CHECKPOINT": lambda: _remembered(CHECKPOINTS),
    "RUN": lambda: _stems(runs_dir()),
}
