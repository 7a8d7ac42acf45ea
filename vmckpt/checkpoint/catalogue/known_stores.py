"""Remember the stores that this operator has used, to refuse one that was replaced.

A person who can write to a store's location can replace its file `store`: by that of an unencrypted
store, of another one, or an older one that a removed key still opens. For each location
`stores/ID.json` in the operator's state directory records which store was there, whether it was
encrypted, and how often its keys had changed. A store that differs is refused until `vmckpt store
accept`.
"""

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vmckpt.errors import RefusedError, StorageError
from vmckpt.hosts.inventory.directories import state_dir
from vmckpt.state.documents import Documents, Schema
from vmckpt.store.files.config import Config
from vmckpt.store.open import described

DIRECTORY = "stores"
_LOCK = "lock"


@dataclass(frozen=True, slots=True)
class KnownStore:
    """What a store was. `accepted`: the operator has confirmed this state."""

    location: str
    id: str
    encrypted: bool
    revision: int
    accepted: bool = False


_SCHEMA = Schema(
    KnownStore,
    "it says what the store at a location was; `vmckpt store info` shows what it is, and "
    "`vmckpt store accept` rewrites the file",
)


def known(location: str) -> KnownStore | None:
    """What was at a location when it was last used; None: never used. Raises StorageError."""
    return _stores().load(_name(location))


def require_unchanged(location: str, label: str, config: Config) -> KnownStore:
    """Compare a store with what was at its location before, and remember what is new.

    `label` is the location as the operator writes it. Raises RefusedError if another store is
    there, if it is no longer encrypted, or if its keys are older than before; StorageError.
    """
    with _alone():
        before = require_as_before(location, label, config)
        if before is None:
            return remember(location, config, accepted=False)
        if config.revision > before.revision:
            return remember(location, config, accepted=before.accepted)
        return before


def require_as_before(location: str, label: str, config: Config) -> KnownStore | None:
    """Compare without remembering: a config is trusted only once its key has opened it.

    Returns what was there before; None: nothing. Raises as `require_unchanged`.
    """
    before = known(location)
    if before is not None and (why := difference(before, config)):
        raise RefusedError(
            f"the store {label} is not the one that was used before",
            why=why,
            remedy="find out who changed it before you use it, and restore its `store` file "
            "(vmckpt store key import); if you changed it yourself: "
            f"vmckpt store accept {label}",
        )
    return before


def accept(location: str, config: Config) -> KnownStore:
    """Accept the store at the location in its present state. Raises StorageError."""
    with _alone():
        return remember(location, config, accepted=True)


def forget(location: str) -> bool:
    """Forget what was at the location, so that a new store may be created there.

    Returns whether anything was known. Raises StorageError.
    """
    there = _stores().path(_name(location)).exists()
    _stores().remove(_name(location))
    return there


def forget_of_host(name: str, below: Path | None = None) -> None:
    """Forget the stores of a removed host; those of this machine lie `below`."""
    # A damaged record is reported when its store is used.
    for key, one in _stores().load_all().records.items():
        inside = below is not None and Path(one.location).is_relative_to(below)
        if inside or one.location.startswith(f"{name}:"):
            _stores().remove(key)


def require_never_used(location: str, label: str) -> None:
    """Check before a store is created. Raises RefusedError if the location had one that is now
    gone.
    """
    before = known(location)
    if before is None:
        return
    what = "encrypted" if before.encrypted else "not encrypted"
    raise RefusedError(
        f"the store {label} is gone",
        why=f"store {before.id[:12]}, {what}, was used there before, and nothing is there now",
        remedy="check that its file system is mounted; if it is gone for good, and a new store is "
        f"to be made there: vmckpt store accept {label}",
    )


def difference(before: KnownStore, config: Config) -> str | None:
    """How a store differs from the one that was there, in words; None: it does not."""
    if before.id != config.id:
        was = "encrypted" if before.encrypted else "not encrypted"
        return f"store {before.id[:12]}, {was}, was there; now it is {described(config)}"
    if before.encrypted != config.is_encrypted:
        was, is_ = ("encrypted", "is not") if before.encrypted else ("not encrypted", "is")
        return f"it was {was}, and {is_} now"
    if config.revision < before.revision:
        return (
            f"its keys had been changed {before.revision} times, and now {config.revision} times: "
            "an older file `store` was put back, which keys open that were removed since"
        )
    return None


def remember(location: str, config: Config, *, accepted: bool) -> KnownStore:
    """Record what is at the location. Raises StorageError."""
    made = KnownStore(location, config.id, config.is_encrypted, config.revision, accepted)
    _stores().save(_name(location), made)
    return made


def _name(location: str) -> str:
    return hashlib.sha256(location.encode()).hexdigest()[:32]


def _stores() -> Documents[KnownStore]:
    return Documents(state_dir() / DIRECTORY, _SCHEMA)


@contextmanager
def _alone() -> Iterator[None]:
    """Lock for the block: no other command compares and remembers. Raises StorageError."""
    directory = state_dir() / DIRECTORY
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise StorageError(
            f"cannot use {directory}",
            why=exc.strerror or str(exc),
            remedy="free space there, or check its permissions",
        ) from exc
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
