"""Sources of a store's key: a file, a command's output, or ssh-agent.

The key is never on a command line. A key made by vmckpt is random enough to be used directly;
anything else is treated as a passphrase (`wrapping.py`).
"""

import os
import secrets
import shlex
import subprocess
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from vmckpt.errors import NotFoundError, RefusedError, StorageError, UsageError
from vmckpt.state.durable import sync_directory
from vmckpt.store.files.config import SECRET_BYTES

KEY_FILE, KEY_COMMAND = "VMCKPT_STORE_KEY_FILE", "VMCKPT_STORE_KEY_COMMAND"
_MADE_BY_US = b"vmckpt-key-1:"
_COMMAND_TIMEOUT_S = 60.0


class KeyHolder(StrEnum):
    """What kind of source has the key."""

    FILE = "file"
    COMMAND = "command"
    AGENT = "agent"


@dataclass(frozen=True, slots=True)
class KeySource:
    """The source of the key: a file's path, a command, or the fingerprint of an agent's key.

    For the agent an empty `where` is its first key.
    """

    keeper: KeyHolder
    where: str = ""


def from_environment() -> KeySource | None:
    """The source in VMCKPT_STORE_KEY_FILE or VMCKPT_STORE_KEY_COMMAND."""
    for variable, keeper in ((KEY_FILE, KeyHolder.FILE), (KEY_COMMAND, KeyHolder.COMMAND)):
        if os.environ.get(variable):
            return KeySource(keeper, os.environ[variable])
    return None


def make_key_file(path: Path) -> None:
    """Write a new key to a new file with mode 0600. Raises StorageError."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(_MADE_BY_US + secrets.token_hex(SECRET_BYTES).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        sync_directory(
            path.absolute().parent
        )  # else a power cut may lose the key, and all it opens
    except OSError as exc:
        raise StorageError(
            f"cannot make the key file {path}",
            why=exc.strerror or str(exc),
            remedy="choose a file that can be written",
        ) from exc


def is_made_by_us(material: bytes) -> bool:
    """Whether `make_key_file` made this key; otherwise it is a passphrase."""
    return material.startswith(_MADE_BY_US)


def material_of(source: KeySource) -> bytes:
    """A file's content or a command's output, without the final newline. Not for the agent.

    Raises UsageError, NotFoundError, RefusedError, StorageError.
    """
    read = _from_file if source.keeper is KeyHolder.FILE else _from_command
    material = read(source.where).rstrip(b"\r\n")
    if not material:
        raise UsageError(
            f"the key of the {source.keeper} is empty",
            why=f"{source.where} gives nothing",
            remedy="give a key, or a passphrase",
        )
    return material


def _from_file(where: str) -> bytes:
    path = Path(where)
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & 0o077:
                raise RefusedError(
                    f"the key file {path} is not used",
                    why="others than its owner may read it",
                    remedy=f"chmod 600 {path}",
                )
            return file.read()
    except FileNotFoundError as exc:
        raise NotFoundError(
            f"there is no key file {path}", why="nothing is there", remedy="check the path"
        ) from exc
    except OSError as exc:
        raise StorageError(
            f"cannot read the key file {path}", why=exc.strerror or str(exc), remedy="check it"
        ) from exc


def _from_command(where: str) -> bytes:
    try:
        words = shlex.split(where)
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_COMMAND_TIMEOUT_S,
            check=False,
        )
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired) as exc:
        raise RefusedError(
            "the key command does not run", why=str(exc), remedy=f"try it: {where}"
        ) from exc
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise RefusedError(
            "the key command failed",
            why=last or f"it ended with {done.returncode}",
            remedy=f"try it: {where}",
        )
    return done.stdout
