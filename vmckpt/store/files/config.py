"""`store`: the config file, which identifies a store and wraps its secret.

One line of JSON, and a second line: BLAKE2b of the first. A file without a matching checksum is
refused. The store has three copies (`NAMES`): any intact one opens the store, and `check` rewrites
the others. A store with one key has format 1. A store whose keys were changed has format 2, so that
an older vmckpt, which does not know of several keys, refuses it. One whose small packs may be
merged (`bundles/`) has format 3, whatever its keys, for the same reason.
"""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from typing import Any

from vmckpt.errors import NotFoundError, RefusedError, UsageError, VmckptError
from vmckpt.store.backends.backend import Backend, MissingError
from vmckpt.store.errors import DamagedError, UnreadableError

CONFIG = "store"
# The first is read; the others only if it is damaged or missing.
NAMES = (CONFIG, "config/1", "config/2")
# Only a store has these: objects in one of them prove that there was a store.
OBJECT_FOLDERS = ("bundles", "checkpoints", "maps", "packs")
SECRET_BYTES = 32
CLEAR, SEVERAL = "clear", "several"
ONE_KEY, KEYS, MERGED = 1, 2, 3
_MOST_BYTES = 64 << 10
_PATIENCE_S = 10.0

# The result of reading a copy.
Read = bytes | UnreadableError


@dataclass(frozen=True, slots=True)
class Config:
    """A store's facts. `key`: the secret, or how it is wrapped (`store/sealing/wrapping.py`)."""

    id: str
    created_unix_s: int
    key: dict[str, Any]
    format: int = ONE_KEY

    @property
    def is_encrypted(self) -> bool:
        """Whether reading the store needs a key."""
        return self.key.get("kind") != CLEAR

    @property
    def has_several_keys(self) -> bool:
        """Whether its keys were changed since it was created."""
        return self.format >= KEYS and self.key.get("kind") == SEVERAL

    @property
    def revision(self) -> int:
        """How often its keys were changed."""
        return int(self.key["revision"]) if self.has_several_keys else 0

    @property
    def age(self) -> tuple[int, int]:
        """Sort key: of a store's configs the later one is higher."""
        return self.revision, self.format

    def encode(self) -> bytes:
        """Encode the file."""
        line = json.dumps({"vmckpt-store": asdict(self)}, sort_keys=True).encode()
        return b"%s\n%s\n" % (line, blake2b(line, digest_size=32).hexdigest().encode())


def new_config(key: dict[str, Any]) -> Config:
    """The config of a new store."""
    return Config(os.urandom(16).hex(), int(time.time()), key)


def write_config(backend: Backend, config: Config) -> None:
    """Make the location a store. Raises RefusedError if it is or was one, StorageError."""
    with backend.hold("config", shared=False):
        require_no_store(backend)
        written = list[str]()
        try:
            for name in NAMES:
                written.append(name)
                write_copy(backend, name, config)
        except BaseException:
            for name in reversed(written):
                backend.remove(name)
            raise


def replace_config(backend: Backend, config: Config) -> dict[str, str]:
    """Replace all copies of a store's config. The caller holds "config". Raises StorageError.

    The change takes effect when the first copy is written. Later copies that could not be written
    are returned with the reason; `check` writes them.
    """
    first, *others = NAMES
    write_copy(backend, first, config)
    old = dict[str, str]()
    for name in others:
        try:
            write_copy(backend, name, config)
        except VmckptError as exc:
            old[name] = exc.why
    return old


def allow_bundles(backend: Backend) -> Config:
    """Allow bundles in the store; returns its config.

    Raises RefusedError (an append-only client), BusyError, StorageError.
    """
    with backend.hold("config", shared=False, wait_s=_PATIENCE_S):
        config = read_config(backend)
        if config.format < MERGED:
            config = replace(config, format=MERGED)
            # The copy that is read comes last: then all copies agree.
            for name in reversed(NAMES):
                write_copy(backend, name, config)
        return config


def write_copy(backend: Backend, name: str, config: Config) -> None:
    """Write one copy durably. Raises StorageError."""
    writer = backend.write(name)
    try:
        writer.write(config.encode())
        writer.publish()
    finally:
        writer.discard()


def require_no_store(backend: Backend) -> None:
    """Raises RefusedError if the location has a store, or objects of one without its config."""
    found = _copies(backend)
    if any(data is not None for data in found.values()):
        raise RefusedError(
            f"{backend.location} is a store already",
            why="recreating it would lose what is in it",
            remedy="choose another location, or use the store that is there",
        )
    if folders := _objects(backend):
        raise RefusedError(
            f"{backend.location} had a store, whose file `{CONFIG}` is missing",
            why=f"objects lie in {', '.join(folders)}: a new store would not read them",
            remedy=f"restore the file from a backup: vmckpt store key import FILE "
            f"--store {backend.location}; or choose another location",
        )


