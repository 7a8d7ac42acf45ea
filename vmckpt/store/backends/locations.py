"""The backend of a location: by scheme for a URL, else a directory or an exported file.

A new URL scheme needs an entry in `_SCHEMES`; nothing else depends on schemes. Backends are
imported when a location needs them.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from vmckpt.errors import RefusedError, UsageError
from vmckpt.store.backends.archive import ArchiveBackend
from vmckpt.store.backends.backend import Backend
from vmckpt.store.backends.local import LocalBackend


class _Scheme(NamedTuple):
    """`form`: how such URLs are written. `server`: an environment variable that is part of them."""

    form: str
    open: Callable[[str], Backend]
    server: str | None = None


def _ssh(location: str) -> Backend:
    from vmckpt.store.backends.ssh import SshBackend

    return SshBackend(location)


def _s3(location: str) -> Backend:
    try:
        from vmckpt.store.backends.s3 import S3Backend
    except ImportError as exc:
        raise RefusedError(
            f"{location} cannot be used",
            why="object storage takes the package obstore, which is not installed",
            remedy="pip install 'vmckpt[s3]'",
        ) from exc
    return S3Backend(location)


_SCHEMES = {
    "ssh": _Scheme("ssh://HOST/DIRECTORY", _ssh),
    "s3": _Scheme("s3://BUCKET/PREFIX", _s3, "AWS_ENDPOINT_URL"),
}
URL_FORMS = " or ".join(scheme.form for scheme in _SCHEMES.values())


def is_url(location: str) -> bool:
    """Whether it is a URL, the same from every host; otherwise it is a host's path."""
    return "://" in location


def canonical_url(url: str) -> str:
    """One spelling for all variants of a URL, with the server from the environment, if any."""
    server = _scheme(url).server
    return f"{os.environ.get(server, '') if server else ''} {url.rstrip('/')}".strip()


def require_known(url: str) -> None:
    """Raises UsageError if no store URL has this scheme."""
    _scheme(url)


def backend_at(location: str) -> Backend:
    """The backend of an existing or future store. Raises RefusedError, UsageError, DamagedError."""
    if is_url(location):
        return _scheme(location).open(location)
    path = Path(location).absolute()
    return ArchiveBackend(path) if path.is_file() else LocalBackend(path)


def _scheme(url: str) -> _Scheme:
    found = _SCHEMES.get(url.partition("://")[0])
    if found is None:
        raise UsageError(
            f"{url} is not the location of a store",
            why=f"a location is a directory, HOST:, HOST:/DIRECTORY, {URL_FORMS}",
            remedy="write one of them",
        )
    return found
