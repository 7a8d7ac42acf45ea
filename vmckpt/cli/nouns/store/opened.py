"""A store that a command works on, wherever it lies, opened for a block."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from vmckpt.cli.options.stores import location_of

if TYPE_CHECKING:
    from vmckpt.checkpoint.catalogue.location import StoreLocation as Location
    from vmckpt.store.backends.backend import Backend
    from vmckpt.store.sealing.keys import KeySource
    from vmckpt.store.store import Store


@contextmanager
def opened(
    location: "str | Location | None",
    key: "KeySource | None",
    *,
    to_write: bool = False,
    as_before: bool = True,
    any_encryption: bool = False,
) -> "Iterator[Store]":
    """A store for the block; one of another host is used over the connection to that host.

    Of one that is not `to_write` the key in the environment may be another's; with `any_encryption`
    so may the key that is given. `as_before`: it has to be what was there before.
    """
    from vmckpt.checkpoint.catalogue.known_stores import require_never_used
    from vmckpt.checkpoint.catalogue.location import is_accepted, require_as_known
    from vmckpt.errors import NotFoundError
    from vmckpt.store.open import open_store

    at = location_of(location) if location is None or isinstance(location, str) else location
    ok = any_encryption or (key is None and not to_write) or is_accepted(at)
    with backend_of(at) as backend:
        try:
            found = open_store(backend, key, unencrypted_ok=ok)
        except NotFoundError:
            require_never_used(at.location, at.label)
            raise
        with found as store:
            if as_before:
                require_as_known(at, store.config)
            yield store


@contextmanager
def backend_of(location: "Location") -> "Iterator[Backend]":
    """Where a store lies, for the block; of another host over the connection to that host."""
    from vmckpt.checkpoint.catalogue.location import lent
    from vmckpt.store.backends.lent import LentBackend
    from vmckpt.store.backends.locations import backend_at

    if location.host is None or location.host.is_this_machine:
        with closing(backend_at(location.path)) as backend:
            yield backend
        return
    from vmckpt.cli.beside import beside

    with beside() as call:
        sock = call(lent(location.host, location.path))
        with closing(LentBackend(sock, location.label)) as far:
            yield far
