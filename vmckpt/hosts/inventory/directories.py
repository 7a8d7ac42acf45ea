"""Where this user's state is. It imports little: completion of a command line waits for it."""

import os
from contextlib import suppress
from pathlib import Path

from vmckpt.errors import UsageError
from vmckpt.hosts.ownership import require_own


def state_dir() -> Path:
    """This user's state: $VMCKPT_STATE_DIR, else /var/lib/vmckpt for root, XDG's for others.

    Raises RefusedError if another user may write there, UsageError if it is undefined.
    """
    if given := os.environ.get("VMCKPT_STATE_DIR"):
        path = Path(given).absolute()
    elif os.geteuid() == 0:
        path = Path("/var/lib/vmckpt")
    else:
        given = os.environ.get("XDG_STATE_HOME", "")
        # A relative one does not count, by XDG's base directory specification.
        path = (Path(given) if given.startswith("/") else _home() / ".local/state") / "vmckpt"
    if path not in _own:
        require_own(path)
        if path.exists():
            _own.add(path)
    return path


def _home() -> Path:
    why = f"uid {os.geteuid()} has no account here, and HOME is not set"
    with suppress(RuntimeError):
        if (home := Path.home()).is_absolute():
            return home
        why = f"HOME is '{home}', not an absolute path"
    raise UsageError(
        "this user has no state directory", why=why, remedy="name a directory: VMCKPT_STATE_DIR"
    )


# State directories known to belong to this user alone; a missing one is checked again later.
_own = set[Path]()


def runs_dir() -> Path:
    """The directory of run records of this machine's commands."""
    return state_dir() / "runs"
