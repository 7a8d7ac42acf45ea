"""Debian packages for hosts that reach no archive: downloaded here, served over HTTP."""

import functools
import hashlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.role.commands import output

# The lists and the packages, when this machine's cache has none of them.
APT_TIMEOUT_S = 600


def download(folder: Path, names: Sequence[str]) -> None:
    """Fill `folder` with all that this machine would download to install `names`, and an index.

    The hosts of the lab begin with this machine's packages, so it is what they lack.
    """
    (folder / "partial").mkdir(parents=True)
    options = ["-o", f"Dir::Cache::archives={folder}", "-o", "APT::Sandbox::User=root"]
    install = ["install", "--download-only", "--yes", "--no-install-recommends", *names]
    output(["apt-get", "-qq", "update"], timeout_s=APT_TIMEOUT_S)
    output(["apt-get", "-qq", *options, *install], timeout_s=APT_TIMEOUT_S)
    (folder / "Packages").write_text("\n".join(_entry(deb) for deb in sorted(folder.glob("*.deb"))))


def _entry(deb: Path) -> str:
    with deb.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    fields = output(["dpkg-deb", "--field", str(deb)])
    return f"{fields}Filename: ./{deb.name}\nSize: {deb.stat().st_size}\nSHA256: {digest}\n"


class _Silent(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """No one reads it."""


@contextmanager
def served(folder: Path, address: str) -> Iterator[str]:
    """A line for sources.list that leads to `folder`, for the block."""
    handler = functools.partial(_Silent, directory=str(folder))
    with ThreadingHTTPServer((address, 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"deb [trusted=yes] http://{address}:{server.server_port} ./\n"
        finally:
            server.shutdown()
            thread.join()
