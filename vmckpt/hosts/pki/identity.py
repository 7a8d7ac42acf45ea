"""A host's credentials, and the obstacles to trust between two hosts."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vmckpt.errors import UsageError
from vmckpt.hosts.host import Host

if TYPE_CHECKING:
    from vmckpt.hosts.pki.certificate import Certificate

FILES = ("ca-cert.pem", "server-cert.pem", "server-key.pem", "client-cert.pem", "client-key.pem")
# The names that libvirt's client requires.
LIBVIRT_FILES = {
    "cacert.pem": "ca-cert.pem",
    "clientcert.pem": "client-cert.pem",
    "clientkey.pem": "client-key.pem",
}


class Identity(NamedTuple):
    """A host's certificates: the `ca` that it trusts, and its own `server` and `client`."""

    ca: "Certificate"
    server: "Certificate"
    client: "Certificate"


class TlsObstacle(NamedTuple):
    """A reason why two hosts cannot connect over TLS, and its fix."""

    reason: str
    remedy: str


def pki_dir(host: Host) -> Path:
    """The directory for QEMU's tls-creds-x509 on this host."""
    return host.state_dir / "pki"


def libvirt_dir(host: Host) -> Path:
    """The same certificates for libvirt's client: the `pkipath` of its URIs."""
    return pki_dir(host) / "libvirt"


async def read_identity(host: Host, directory: Path | None = None) -> Identity | None:
    """The host's certificates, in `pki_dir` or another directory; None if it has none at all.

    Raises UsageError if some of the files are missing or damaged.
    """
    directory = directory or pki_dir(host)
    found = await asyncio.gather(*(host.exists(directory / name) for name in FILES))
    there = [name for name, is_there in zip(FILES, found, strict=True) if is_there]
    if not there:
        return None
    if missing := sorted(set(FILES) - set(there)):
        raise _unusable(host, f"{', '.join(missing)} missing in {directory}")
    from vmckpt.hosts.pki.certificate import parse_certificate

    paths = (directory / f"{name}-cert.pem" for name in ("ca", "server", "client"))
    texts = await asyncio.gather(*(host.read_text(path) for path in paths))
    try:
        return Identity(*(parse_certificate(text or "") for text in texts))
    except (OSError, ValueError) as exc:
        raise _unusable(host, f"in {directory}: {exc}") from exc


def fault_of(identity: Identity, address: str, now_unix_s: float) -> str | None:
    """Why a host whose migrations come in at `address` cannot use these certificates, if so."""
    for certificate in identity:
        if fault := certificate.fault(now_unix_s):
            return f"{certificate.subject}: {fault}"
    if not identity.server.is_for(address):
        return f"the certificate does not name its address {address}"
    return None


def obstacles(
    source: tuple[Host, Identity],
    destination: tuple[Host, Identity],
    now_unix_s: float,
    name: str | None = None,
) -> list[TlsObstacle]:
    """Every reason why `source` cannot connect to `destination` with mutual TLS.

    The destination's certificate must be for `name`; None: for its address.
    """
    from vmckpt.hosts.pki.certificate import is_issued_by

    (from_host, ours), (to_host, theirs) = source, destination
    found = []
    for host, kind, certificate, judge in (
        (from_host, "client", ours.client, theirs.ca),
        (to_host, "server", theirs.server, ours.ca),
    ):
        again = f"vmckpt pki issue {host.name}"
        if fault := certificate.fault(now_unix_s):
            reason = f"the {kind} certificate of {host.name} does not hold: {fault}"
            found.append(TlsObstacle(reason, again))
        if not is_issued_by(certificate, judge):
            other = to_host if host is from_host else from_host
            reason = f"{other.name} does not trust the CA of {host.name}"
            both = f"vmckpt pki issue {from_host.name} {to_host.name}"
            found.append(TlsObstacle(reason, f"issue both certificates from one CA: {both}"))
        elif fault := judge.fault(now_unix_s):
            anew = "create a new CA, and issue every host's certificates again"
            found.append(TlsObstacle(f"the authority of {host.name} does not hold: {fault}", anew))
    if name is not None:
        if not theirs.server.is_for(name):
            reason = f"the certificate of {to_host.name} is not for '{name}'"
            found.append(
                TlsObstacle(reason, "name in --tls-destination whom it is for, or leave it out")
            )
    elif not theirs.server.is_for(to_host.migration_address):
        address = to_host.migration_address
        reason = f"the certificate of {to_host.name} does not name its address {address}"
        found.append(TlsObstacle(reason, f"vmckpt pki issue {to_host.name}"))
    return found


def _unusable(host: Host, why: str) -> UsageError:
    return UsageError(
        f"the certificates of {host.name} cannot be used",
        why=why,
        remedy=f"vmckpt pki issue {host.name}",
    )
