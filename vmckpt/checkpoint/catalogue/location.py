"""Store locations: a host's own store, or one that the operator names.

A location is written `s3://BUCKET/PREFIX`, `ssh://HOST/DIRECTORY`, a directory, `HOST:DIRECTORY`,
or `HOST:` for the host's own store. A directory on another host is accessed over the connection to
that host, by a process there (`vmckpt lend`) that has no key and sees only the store. With `ssh://`
every process that uses the store connects to its server itself.
"""

import asyncio
import os
import re
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from socket import socket

from vmckpt.checkpoint.catalogue.known_stores import (
    known,
    require_as_before,
    require_never_used,
    require_unchanged,
)
from vmckpt.errors import BusyError, HostDownError, NotFoundError, RefusedError, UsageError
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory.inventory import find_host, local_host
from vmckpt.sequence.in_thread import in_thread
from vmckpt.sequence.steps import finish
from vmckpt.store.backends.lent import LentBackend
from vmckpt.store.backends.locations import canonical_url, is_url, require_known
from vmckpt.store.errors import DamagedError
from vmckpt.store.files.config import NAMES, OBJECT_FOLDERS, Config, chosen
from vmckpt.store.open import (
    Access,
    config_at,
    create_store,
    open_store,
    require_encrypted,
)
from vmckpt.store.sealing.keys import KeySource, from_environment
from vmckpt.store.sealing.wrapping import unwrap
from vmckpt.store.store import Checkpoint, Store

Key = KeySource | None
LEND_TIMEOUT_S, MAKING_S, POLL_S = 30.0, 10.0, 0.02
_OF_HOST = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*):(/.*)?")


@dataclass(frozen=True, slots=True)
class StoreLocation:
    """A store's location: a directory of `host`, or a URL, the same on every host (None)."""

    host: Host | None
    path: str

    @property
    def is_here(self) -> bool:
        """Whether this process can access it directly."""
        return self.host is None or self.host.is_this_machine

    @property
    def is_own(self) -> bool:
        """Whether it is the host's default store."""
        return self.host is not None and self.path == own_location(self.host.state_dir)

    @property
    def location(self) -> str:
        """The key under which the operator remembers it, the same for all its spellings."""
        if self.host is None:
            return canonical_url(self.path)
        path = os.path.normpath(self.path)
        return path if self.host.is_this_machine else f"{self.host.name}:{path}"

    @property
    def label(self) -> str:
        """The location as you write it in a command."""
        if self.host is None or (self.host.is_this_machine and not self.is_own):
            return self.path
        return f"{self.host.name}:{'' if self.is_own else self.path}"


def own_location(state_dir: Path) -> str:
    """A host's default store directory."""
    return str(state_dir / "checkpoints")


def own(host: Host) -> StoreLocation:
    """A host's own store."""
    return StoreLocation(host, own_location(host.state_dir))


def parse_location(text: str, at: Host | None = None) -> StoreLocation:
    """Parse a location; a bare directory is on `at`, else on this machine.

    Raises UsageError, NotFoundError: no such host.
    """
    if not text.strip():
        raise UsageError(
            "no store is named",
            why="the location is empty",
            remedy="write a directory, HOST: or a URL",
        )
    if is_url(text):
        require_known(text)
        return StoreLocation(None, text)
    if found := _OF_HOST.fullmatch(text):
        host = find_host(found[1])
        return StoreLocation(host, found[2]) if found[2] else own(host)
    here = at or local_host()
    if here.is_this_machine:
        return StoreLocation(here, str(Path(text).absolute()))
    if not Path(text).is_absolute():
        raise UsageError(
            f"{text} is not the location of a store",
            why=f"a directory of {here.name} is meant, but its path is not absolute",
            remedy=f"write the absolute path: {here.name}:/DIRECTORY",
        )
    return StoreLocation(here, text)


async def is_there(location: StoreLocation) -> bool:
    """Whether a store is there, or was; a URL is assumed to have one. Raises HostDownError."""
    if location.host is None:
        return True
    host, path = location.host, Path(location.path)
    if await host.exists(path / NAMES[0]):
        return True
    left = await asyncio.gather(
        *(host.exists(path / name) for name in (*NAMES[1:], *OBJECT_FOLDERS))
    )
    return any(left) or known(location.location) is not None


@asynccontextmanager
async def opened(
    location: StoreLocation, key: KeySource | None = None, *, any_encryption: bool = False
) -> AsyncIterator[Store]:
    """Open the location's store for the block. Its calls block: run them in a thread.

    Raises as `open_store`, and RefusedError if it is not the store that was there before. With a
    key an unencrypted store is refused unless the operator has accepted it or `any_encryption` is
    set: then the key is meant for other stores of the same search.
    """
    ok = any_encryption or is_accepted(location)
    if location.host is None or location.host.is_this_machine:
        opening = partial(open_store, location.path, key, unencrypted_ok=ok)
    else:
        sock = await lent(location.host, location.path)
        backend = LentBackend(sock, location.label)
        opening = partial(open_store, backend, key, unencrypted_ok=ok)
    try:
        store = await in_thread(opening)
    except NotFoundError:
        require_never_used(location.location, location.label)
        raise
    try:
        require_as_known(location, store.config)
        yield store
    finally:
        store.close()


