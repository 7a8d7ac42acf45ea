"""Create and open stores, wherever they are.

A location is anything that `backends/locations.py` knows, or an open backend.
"""

import os
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from vmckpt.errors import RefusedError
from vmckpt.store.backends.archive import NewArchive
from vmckpt.store.backends.backend import Backend
from vmckpt.store.backends.cached import CachedBackend, cache_folder
from vmckpt.store.backends.locations import backend_at
from vmckpt.store.bundles.bundled import BundledBackend
from vmckpt.store.bundles.layout import BundleFiles
from vmckpt.store.damage.elsewhere import Elsewhere
from vmckpt.store.damage.records import DamageRecords
from vmckpt.store.files.checkpoint_file import CheckpointFiles
from vmckpt.store.files.config import (
    SECRET_BYTES,
    Config,
    new_config,
    read_config,
    write_config,
)
from vmckpt.store.files.header import FileKind, Header
from vmckpt.store.files.pack import Packs
from vmckpt.store.opened import Opened
from vmckpt.store.sealing.keys import KeySource, from_environment
from vmckpt.store.sealing.seal import Sealer
from vmckpt.store.sealing.wrapping import clear, renamed, unwrap, wrap
from vmckpt.store.store import Store

# Enough for 8 TiB of new content.
MOST_FILES = 65536


class Access(NamedTuple):
    """What the operator's process found out about a store, for processes without access to a key.

    `secret` opens an encrypted store; None: it must not be encrypted. `store_id`: which store;
    None: any. `may_be_made`: it did not exist, and may be created.
    """

    secret: bytes | None = None
    store_id: str | None = None
    may_be_made: bool = False


def create_store(location: str | Backend, key: KeySource | None = None) -> Store:
    """Create a store, and open it; with a key it is encrypted.

    Raises RefusedError if there is or was one, or the key is not available; StorageError.
    """
    backend = backend_at(location) if isinstance(location, str) else location
    secret = os.urandom(SECRET_BYTES)
    config = new_config(wrap(secret, key).to_json() if key else clear(secret))
    write_config(backend, config)
    return _open(backend, config, secret)


def open_store(
    location: str | Backend,
    key: KeySource | Access | None = None,
    *,
    unencrypted_ok: bool = False,
) -> Store:
    """Open a store. Without `key`, an encrypted one uses the environment's key, or ssh-agent's.

    With a key, also one from the environment, an unencrypted store is refused, unless
    `unencrypted_ok`. Raises NotFoundError, DamagedError, RefusedError, StorageError.
    """
    backend = backend_at(location) if isinstance(location, str) else location
    try:
        config = read_config(backend)
        if isinstance(key, Access):
            _require_as_found(config, backend.location, key)
            secret = key.secret or unwrap(config, None).secret
        else:
            if not unencrypted_ok:
                require_encrypted(config, backend.location, key)
            secret = unwrap(config, key).secret
        return _open(backend, config, secret)
    except BaseException:
        backend.close()
        raise


def config_at(location: str) -> Config:
    """A store's config. Raises NotFoundError, DamagedError, RefusedError."""
    backend = backend_at(location)
    try:
        return read_config(backend)
    finally:
        backend.close()


def require_encrypted(config: Config, location: str, key: KeySource | None) -> None:
    """Raises RefusedError if there is a key, given or in the environment, and the store is
    unencrypted.
    """
    source = key or from_environment()
    if source is None or config.is_encrypted:
        return
    origin = "" if key else " in the environment"
    raise RefusedError(
        f"the store {location} is not encrypted",
        why=f"a key is given{origin} ({source.keeper} {source.where}), and all that is written "
        "there could be read without it",
        remedy="if it was encrypted before, another has replaced its file `store`: find out who, "
        "and restore it (vmckpt store key import); if it is to be unencrypted, give no key, or: "
        f"vmckpt store accept {location}",
    )


def _require_as_found(config: Config, location: str, access: Access) -> None:
    """Raises RefusedError if it was replaced since the operator's process read it."""
    if config.is_encrypted == (access.secret is not None) and access.store_id in (None, config.id):
        return
    raise RefusedError(
        f"the store {location} is not the one that the command began with",
        why=f"it is {described(config)} now: its file `store` was replaced meanwhile",
        remedy="find out who writes there; `vmckpt store info` shows what it is",
    )


def described(config: Config) -> str:
    """Its id, and whether it is encrypted, as text."""
    return f"store {config.id[:12]}, {'encrypted' if config.is_encrypted else 'not encrypted'}"


@contextmanager
def new_archive(path: Path, like: Store) -> Iterator[Store]:
    """A new store in a file, which exists after the block unless that fails.

    If `like` is encrypted, so is the file, and the same key opens it. Raises RefusedError,
    BusyError, StorageError.
    """
    archive = NewArchive(path.absolute())
    try:
        fresh, secret = new_config({}), like.opened.secret
        config = renamed(like.config, fresh.id, fresh.created_unix_s, secret)
        write_config(archive, config)
        with _open(archive, config, secret) as store:
            yield store
            archive.finish()
    finally:
        archive.close()


def _allow_many_files() -> None:
    """Until it is committed, a checkpoint has one file open per 128 MiB of new content."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(MOST_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _open(backend: Backend, config: Config, secret: bytes) -> Store:
    _allow_many_files()
    if backend.is_remote:
        backend = CachedBackend(backend, cache_folder(config.id), secret)
    store_id = bytes.fromhex(config.id)
    sealer = Sealer(secret, encrypted=config.is_encrypted)
    bundles = BundleFiles(
        backend, sealer, Header(FileKind.BUNDLE, encrypted=config.is_encrypted, store=store_id)
    )
    backend = BundledBackend(backend, bundles)
    files = CheckpointFiles(backend, sealer, store_id)
    packs = Packs(backend, sealer, files.header(FileKind.PACK))
    records = DamageRecords(backend, sealer, files.header(FileKind.DAMAGE))
    opened = Opened(
        secret,
        backend,
        sealer,
        files,
        packs,
        records,
        Elsewhere(packs, sealer, records),
        ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="store"),
    )
    return Store(opened, config)
