"""Read certificates. The only module that parses X.509; `cryptography` is imported on use."""

import time
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address

DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class Certificate:
    """One certificate. Times are Unix seconds; `fingerprint` is the SHA-256 of its DER, hex.

    `subject` is the distinguished name as QEMU's authorization objects compare it (RFC 4514);
    `names` are the DNS names and IP addresses for which it is valid.
    """

    subject: str
    names: frozenset[str]
    not_before_unix_s: float
    not_after_unix_s: float
    fingerprint: str
    pem: str = field(repr=False)

    def days_left(self, now_unix_s: float) -> int:
        """Whole days until it expires; negative if it has expired."""
        return int((self.not_after_unix_s - now_unix_s) // DAY_S)

    def fault(self, now_unix_s: float) -> str | None:
        """Why it is not valid now, None if it is."""
        if now_unix_s >= self.not_after_unix_s:
            return f"it expired on {time.strftime('%Y-%m-%d', time.gmtime(self.not_after_unix_s))}"
        if now_unix_s < self.not_before_unix_s:
            return "it is not valid yet: compare the clocks"
        return None

    def is_for(self, address: str) -> bool:
        """Whether it names this IP address or DNS name."""
        return canonical(address) in self.names


def parse_certificate(pem: str) -> Certificate:
    """The first certificate of a PEM text. Raises ValueError on anything else."""
    try:
        return _parsed(pem)
    except ValueError:
        raise
    except Exception as exc:  # `cryptography` has no common error class
        raise ValueError(f"not a valid certificate: {exc}") from exc


def _parsed(pem: str) -> Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives.hashes import SHA256

    found = x509.load_pem_x509_certificate(pem.encode())
    names: set[str] = set()
    with suppress(x509.ExtensionNotFound):  # a CA names no host
        alternatives = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        names |= {canonical(name) for name in alternatives.get_values_for_type(x509.DNSName)}
        names |= {str(address) for address in alternatives.get_values_for_type(x509.IPAddress)}
    return Certificate(
        subject=found.subject.rfc4514_string(),
        names=frozenset(names),
        not_before_unix_s=found.not_valid_before_utc.timestamp(),
        not_after_unix_s=found.not_valid_after_utc.timestamp(),
        fingerprint=found.fingerprint(SHA256()).hex(),
        pem=pem,
    )


def is_issued_by(certificate: Certificate, ca: Certificate) -> bool:
    """Whether the CA's key signed the certificate."""
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm

    issued = x509.load_pem_x509_certificate(certificate.pem.encode())
    issuer = x509.load_pem_x509_certificate(ca.pem.encode())
    try:
        issued.verify_directly_issued_by(issuer)
    except (InvalidSignature, UnsupportedAlgorithm, ValueError, TypeError):
        return False
    return True


def canonical(name: str) -> str:
    """An IP address in canonical form, a DNS name in lower case."""
    try:
        return str(ip_address(name))
    except ValueError:
        return name.lower()
