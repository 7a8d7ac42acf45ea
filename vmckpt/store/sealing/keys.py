"""Whence a store's secret: in the clear in its config, or wrapped with a key that others keep.

A key is a file's content, a command's output, or what ssh-agent signs; it is never on a command
line. A key that vmckpt made is random enough to be used as it is (HKDF); anything else is taken for
a passphrase (scrypt).
"""

import hashlib
import os
import secrets
import shlex
import subprocess
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from vmckpt.errors import NotFoundError, RefusedError, StorageError, UsageError
from vmckpt.store.config import SECRET_BYTES
from vmckpt.store.errors import damaged
from vmckpt.store.sealing import agent

KEY_FILE, KEY_COMMAND = "VMCKPT_STORE_KEY_FILE", "VMCKPT_STORE_KEY_COMMAND"
_MADE_BY_US = b"vmckpt-key-1:"
# 64 MiB and a quarter of a second: RFC 7914's numbers for interactive use, doubled twice.
_SCRYPT = {"n": 1 << 16, "r": 8, "p": 1}
_SCRYPT_MOST_BYTES = 256 << 20
_SALT_BYTES = 16
_NONCE_BYTES = 12
_COMMAND_TIMEOUT_S = 60.0
_WHAT = b"vmckpt store secret"


class Keeper(StrEnum):
    """Who has the key."""

    FILE = "file"
    COMMAND = "command"
    AGENT = "agent"


@dataclass(frozen=True, slots=True)
class KeySource:
    """Where the key is had: a file's path, a command, or an agent's key by its fingerprint.

    For the agent an empty `where` is its first key.
    """

    keeper: Keeper
    where: str = ""


def from_environment() -> KeySource | None:
    """What VMCKPT_STORE_KEY_FILE or VMCKPT_STORE_KEY_COMMAND say."""
    for variable, keeper in ((KEY_FILE, Keeper.FILE), (KEY_COMMAND, Keeper.COMMAND)):
        if os.environ.get(variable):
            return KeySource(keeper, os.environ[variable])
    return None


def make_key_file(path: Path) -> None:
    """A new key in a new file, for its owner alone. Raises StorageError."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(_MADE_BY_US + secrets.token_hex(SECRET_BYTES).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as exc:
        raise StorageError(
            f"cannot make the key file {path}",
            why=exc.strerror or str(exc),
            remedy="choose a file that can be written",
        ) from exc


def clear(secret: bytes) -> dict[str, Any]:
    """What the config of a store says that is not encrypted."""
    return {"kind": "clear", "secret": secret.hex()}


def wrap(secret: bytes, source: KeySource) -> dict[str, Any]:
    """What the config of an encrypted store says. Raises VmckptError when there is no key."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    salt, nonce = os.urandom(_SALT_BYTES), os.urandom(_NONCE_BYTES)
    words: dict[str, Any] = {"salt": salt.hex(), "nonce": nonce.hex()}
    if source.keeper is Keeper.AGENT:
        words |= {"kind": "agent", "key": source.where or agent.first_key()}
    else:
        made = _material(source).startswith(_MADE_BY_US)
        words |= {"kind": "key"} if made else {"kind": "passphrase", "scrypt": _SCRYPT}
    box = AESGCM(_wrapping_key(words, source)).encrypt(nonce, secret, _WHAT)
    return words | {"secret": box.hex()}


def unwrap(words: dict[str, Any], source: KeySource | None) -> tuple[bytes, bool]:
    """A store's secret, and whether it is encrypted.

    Raises RefusedError (no key, or a wrong one), NotFoundError, StorageError, DamagedError.
    """
    try:
        box, kind = bytes.fromhex(words["secret"]), words["kind"]
        if kind == "clear":
            return box, False
        nonce = bytes.fromhex(words["nonce"])
    except (KeyError, ValueError, TypeError) as exc:
        raise damaged("the store's config is damaged", f"its key: {exc}") from exc
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    if kind == "agent":
        source = KeySource(Keeper.AGENT, words["key"])
    source = source or from_environment()
    if source is None:
        raise RefusedError(
            "the store is encrypted",
            why="no key was given",
            remedy="add --key-file or --key-command (--target-key-... for a target), or set "
            f"{KEY_FILE} or {KEY_COMMAND}",
        )
    try:
        return AESGCM(_wrapping_key(words, source)).decrypt(nonce, box, _WHAT), True
    except InvalidTag as exc:
        raise RefusedError(
            "the key does not open the store",
            why=f"it is not the one that the store was made with ({source.keeper})",
            remedy="give the right one; without it nothing in the store can be read",
        ) from exc


def _wrapping_key(words: dict[str, Any], source: KeySource) -> bytes:
    salt = bytes.fromhex(words["salt"])
    if words["kind"] == "agent":
        return _hkdf(agent.signature(words["key"], _WHAT + salt), salt)
    material = _material(source)
    if words["kind"] == "key":
        return _hkdf(material, salt)
    cost = words["scrypt"]
    return hashlib.scrypt(material, salt=salt, maxmem=_SCRYPT_MOST_BYTES, dklen=32, **cost)


def _hkdf(material: bytes, salt: bytes) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(algorithm=SHA256(), length=32, salt=salt, info=_WHAT).derive(material)


def _material(source: KeySource) -> bytes:
    read = _from_file if source.keeper is Keeper.FILE else _from_command
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