def require_as_known(location: StoreLocation, config: Config) -> None:
    """Raises RefusedError if it is not the store that was there before; StorageError."""
    # Exported files come and go: compare a file only with one that was accepted.
    is_file = location.is_here and location.host is not None and Path(location.path).is_file()
    if is_file and known(location.location) is None:
        return
    require_unchanged(location.location, location.label, config)


def is_accepted(location: StoreLocation) -> bool:
    """Whether the operator has accepted that this store is unencrypted."""
    before = known(location.location)
    return before is not None and before.accepted and not before.encrypted


async def lent(host: Host, path: str) -> socket:
    """A blocking stream to a process on the host that accesses the directory for us.

    Raises HostDownError.
    """
    directory = host.state_dir / "lent" / secrets.token_hex(4)
    await host.make_dir(directory)
    try:
        log, ear = directory / "log", directory / "ear"
        words = [*await host.own_command(), "lend", path, str(ear)]
        process = await host.spawn(words, log)
        deadline_s = asyncio.get_running_loop().time() + LEND_TIMEOUT_S
        while not await host.exists(ear):
            is_late = asyncio.get_running_loop().time() > deadline_s
            if is_late or not await host.is_alive(process):
                output = (await host.read_text(log) or "").strip().splitlines()
                raise HostDownError(
                    f"{host.name} does not give access to its store {path}",
                    why=output[-1] if output else "its process there did not become ready",
                    remedy=f"see: vmckpt host check {host.name}",
                )
            await asyncio.sleep(POLL_S)
        sock = await host.connect(ear)
        sock.setblocking(True)
        return sock
    finally:
        await finish(host.remove(directory))


async def access_to(
    location: StoreLocation, key: KeySource | None, *, to_write: bool = False, named: bool = True
) -> Access:
    """The credentials and identity of the store, for a process on a host.

    The operator's process reads the key. `to_write`: a missing store may be created if it is the
    host's own and was not `named`. Raises as `opened`; NotFoundError: the store is missing and may
    not be created.
    """
    try:
        config = await _config(location)
    except NotFoundError:
        require_never_used(location.location, location.label)
        if named or not to_write:
            raise
        if key is not None or from_environment() is not None:
            raise NotFoundError(
                f"there is no store in {location.label}",
                why="a key is given, and a store that is created implicitly is not encrypted",
                remedy=f"make it first: vmckpt store init {location.label} --key-file FILE",
            ) from None
        return Access(may_be_made=True)
    if not is_accepted(location):
        require_encrypted(config, location.label, key)
    require_as_before(location.location, location.label, config)
    secret = (await in_thread(partial(unwrap, config, key))).secret
    require_as_known(location, config)
    return Access(secret if config.is_encrypted else None, config.id)


async def remember_made(location: StoreLocation) -> None:
    """Remember a store if a job has created it. Raises as `access_to`."""
    try:
        config = await _config(location)
    except NotFoundError:
        return
    require_as_known(location, config)


async def _config(location: StoreLocation) -> Config:
    """Raises NotFoundError, DamagedError, RefusedError."""
    host = location.host
    if host is None or host.is_this_machine:
        return await in_thread(partial(config_at, location.path))
    paths = [Path(location.path) / name for name in NAMES]
    first = {NAMES[0]: await _text(host, paths[0])}
    try:
        return chosen(first, location.label, had_objects=False)
    except (NotFoundError, DamagedError):
        # In this order: a store that is being created gets its config before its objects.
        folders = [Path(location.path) / folder for folder in OBJECT_FOLDERS]
        objects = await asyncio.gather(*(host.list_dir(folder) for folder in folders))
        texts = await asyncio.gather(*(_text(host, path) for path in paths))
        found = dict(zip(NAMES, texts, strict=True))
        return chosen(found, location.label, had_objects=any(objects))


async def _text(host: Host, path: Path) -> bytes | None:
    text = await host.read_text(path)
    return None if text is None else text.encode()


@asynccontextmanager
async def reading(
    location: str, checkpoint_id: str, secret: bytes | None = None
) -> AsyncIterator[Checkpoint]:
    """Open a checkpoint for the block, in a store that this process can access.

    The checkpoint is not removed meanwhile. `secret` opens an encrypted store; without it only
    unencrypted stores are read. Raises as `open_store` and reading do.
    """
    store = await in_thread(partial(open_store, location, Access(secret)))
    opened_ = store.read(checkpoint_id)
    try:
        point = await in_thread(opened_.__enter__)
        try:
            yield point
        finally:
            await finish(in_thread(partial(opened_.__exit__, None, None, None)))
    finally:
        store.close()


def open_or_create(location: str, access: Access) -> Store:
    """Open the store at `location`, or create it if it is missing and may be. Blocking.

    Raises as both do.
    """
    given_up_s = time.monotonic() + MAKING_S
    while True:
        try:
            return open_store(location, access)
        except NotFoundError:
            if not access.may_be_made:
                raise
        try:
            return create_store(location)
        except (RefusedError, BusyError):  # another process has created it, or is doing so
            if time.monotonic() > given_up_s:
                raise
        time.sleep(POLL_S)
