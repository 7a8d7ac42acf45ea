"""The file by which a host proves to etcd who it is."""

from pathlib import Path

import pytest

from vmckpt.errors import UsageError
from vmckpt.hosts.pki.one_time import make_one_time
from vmckpt.lease.credentials import EtcdCredentials, read_credentials
from vmckpt.lease.gateway import Gateway

WHOLE = """
authority = "ca.pem"
certificate = "client.pem"
key = "client-key.pem"
user = "vmckpt"
password_file = "/etc/secret"
"""


def private(path: Path, text: str = "") -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


def test_paths_count_from_the_file(tmp_path: Path) -> None:
    private(tmp_path / "client-key.pem")
    secret = private(tmp_path / "secret", "s3cret\n")
    file = private(tmp_path / "etcd.toml", WHOLE.replace("/etc/secret", str(secret)))
    read = read_credentials(file)
    assert read == EtcdCredentials(
        tmp_path / "ca.pem", tmp_path / "client.pem", tmp_path / "client-key.pem", "vmckpt", secret
    )
    assert read.password() == "s3cret"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("authority = 1", "not text"),
        ('authrity = "ca.pem"', "authrity"),
        ("authority", "etcd.toml"),
        ('user = "vmckpt"', "go together"),
        ('certificate = "client.pem"', "go together"),
        ('certificate = "client.pem"\nkey = "nowhere.pem"', "No such file"),
        ('user = "vmckpt"\npassword_file = "open"', "others may read"),
    ],
)
def test_what_is_wrong_with_it_is_said(tmp_path: Path, text: str, why: str) -> None:
    private(tmp_path / "open").chmod(0o644)
    with pytest.raises(UsageError) as refused:
        read_credentials(private(tmp_path / "etcd.toml", text))
    assert why in refused.value.why


def test_a_missing_file_and_bad_certificates_are_no_traceback(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        read_credentials(tmp_path / "etcd.toml")
    with pytest.raises(UsageError, match="cannot be used"):
        EtcdCredentials(authority=private(tmp_path / "ca.pem", "none")).tls()
    made = make_one_time()
    authority = private(tmp_path / "ca.pem", made.certificate)
    assert EtcdCredentials(authority=authority).tls().check_hostname


def test_credentials_never_go_in_clear() -> None:
    with pytest.raises(UsageError) as refused:
        Gateway("http://192.0.2.1:2379", EtcdCredentials())
    assert "https" in refused.value.why
    Gateway("https://192.0.2.1:2379", EtcdCredentials())
