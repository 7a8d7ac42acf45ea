"""Names of VMs and checkpoints that lists have shown, kept for completion.

It does not import typer: a plain `vmckpt vm list` does without (`cli/entry.py`).
"""

import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from vmckpt.errors import VmckptError
from vmckpt.hosts.inventory.directories import state_dir

VMS, CHECKPOINTS = "vms", "checkpoints"
# A name has at most 40 characters: more names than this are no help.
_MOST_BYTES = 1 << 20
# Others choose names, and a shell inserts them into its line, or evaluates them (zsh), unchanged.
PLAIN = re.compile(r"\w[\w.:@+=,/-]*")


def remember(kind: str, names: Iterable[str]) -> None:
    """Keep names for completion. That they cannot be kept stops no command."""
    from vmckpt.state.durable import write_durably

    plain = list(filter(PLAIN.fullmatch, dict.fromkeys(names)))
    with suppress(OSError, VmckptError):
        # Most lists show the same names as the one before: then nothing waits for the disk.
        if state_dir().is_dir() and plain != remembered(kind):
            write_durably(_path(kind), "".join(f"{name}\n" for name in plain))


def remember_new(kind: str, name: str) -> None:
    """As `remember`, of one more."""
    with suppress(OSError, VmckptError):
        remember(kind, [name, *remembered(kind)])


def remembered(kind: str) -> list[str]:
    """The names that are kept, which another program may have written. Raises OSError."""
    with suppress(FileNotFoundError), _path(kind).open(encoding="utf-8", errors="replace") as file:
        return file.read(_MOST_BYTES).splitlines()
    return []


def _path(kind: str) -> Path:
    return state_dir() / "completion" / kind
