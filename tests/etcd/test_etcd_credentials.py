"""An etcd that takes certificates and passwords: who has them is served, no one else."""

import asyncio
import base64
import datetime
import ipaddress
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from tests.etcd_cluster import Cluster, Papers, running
from vmckpt.lease.credentials import EtcdCredentials, read_credentials
from vmckpt.lease.etcd_store import EtcdStore
from vmckpt.lease.gateway import Gateway
from vmckpt.lease.record import LeaseRecord, LeaseSpan
from vmckpt.lease.store import NONE_YET, ArbiterDownError

FIRST = LeaseRecord(1, "lab-a", 1, LeaseSpan(1.0, 0.05))


def make_papers(folder: Path) -> Papers:
    """An authority that is its own and only certificate's, for 127.0.0.1 and for clients.

    It has no common name: etcd's gateway takes no client that has one together with a user.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.ORGANIZATION_NAME, "etcd of a test")])
    now = datetime.datetime.now(datetime.UTC)
    here = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([here]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    papers = Papers(folder / "ca.pem", folder / "ca.pem", folder / "key.pem")
    papers.authority.write_bytes(made.public_bytes(Encoding.PEM))
    papers.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    papers.key.chmod(0o600)
    return papers


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, EtcdCredentials]]:
    """A member that wants both, and what its user `vmckpt` has, read from a file."""
    folder = tmp_path_factory.mktemp("etcd")
    papers = make_papers(folder)
    (folder / "password").write_text("s3cret\n")
    (folder / "password").chmod(0o600)
    (folder / "etcd.toml").write_text(
        'authority = "ca.pem"\ncertificate = "ca.pem"\nkey = "key.pem"\n'
        'user = "vmckpt"\npassword_file = "password"\n'
    )
    with running(folder, 1, papers) as cluster:
        credentials = read_credentials(folder / "etcd.toml")
        asyncio.run(_admit(Gateway(cluster.urls[0], replace(credentials, user=""))))
        yield cluster, credentials


async def _admit(root: Gateway) -> None:
    """A user who may touch leases and nothing else; then no one else may touch anything."""
    prefix = b"/vmckpt/leases/"
    permission = {
        "permType": "READWRITE",
        "key": base64.b64encode(prefix).decode(),
        "range_end": base64.b64encode(prefix[:-1] + b"0").decode(),
    }
    asked: list[tuple[str, dict[str, Any]]] = [
        ("user/add", {"name": "root", "password": "r00t"}),
        ("role/add", {"name": "root"}),
        ("user/grant", {"user": "root", "role": "root"}),
        ("user/add", {"name": "vmckpt", "password": "s3cret"}),
        ("role/add", {"name": "leases"}),
        ("role/grant", {"name": "leases", "perm": permission}),
        ("user/grant", {"user": "vmckpt", "role": "leases"}),
        ("enable", {}),
    ]
    for verb, words in asked:
        await root.ask(f"/v3/auth/{verb}", words)


def store(cluster: Cluster, credentials: EtcdCredentials, timeout_s: float = 20.0) -> EtcdStore:
    return EtcdStore([Gateway(url, credentials) for url in cluster.urls], timeout_s=timeout_s)


def test_who_has_credentials_is_served_also_by_a_member_that_started_anew(
    known: tuple[Cluster, EtcdCredentials],
) -> None:
    cluster, credentials = known

    async def main() -> None:
        kept = store(cluster, credentials)
        written = await kept.replace("web", FIRST, over=NONE_YET)
        assert await kept.read("web") == written
        with cluster.without(*cluster.members):
            pass  # it forgets whom it knew
        assert await kept.read("web") == written

    asyncio.run(main())


def test_who_has_none_is_not(known: tuple[Cluster, EtcdCredentials], tmp_path: Path) -> None:
    cluster, credentials = known
    wrong = tmp_path / "password"
    wrong.write_text("guess")
    strangers = {
        "authentication failed": replace(credentials, password_file=wrong),
        "permission denied": replace(credentials, user="", password_file=None),
        "certificate": replace(credentials, certificate=None, key=None),
        "CERTIFICATE_VERIFY_FAILED": replace(credentials, authority=None),
    }
    for why, stranger in strangers.items():
        with pytest.raises(ArbiterDownError) as down:
            asyncio.run(store(cluster, stranger, 6.0).read("web"))
        assert why in down.value.why
