"""A key and certificate for one connection, identified by fingerprint, without a CA."""

import datetime
from hashlib import sha256
from typing import NamedTuple

VALID = datetime.timedelta(days=30)


class OneTime(NamedTuple):
    """PEM texts, and the SHA-256 of the certificate's DER, as hex digits."""

    key: str
    certificate: str
    fingerprint: str


def make_one_time() -> OneTime:
    """A new one, valid for a month before and after now: clocks differ, and only the fingerprint
    counts.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "vmckpt link")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - VALID)
        .not_valid_after(now + VALID)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return OneTime(
        private.decode(),
        certificate.public_bytes(Encoding.PEM).decode(),
        sha256(certificate.public_bytes(Encoding.DER)).hexdigest(),
    )