def read_config(backend: Backend) -> Config:
    """Read a store's config. Raises NotFoundError, DamagedError, RefusedError."""
    found = {CONFIG: _copy(backend, CONFIG)}
    try:
        return chosen(found, backend.location, had_objects=False)
    except (NotFoundError, DamagedError):
        # In this order: a store that is being created gets its config before its objects.
        had_objects = bool(_objects(backend))
        return chosen(_copies(backend), backend.location, had_objects=had_objects)


def chosen(found: Mapping[str, Read | None], location: str, *, had_objects: bool) -> Config:
    """Choose from the copies (None: missing): the first if intact, otherwise the newest intact one.

    `had_objects`: the location has objects of a store. Raises NotFoundError (no store),
    DamagedError (no copy is intact), RefusedError (another vmckpt wrote it).
    """
    whole, bad = list[Config](), list[DamagedError]()
    for name in NAMES:
        data = found.get(name)
        if data is None:
            continue
        try:
            config = parse_config(data, location, name)
        except DamagedError as exc:
            bad.append(exc)
            continue
        if name == CONFIG:
            return config
        whole.append(config)
    if whole:
        return max(whole, key=lambda config: config.age)
    if bad:
        raise bad[0]
    if had_objects:
        raise _no_config(location, "objects of a store lie there, and no copy of it does")
    raise NotFoundError(
        f"there is no store in {location}",
        why=f"it has no file `{CONFIG}`",
        remedy=f"make one: vmckpt store init {location}; or, if there was one, check that its file "
        "system is mounted",
    )


def copies(backend: Backend) -> dict[str, Config | DamagedError | None]:
    """All copies; None where one is missing. Raises StorageError, RefusedError."""
    found = dict[str, Config | DamagedError | None]()
    for name, data in _copies(backend).items():
        try:
            found[name] = None if data is None else parse_config(data, backend.location, name)
        except DamagedError as exc:
            found[name] = exc
    return found


def parse_config(data: Read, location: str, name: str = CONFIG) -> Config:
    """Decode the file. Raises DamagedError, RefusedError."""
    if isinstance(data, UnreadableError):
        raise data
    try:
        words = json.loads(data[:_MOST_BYTES].partition(b"\n")[0])["vmckpt-store"]
        config = Config(**words)
        whole = config.encode() == data
    except (ValueError, TypeError, KeyError, RecursionError) as exc:
        raise _damaged_config(location, name, str(exc)) from exc
    if not whole:
        raise _damaged_config(location, name, "its checksum does not hold")
    if config.format not in (ONE_KEY, KEYS, MERGED):
        raise RefusedError(
            f"the store {location} has format {config.format}",
            why=f"this vmckpt reads and writes formats {ONE_KEY} to {MERGED}",
            remedy="use the vmckpt that made it",
        )
    _require_typed(config, location, name)
    return config


def _require_typed(config: Config, location: str, name: str) -> None:
    """The checksum detects damage, not manipulation."""
    try:
        right = (
            len(bytes.fromhex(config.id)) == 16
            and type(config.created_unix_s) is int
            and type(config.key) is dict
            and type(config.key.get("kind")) is str
        )
        if right and config.format == KEYS:
            right = config.has_several_keys
        if right and config.has_several_keys:
            revision = config.key.get("revision")
            right = type(revision) is int and revision > 0
    except (ValueError, TypeError) as exc:
        raise _damaged_config(location, name, str(exc)) from exc
    if not right:
        raise _damaged_config(location, name, "it does not describe a store")


def _copies(backend: Backend) -> dict[str, Read | None]:
    return {name: _copy(backend, name) for name in NAMES}


def _copy(backend: Backend, name: str) -> Read | None:
    try:
        return backend.read(name, 0, _MOST_BYTES)
    except UnreadableError as exc:
        return exc
    except MissingError:
        return None


def _objects(backend: Backend) -> list[str]:
    return [folder for folder in OBJECT_FOLDERS if _has(backend, folder)]


def _has(backend: Backend, folder: str) -> bool:
    try:
        return bool(backend.names(folder))
    except UsageError:  # lent by an older version, which has no such folder
        return False


def _damaged_config(location: str, name: str, why: str) -> DamagedError:
    return DamagedError(
        f"{location}/{name} is damaged",
        why=why,
        remedy="an intact copy opens the store, and `vmckpt store check` rewrites the others; "
        f"where no copy is intact: vmckpt store key import FILE --store {location}",
    )


def _no_config(location: str, why: str) -> DamagedError:
    return DamagedError(
        f"the file `{CONFIG}` of the store {location} is missing",
        why=why,
        remedy=f"restore it from a backup: vmckpt store key import FILE --store {location}",
    )
