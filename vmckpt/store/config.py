"""`store`: the file that says that this is a store, which, and how its secret is come by.

JSON in one line, and a second line: BLAKE2b of the first one. What was not written so is refused.
"""

import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any

from vmckpt.errors import NotFoundError, RefusedError
from vmckpt.store.backends.backend import Backend, MissingError
from vmckpt.store.errors import damaged
from vmckpt.store.header import VERSION

CONFIG = "store"
SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class Config:
    """A store's facts. `key` has the secret, or how it is wrapped (`sealing/keys.py`)."""

    id: str
    created_unix_s: int
    key: dict[str, Any]
    format: int = VERSION

    def encode(self) -> bytes:
        """As the file's bytes."""
        line = json.dumps({"vmckpt-store": asdict(self)}, sort_keys=True).encode()
        return b"%s\n%s\n" % (line, blake2b(line, digest_size=32).hexdigest().encode())


def new_config(key: dict[str, Any]) -> Config:
    """A store that there was not yet."""
    return Config(os.urandom(16).hex(), int(time.time()), key)


def write_config(backend: Backend, config: Config) -> None:
    """Make the place a store. Raises RefusedError when it is one, StorageError."""
    with backend.hold("config", shared=False):
        with suppress(MissingError):  # as it has to be
            backend.read(CONFIG)
            raise RefusedError(
                f"{backend.place} is a store already",
                why="making it anew would lose what is in it",
                remedy="choose another place, or use the one that is there",
            )
        writer = backend.write(CONFIG)
        try:
            writer.write(config.encode())
            writer.publish()
        finally:
            writer.discard()


def read_config(backend: Backend) -> Config:
    """What the store says of itself. Raises NotFoundError, DamagedError, RefusedError."""
    try:
        data = backend.read(CONFIG)
    except MissingError as exc:
        raise NotFoundError(
            f"there is no store in {backend.place}",
            why="it has no file `store`",
            remedy="make one: vmckpt store init",
        ) from exc
    return parse_config(data, backend.place)


def parse_config(data: bytes, place: str) -> Config:
    """The file's bytes. Raises DamagedError, RefusedError."""
    try:
        words = json.loads(data.partition(b"\n")[0])["vmckpt-store"]
        config = Config(**words)
        whole = config.encode() == data
    except (ValueError, TypeError, KeyError) as exc:
        raise damaged(f"{place}/{CONFIG} is damaged", str(exc)) from exc
    if not whole:
        raise damaged(f"{place}/{CONFIG} is damaged", "its checksum does not hold")
    if config.format != VERSION:
        raise RefusedError(
            f"the store {place} has format {config.format}",
            why=f"this vmckpt reads and writes format {VERSION}",
            remedy="use the vmckpt that made it",
        )
    return config
