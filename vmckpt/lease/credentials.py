"""A host's credentials for etcd: a TOML file on that host, which names other files.

    authority = "ca.pem"                 the CA to trust; default: the system's
    certificate = "client.pem"           client certificate and key, if etcd requires them
    key = "client-key.pem"
    user = "vmckpt"                      if etcd requires a user; the password is in a file
    password_file = "etcd-password"

Relative paths are relative to its directory. With a user, etcd accepts client certificates over its
JSON gateway only if their subject has no common name ("CommonName ... will be ignored"). Secrets
are in files that only their owner can read, never on a command line or in the environment.
"""

import ssl
import stat
from dataclasses import dataclass, fields
from pathlib import Path

from vmckpt.errors import UsageError
from vmckpt.foreign import parse_toml


@dataclass(frozen=True, slots=True)
class EtcdCredentials:
    """The file's content, with absolute paths."""

    authority: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    user: str = ""
    password_file: Path | None = None

    def tls(self) -> ssl.SSLContext:
        """The TLS context for https. Raises UsageError."""
        try:
            context = ssl.create_default_context(cafile=self.authority)
            if self.certificate is not None:
                context.load_cert_chain(self.certificate, self.key)
        except OSError as exc:  # includes ssl.SSLError
            raise _unusable(
                str(exc), "give files in PEM: the authority's certificate, a client's, and its key"
            ) from exc
        return context

    def password(self) -> str:
        """The user's password. Raises UsageError."""
        if self.password_file is None:
            return ""
        try:
            password = self.password_file.read_text().rstrip("\n")
        except (OSError, ValueError) as exc:
            raise _unusable(str(exc), "put the password there, alone on its line") from exc
        return password


def read_credentials(path: Path) -> EtcdCredentials:
    """Read a credentials file. Raises UsageError, also if others could read secrets."""
    try:
        reply = parse_toml(path.read_text())
    except (OSError, ValueError) as exc:  # includes MalformedError
        raise _unusable(f"{path}: {exc}", "write it as docs/replicate.md says under etcd") from exc
    names = {field.name for field in fields(EtcdCredentials)}
    if wrong := [name for name, value in reply.items() if not _is_right(name, value, names)]:
        why = f"{path}: {', '.join(wrong)} is unknown, or not text"
        raise _unusable(why, f"it has {', '.join(sorted(names))}")
    for one, other in (("certificate", "key"), ("user", "password_file")):
        if (one in reply) != (other in reply):
            raise _unusable(f"{path}: {one} and {other} go together", "give both, or neither")
    paths = {name: path.parent / reply[name] for name in reply if name != "user"}
    for name in ("key", "password_file"):
        if name in paths:
            _require_private(paths[name])
    return EtcdCredentials(**paths, user=reply.get("user", ""))


def _is_right(name: str, value: object, names: set[str]) -> bool:
    return name in names and isinstance(value, str) and bool(value)


def _require_private(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except OSError as exc:
        raise _unusable(str(exc), "put the file there") from exc
    if stat.S_IMODE(mode) & 0o077:
        raise _unusable(f"others may read {path}", f"chmod 600 {path}")


def _unusable(why: str, remedy: str) -> UsageError:
    return UsageError("the credentials for etcd cannot be used", why=why, remedy=remedy)
