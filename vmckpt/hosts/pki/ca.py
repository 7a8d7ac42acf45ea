"""The operator's CA: it is created once, and issues certificates for hosts.

Its key stays in STATE/pki/ca/ca-key.pem (0600, in a directory of mode 0700) and is read only here.
"""

import datetime
import time
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from vmckpt.errors import NotFoundError, RefusedError, StorageError, UsageError
from vmckpt.hosts.host import Host
from vmckpt.hosts.pki.certificate import Certificate, canonical, parse_certificate
from vmckpt.hosts.pki.dh_group import DH_PARAMS, DH_PARAMS_FILE
from vmckpt.hosts.pki.identity import (
    LIBVIRT_FILES,
    Identity,
    libvirt_dir,
    pki_dir,
    read_identity,
)
from vmckpt.state.durable import write_durably

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

CA_DAYS = 3650
HOST_DAYS = 365
# A host whose clock is behind by less than this accepts a new certificate at once.
_BACKDATED = datetime.timedelta(hours=1)


def make_ca(state_dir: Path, *, days: int = CA_DAYS) -> Certificate:
    """Create a CA that is valid for `days`. Raises RefusedError if there is one already."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

    directory = _directory(state_dir)
    if has_ca(state_dir):
        raise RefusedError(
            "there is a certificate authority already",
            why=f"its key is {directory / 'ca-key.pem'}; every issued certificate depends on it",
            remedy=f"to start again, remove {directory} and issue every host's certificates again",
        )
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(f"vmckpt CA {time.strftime('%Y-%m-%d', time.gmtime())}")
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = (
        _builder(name, name, key, days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    pem = _signed(certificate, key)
    directory.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    directory.mkdir(exist_ok=True, mode=0o700)
    # The key comes last: its presence shows that the CA is complete.
    write_durably(directory / "ca-cert.pem", pem)
    write_durably(directory / "ca-key.pem", _key_pem(key))
    return parse_certificate(pem)


def has_ca(state_dir: Path) -> bool:
    """Whether there is a CA."""
    return ca_key(state_dir).exists()


def ca_key(state_dir: Path) -> Path:
    """The path of its key, whose presence shows that the CA is complete."""
    return _directory(state_dir) / "ca-key.pem"


def read_ca(state_dir: Path) -> Certificate | None:
    """The CA's own certificate, None if there is no CA. Raises UsageError."""
    directory = _directory(state_dir)
    if not has_ca(state_dir):
        return None
    try:
        return parse_certificate((directory / "ca-cert.pem").read_text())
    except (OSError, ValueError) as exc:
        raise _damaged(directory / "ca-cert.pem", exc) from exc


async def issue(state_dir: Path, host: Host, *, days: int = HOST_DAYS) -> Identity:
    """Issue keys and certificates for a host in its pki directory, replacing any it has.

    They name the host and its migration address, and are valid for `days`, but no longer than the
    CA. A QEMU that uses the old ones keeps them. Raises NotFoundError (no CA), UsageError (its
    files are damaged), RefusedError (it has expired), StorageError.
    """
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    authority = read_ca(state_dir)
    if authority is None:
        raise NotFoundError(
            "there is no certificate authority",
            why=f"{_directory(state_dir) / 'ca-key.pem'} does not exist",
            remedy="make one: vmckpt pki init",
        )
    if fault := authority.fault(time.time()):
        raise RefusedError(
            "the certificate authority can issue nothing",
            why=fault,
            remedy=f"remove {_directory(state_dir)}, run `vmckpt pki init` and issue every host's "
            "certificates again",
        )
    ca_key = _read_key(_directory(state_dir) / "ca-key.pem")
    issuer = x509.load_pem_x509_certificate(authority.pem.encode())
    parts = {"ca-cert.pem": authority.pem, DH_PARAMS_FILE: DH_PARAMS}
    for role, usage in (
        ("server", ExtendedKeyUsageOID.SERVER_AUTH),
        ("client", ExtendedKeyUsageOID.CLIENT_AUTH),
    ):
        key, pem = _host_certificate(host, issuer, ca_key, usage, days)
        parts |= {f"{role}-key.pem": _key_pem(key), f"{role}-cert.pem": pem}
    directory = pki_dir(host)
    await host.make_dir(directory)
    for name, text in parts.items():
        await host.write_text(directory / name, text)
    await host.make_dir(libvirt_dir(host))
    for name, qemus in LIBVIRT_FILES.items():
        await host.write_text(libvirt_dir(host) / name, parts[qemus])
    identity = await read_identity(host)
    if identity is None:
        raise StorageError(
            f"the certificates of {host.name} are gone",
            why=f"{directory} was removed",
            remedy="issue them again",
        )
    return identity


def _host_certificate(
    host: Host,
    ca: "x509.Certificate",
    ca_key: "EllipticCurvePrivateKey",
    usage: "x509.ObjectIdentifier",
    days: int,
) -> tuple["EllipticCurvePrivateKey", str]:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    names: list[x509.GeneralName] = [x509.DNSName(host.name)]
    address = canonical(host.migration_address)
    try:
        names.append(x509.IPAddress(ip_address(address)))
    except ValueError:
        if address != host.name:
            names.append(x509.DNSName(address))
    # No key usage: QEMU before 10.1 requires key encipherment, which an EC key must not claim.
    return key, _signed(
        _builder(_name(host.name), ca.subject, key, days, until=ca.not_valid_after_utc)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False
        ),
        ca_key,
    )


def _builder(
    subject: "x509.Name",
    issuer: "x509.Name",
    key: "EllipticCurvePrivateKey",
    days: int,
    *,
    until: datetime.datetime | None = None,
) -> "x509.CertificateBuilder":
    from cryptography import x509

    now = datetime.datetime.now(datetime.UTC)
    try:
        end = now + datetime.timedelta(days=days)
    except OverflowError as exc:
        raise UsageError(
            f"no certificate can be valid for {days} days", why=str(exc), remedy="give fewer days"
        ) from exc
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(min(end, until) if until else end)
    )


def _signed(builder: "x509.CertificateBuilder", key: "EllipticCurvePrivateKey") -> str:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import Encoding

    return builder.sign(key, SHA256()).public_bytes(Encoding.PEM).decode()


def _name(common_name: str) -> "x509.Name":
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _key_pem(key: "EllipticCurvePrivateKey") -> str:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


def _read_key(path: Path) -> "EllipticCurvePrivateKey":
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as exc:
        raise _damaged(path, exc) from exc
    if not isinstance(key, EllipticCurvePrivateKey):
        raise _damaged(path, TypeError("it is not an elliptic-curve key"))
    return key


def _directory(state_dir: Path) -> Path:
    return state_dir / "pki" / "ca"


def _damaged(path: Path, exc: Exception) -> UsageError:
    return UsageError(
        f"{path} cannot be used",
        why=f"{type(exc).__name__}: {exc}",
        remedy=f"restore it from a backup, or remove {path.parent} and run `vmckpt pki init`",
    )
