"""Making and opening stores, wherever they are.

A place is a directory, `s3://BUCKET/PREFIX`, or an exported file, which can only be read; or a back
end that somebody has opened already.
"""

import os
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from vmckpt.errors import RefusedError
from vmckpt.store.backends.archive import ArchiveBackend, NewArchive
from vmckpt.store.backends.backend import Backend
from vmckpt.store.backends.local import LocalBackend
from vmckpt.store.checkpoint_file import Files
from vmckpt.store.config import (
    SECRET_BYTES,
    Config,
    new_config,
    parse_config,
    read_config,
    write_config,
)
from vmckpt.store.damage.elsewhere import Elsewhere
from vmckpt.store.damage.records import DamageRecords
from vmckpt.store.header import Kind
from vmckpt.store.opened import Opened
from vmckpt.store.pack import Packs
from vmckpt.store.sealing.keys import KeySource, clear, unwrap, wrap
from vmckpt.store.sealing.seal import Sealer
from vmckpt.store.store import Store

S3_SCHEME = "s3://"
# Enough for 8 TiB of new content.
MOST_FILES = 65536


def create_store(place: str | Backend, key: KeySource | None = None) -> Store:
    """Make a store, and open it; with a key it is encrypted.

    Raises RefusedError when there is one, or no key is had; StorageError.
    """
    backend = _backend(place) if isinstance(place, str) else place
    secret = os.urandom(SECRET_BYTES)
    config = new_config(wrap(secret, key) if key else clear(secret))
    write_config(backend, config)
    return _open(backend, config, secret)


def open_store(place: str | Backend, key: KeySource | bytes | None = None) -> Store:
    """Open a store. Without `key` an encrypted one takes the environment's, or ssh-agent's.

    Bytes are the secret itself, as somebody had it from `secret_of`. Raises NotFoundError,
    DamagedError, RefusedError, StorageError.
    """
    backend = _backend(place) if isinstance(place, str) else place
    try:
        config = read_config(backend)
        secret = key if isinstance(key, bytes) else unwrap(config.key, key)[0]
        return _open(backend, config, secret)
    except BaseException:
        backend.close()
        raise


def config_at(place: str) -> bytes:
    """The file `store` of a store. Raises NotFoundError, StorageError."""
    backend = _backend(place)
    try:
        return read_config(backend).encode()
    finally:
        backend.close()


def secret_of(config: bytes, place: str, key: KeySource | None) -> bytes | None:
    """What opens the encrypted store whose file `store` is `config`; None: it is not encrypted.

    For a process that has no way to the key, and keeps this in memory alone. Raises as
    `open_store` does.
    """
    secret, encrypted = unwrap(parse_config(config, place).key, key)
    return secret if encrypted else None


@contextmanager
def new_archive(path: Path, like: Store) -> Iterator[Store]:
    """A store in a file that is there when the block ends, and is not when it fails.

    What is encrypted in `like` is encrypted in the file, and the same key opens it. Raises
    RefusedError, BusyError, StorageError.
    """
    archive = NewArchive(path.absolute())
    try:
        config = new_config(like.config.key)
        write_config(archive, config)
        with _open(archive, config, like.opened.secret) as store:
            yield store
            archive.finish()
    finally:
        archive.close()


def _allow_many_files() -> None:
    """A checkpoint has a file open for every 128 MiB of new content until it is committed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(MOST_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _backend(place: str) -> Backend:
    if place.startswith(S3_SCHEME):
        try:
            from vmckpt.store.backends.s3 import S3Backend
        except ImportError as exc:
            raise RefusedError(
                f"{place} cannot be used",
                why="object storage takes the package obstore, which is not installed",
                remedy="pip install 'vmckpt[s3]'",
            ) from exc
        return S3Backend(place)
    path = Path(place).absolute()
    return ArchiveBackend(path) if path.is_file() else LocalBackend(path)


def _open(backend: Backend, config: Config, secret: bytes) -> Store:
    _allow_many_files()
    store_id = bytes.fromhex(config.id)
    sealer = Sealer(secret, encrypted=config.key["kind"] != "clear")
    files = Files(backend, sealer, store_id)
    packs = Packs(backend, sealer, files.header(Kind.PACK))
    records = DamageRecords(backend, sealer, files.header(Kind.DAMAGE))
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
