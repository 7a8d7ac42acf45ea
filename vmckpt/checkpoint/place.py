"""Where checkpoints are kept: a host's own store, or the one that the operator names.

In words a place is `s3://BUCKET/PREFIX`, a directory, `HOST:DIRECTORY`, or `HOST:`, a host's own. A
directory of a host that is not this machine is used over the connection to that host, by a process
there (`vmckpt lend`), which has no key and sees only what lies in the store.
"""

import asyncio
import re
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from socket import socket

from vmckpt.errors import BusyError, HostDownError, NotFoundError, RefusedError, UsageError
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory import find_host, local_host
from vmckpt.sequence.in_thread import in_thread
from vmckpt.sequence.steps import finish
from vmckpt.store.backends.lent import LentBackend
from vmckpt.store.config import CONFIG
from vmckpt.store.open import S3_SCHEME, config_at, create_store, open_store, secret_of
from vmckpt.store.sealing.keys import KeySource, from_environment
from vmckpt.store.store import Checkpoint, Store

Key = KeySource | bytes | None
LEND_TIMEOUT_S, MAKING_S, POLL_S = 30.0, 10.0, 0.02
_OF_HOST = re.compile(r"([a-z0-9][a-z0-9._-]*):(/.*)?")


@dataclass(frozen=True, slots=True)
class Place:
    """A store's place: a directory as `host` has it, or object storage, which is no host's."""

    host: Host | None
    path: str

    @property
    def is_here(self) -> bool:
        """Whether this process gets to it without asking another."""
        return self.host is None or self.host.is_this_machine

    @property
    def is_own(self) -> bool:
        """Whether it is where its host keeps checkpoints unless told otherwise."""
        return self.host is not None and self.path == own_place(self.host.state_dir)

    @property
    def label(self) -> str:
        """In words, as they can be written in a command."""
        if self.host is None or (self.host.is_this_machine and not self.is_own):
            return self.path
        return f"{self.host.name}:{'' if self.is_own else self.path}"


def own_place(state_dir: Path) -> str:
    """Where a host keeps checkpoints unless told otherwise."""
    return str(state_dir / "checkpoints")


def own(host: Host) -> Place:
    """A host's own store."""
    return Place(host, own_place(host.state_dir))


def parse_place(text: str, at: Host | None = None) -> Place:
    """What the operator wrote; a directory alone is that of `at`, else of this machine.

    Raises UsageError, NotFoundError: there is no such host.
    """
    if "://" in text:
        if not text.startswith(S3_SCHEME):
            raise UsageError(
                f"no store can be in {text}",
                why="a place is a directory, HOST:, HOST:/DIRECTORY or s3://BUCKET/PREFIX",
                remedy="write one of them",
            )
        return Place(None, text)
    if found := _OF_HOST.fullmatch(text):
        host = find_host(found[1])
        return Place(host, found[2]) if found[2] else own(host)
    here = at or local_host()
    return Place(here, str(Path(text).absolute()) if here.is_this_machine else text)


async def is_there(place: Place) -> bool:
    """Whether there is a store. Of object storage that is not asked. Raises HostDownError."""
    return place.host is None or await place.host.exists(Path(place.path) / CONFIG)


@asynccontextmanager
async def opened(place: Place, key: Key = None) -> AsyncIterator[Store]:
    """A place's store for the block; its calls block: in a thread. Raises as `open_store`."""
    if place.host is None or place.host.is_this_machine:
        store = await in_thread(partial(open_store, place.path, key))
    else:
        sock = await lent(place.host, place.path)
        store = await in_thread(partial(open_store, LentBackend(sock, place.label), key))
    try:
        yield store
    finally:
        store.close()


async def lent(host: Host, path: str) -> socket:
    """A blocking stream to a process on the host that does to a directory what it is asked.

    Raises HostDownError.
    """
    directory = host.state_dir / "checkpointing" / f"lend-{secrets.token_hex(4)}"
    await host.make_dir(directory)
    try:
        log, ear = directory / "log", directory / "ear"
        words = [*await host.own_command(), "lend", path, str(ear)]
        process = await host.spawn(words, log)
        deadline_s = asyncio.get_running_loop().time() + LEND_TIMEOUT_S
        while not await host.exists(ear):
            is_late = asyncio.get_running_loop().time() > deadline_s
            if is_late or not await host.is_alive(process):
                said = (await host.read_text(log) or "").strip().splitlines()
                raise HostDownError(
                    f"{host.name} does not lend its store {path}",
                    why=said[-1] if said else "its process there gave no sign",
                    remedy=f"see: vmckpt host check {host.name}",
                )
            await asyncio.sleep(POLL_S)
        sock = await host.connect(ear)
        sock.setblocking(True)
        return sock
    finally:
        await finish(host.remove(directory))


async def secret_at(place: Place, key: KeySource | None) -> bytes | None:
    """What opens an encrypted store; None: it is not encrypted, or not there and without a key.

    The key is had here, by the operator's process. Raises as `open_store`; NotFoundError: a key is
    given, and there is no store that it could open.
    """
    config = await _config(place)
    if config is not None:
        return await in_thread(partial(secret_of, config, place.label, key))
    if key is not None or from_environment() is not None:
        raise NotFoundError(
            f"there is no store in {place.label}",
            why="a key was given, and a store that is made by the way is not encrypted",
            remedy=f"make it first: vmckpt store init {place.label} --key-file FILE",
        )
    return None


async def _config(place: Place) -> bytes | None:
    if place.host is not None:
        text = await place.host.read_text(Path(place.path) / CONFIG)
        return None if text is None else text.encode()
    try:
        return await in_thread(partial(config_at, place.path))
    except NotFoundError:
        return None


@asynccontextmanager
async def reading(place: str, checkpoint_id: str, key: Key = None) -> AsyncIterator[Checkpoint]:
    """A checkpoint of a store that this process gets to, to read from for the block, in which it is
    not removed. Raises as both do.
    """
    store = await in_thread(partial(open_store, place, key))
    opened_ = store.read(checkpoint_id)
    try:
        point = await in_thread(opened_.__enter__)
        try:
            yield point
        finally:
            await finish(in_thread(partial(opened_.__exit__, None, None, None)))
    finally:
        store.close()


def open_or_create(place: str, secret: bytes | None = None) -> Store:
    """The store at `place`, made when there is none. Blocking. Raises as both do."""
    given_up_s = time.monotonic() + MAKING_S
    while True:
        try:
            return open_store(place, secret)
        except NotFoundError:
            if secret is not None:
                raise
        try:
            return create_store(place)
        except (RefusedError, BusyError):  # somebody else has made it, or is about to
            if time.monotonic() > given_up_s:
                raise
        time.sleep(POLL_S)
