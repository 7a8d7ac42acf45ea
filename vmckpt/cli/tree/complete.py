"""Completion of names: VMs, hosts, checkpoints, runs and schedules, without asking any host.

VMs of hosts elsewhere, and checkpoints, are those that `vm list` and `checkpoint list` showed last.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from vmckpt.cli.tree.names import CHECKPOINTS, PLAIN, VMS, remembered
from vmckpt.errors import VmckptError
from vmckpt.hosts.inventory.directories import runs_dir, state_dir


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
            return [CompletionItem(name) for name in sorted(filter(PLAIN.fullmatch, found))]
        return []

    return complete


def _vms() -> list[str]:
    here = [one.name for one in (state_dir() / "vms").glob("[!.]*") if one.is_dir()]
    return [*here, *remembered(VMS)]


def _stems(directory: Path) -> list[str]:
    return [path.stem for path in directory.glob("[!.]*.json")]


def _schedules() -> list[str]:
    return _stems(state_dir() / "schedules")


_NAMES: dict[str, Callable[[], Iterable[str]]] = {
    "VM": _vms,
    "HOST": lambda: ["local", *_stems(state_dir() / "hosts")],
    "CHECKPOINT|VM": lambda: [*_vms(), *remembered(CHECKPOINTS)],
    "CHECKPOINT": lambda: remembered(CHECKPOINTS),
    "RUN": lambda: _stems(runs_dir()),
}
