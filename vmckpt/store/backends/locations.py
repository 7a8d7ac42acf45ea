"""Which backend a location means: a URL by its scheme, else a directory or an exported file.

A new kind of store in a URL needs a line in `_SCHEMES`, and nothing else that depends on its
scheme. Backends are imported when a location needs them.
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
    """`form`: how its URLs are written. `server`: an environment variable that is part of it."""

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
    """Whether it is a URL: the same from every host. Else a path, which a host has."""
    return "://" in location


def canonical_url(url: str) -> str:
    """One text for all ways to write it, with the server that the environment names, if any."""
    server = _scheme(url).server
    return f"{os.environ.get(server, '') if server else ''} {url.rstrip('/')}".strip()


def require_known(url: str) -> None:
    """Raises UsageError: no store has a URL of this scheme."""
    _scheme(url)


def backend_at(location: str) -> Backend:
    """The backend of a store that is there, or is to be. RefusedError, UsageError, DamagedError."""
    if is_url(location):
        return _scheme(location).open(location)
    path = Path(location).absolute()
    return ArchiveBackend(path) if path.is_file() else LocalBackend(path)


def _scheme(url: str) -> _Scheme:
    found = _SCHEMES.get(url.partition("://")[0])
    if found is None:
        raise UsageError(
            f"no store can be in {url}",
            why=f"a location is a directory, HOST:, HOST:/DIRECTORY, {URL_FORMS}",
            remedy="write one of them",
        )
    return found
