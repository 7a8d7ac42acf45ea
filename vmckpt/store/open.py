"""Making and opening stores, wherever they are."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from vmckpt.store.backends.backend import Backend
from vmckpt.store.backends.local import LocalBackend
from vmckpt.store.checkpoint_file import Files
from vmckpt.store.config import SECRET_BYTES, Config, new_config, read_config, write_config
from vmckpt.store.header import Header, Kind
from vmckpt.store.opened import Opened
from vmckpt.store.pack import Packs
from vmckpt.store.sealing.seal import Sealer
from vmckpt.store.store import Store


def create_store(place: str) -> Store:
    """Make a store, and open it. Raises RefusedError when there is one, StorageError."""
    backend = _backend(place)
    config = new_config({"kind": "none", "secret": os.urandom(SECRET_BYTES).hex()})
    write_config(backend, config)
    return _open(backend, config)


def open_store(place: str) -> Store:
    """Open a store. Raises NotFoundError, DamagedError, RefusedError, StorageError."""
    backend = _backend(place)
    return _open(backend, read_config(backend))


def _backend(place: str) -> Backend:
    return LocalBackend(Path(place).absolute())


def _open(backend: Backend, config: Config) -> Store:
    store_id = bytes.fromhex(config.id)
    sealer = Sealer(bytes.fromhex(config.key["secret"]), encrypted=False)
    header = Header(Kind.PACK, sealer.encrypted, store_id)
    opened = Opened(
        store_id,
        backend,
        sealer,
        Files(backend, sealer, store_id),
        Packs(backend, sealer, header),
        ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="store"),
    )
    return Store(opened, config)
