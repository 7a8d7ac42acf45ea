"""Certificates of hosts, and when a migration between two hosts is encrypted, refused or clear."""

import asyncio
import itertools
import json
import ssl
import stat
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faulty_host import FaultyHost
from vmckpt.errors import NotFoundError, RefusedError, UsageError
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory.inventory import find_host
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.pki.ca import issue, make_ca, read_ca
from vmckpt.hosts.pki.certificate import DAY_S, is_issued_by, parse_certificate
from vmckpt.hosts.pki.identity import FILES, Identity, obstacles, pki_dir, read_identity
from vmckpt.options.migration import Tls
from vmckpt.preflight.migration.encryption import Scheme, choose

ADDRESSES = {"a": "10.77.1.1", "b": "fd00:0:0::B"}


Two = tuple[LocalHost, LocalHost]


@pytest.fixture
def state(tmp_path: Path) -> Path:
    state = tmp_path / "operator"
    make_ca(state)
    return state


@pytest.fixture
def hosts(tmp_path: Path) -> Two:
    a, b = (LocalHost(name, tmp_path / name, address) for name, address in ADDRESSES.items())
    return a, b


def issued(state: Path, *hosts: Host) -> list[Identity]:
    return [asyncio.run(issue(state, host)) for host in hosts]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_authoritys_key_is_its_owners_alone(state: Path) -> None:
    ca = state / "pki" / "ca"
    assert [mode(path) for path in (state / "pki", ca, ca / "ca-key.pem")] == [0o700, 0o700, 0o600]


def test_there_is_one_authority(state: Path) -> None:
    before = read_ca(state)
    with pytest.raises(RefusedError) as refused:
        make_ca(state)
    assert str(state / "pki" / "ca") in refused.value.remedy
    assert read_ca(state) == before


def test_a_certificate_names_the_host_and_its_address(state: Path, hosts: Two) -> None:
    a, b = issued(state, *hosts)
    assert a.server.names == {"a", "10.77.1.1"}
    assert b.server.names == {"b", "fd00::b"}
    assert (a.server.subject, a.client.subject) == ("CN=a", "CN=a")
    assert b.server.is_for("FD00::b")
    assert not b.server.is_for("fd00::c")
    named = LocalHost("c", hosts[0].state_dir, "Host-C.example")
    assert asyncio.run(issue(state, named)).server.names == {"c", "host-c.example"}


def test_a_hosts_keys_are_private_and_the_authoritys_key_stays(state: Path, hosts: Two) -> None:
    asyncio.run(issue(state, hosts[0]))
    directory = pki_dir(hosts[0])
    assert mode(directory) == 0o700
    assert {mode(path) for path in directory.rglob("*.pem")} == {0o600}
    assert mode(directory / "libvirt") == 0o700
    secret = (state / "pki" / "ca" / "ca-key.pem").read_text()
    assert all(path.read_text() != secret for path in directory.rglob("*.pem"))


def test_issuing_again_replaces_keys_and_certificates(state: Path, hosts: Two) -> None:
    before = asyncio.run(issue(state, hosts[0]))
    keys = [(pki_dir(hosts[0]) / name).read_text() for name in FILES if "key" in name]
    after = asyncio.run(issue(state, hosts[0]))
    assert after == asyncio.run(read_identity(hosts[0]))
    assert after.ca == before.ca
    assert {after.server.fingerprint, after.client.fingerprint}.isdisjoint(
        {before.server.fingerprint, before.client.fingerprint}
    )
    assert keys != [(pki_dir(hosts[0]) / name).read_text() for name in FILES if "key" in name]


def test_a_certificate_never_outlives_its_authority(tmp_path: Path) -> None:
    ca = make_ca(tmp_path / "s", days=10)
    identity = asyncio.run(
        issue(tmp_path / "s", LocalHost("a", tmp_path / "a", "10.0.0.1"), days=365)
    )
    assert identity.server.not_after_unix_s == ca.not_after_unix_s


def test_without_an_authority_nothing_is_issued(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no certificate authority"):
        asyncio.run(issue(tmp_path / "s", LocalHost("a", tmp_path / "a", "10.0.0.1")))
    assert read_ca(tmp_path / "s") is None
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("name", ["ca-key.pem", "ca-cert.pem"])
def test_a_damaged_authority_is_named(state: Path, hosts: Two, name: str) -> None:
    path = state / "pki" / "ca" / name
    path.write_text("-----BEGIN NONSENSE-----")
    with pytest.raises(UsageError) as damaged:
        asyncio.run(issue(state, hosts[0]))
    assert str(path) in damaged.value.what
    assert asyncio.run(read_identity(hosts[0])) is None


@pytest.mark.parametrize("missing", FILES)
def test_half_of_the_files_are_not_none_of_them(state: Path, hosts: Two, missing: str) -> None:
    issued(state, *hosts)
    (pki_dir(hosts[1]) / missing).unlink()
    with pytest.raises(UsageError) as unusable:
        asyncio.run(read_identity(hosts[1]))
    assert missing in unusable.value.why
    with pytest.raises(RefusedError, match="b cannot be used"):
        asyncio.run(choose(Tls.AUTO, *hosts))


def test_no_certificate_is_an_error() -> None:
    for text in ("", "hello", "-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----"):
        with pytest.raises(ValueError, match=r".+"):
            parse_certificate(text)


@pytest.mark.filterwarnings("ignore:Parsed a serial number")
def test_a_certificate_that_a_host_made_up_is_none_or_proves_nothing(
    state: Path, hosts: Two
) -> None:
    """Of another version, with a field twice or of no known type, of another kind of key."""
    ca = read_ca(state)
    assert ca is not None
    parsed = 0
    for real in (asyncio.run(issue(state, hosts[0])).server, ca):
        der = ssl.PEM_cert_to_DER_cert(real.pem)
        for location, value in itertools.product(range(len(der)), (0x01, 0x11, 0xA3)):
            pem = ssl.DER_cert_to_PEM_cert(der[:location] + bytes([value]) + der[location + 1 :])
            try:
                found = parse_certificate(pem)
            except ValueError:
                continue
            parsed += 1
            is_issued_by(found, ca)
            is_issued_by(real, found)
    assert parsed > 100


def test_a_certificate_of_an_odd_name_is_none(state: Path, hosts: Two) -> None:
    """Bits in the place of the text "a"."""
    der = ssl.PEM_cert_to_DER_cert(asyncio.run(issue(state, hosts[0])).server.pem)
    assert b"\x0c\x01a" in der
    with pytest.raises(ValueError, match="not a valid certificate"):
        parse_certificate(ssl.DER_cert_to_PEM_cert(der.replace(b"\x0c\x01a", b"\x03\x01\0")))


def test_hosts_of_one_authority_trust_one_another(state: Path, hosts: Two) -> None:
    a, b = issued(state, *hosts)
    now = time.time()
    assert obstacles((hosts[0], a), (hosts[1], b), now) == []
    assert obstacles((hosts[1], b), (hosts[0], a), now) == []


def test_a_certificate_may_be_for_another_name_than_the_address(state: Path, hosts: Two) -> None:
    a, b = issued(state, *hosts)
    ends, now = ((hosts[0], a), (hosts[1], b)), time.time()
    assert obstacles(*ends, now, "b") == []
    assert "not for 'c.example'" in obstacles(*ends, now, "c.example")[0].reason
    # The address plays no part then.
    moved = (replace(hosts[1], migration_address="10.9.9.9"), b)
    assert obstacles(ends[0], moved, now)
    assert obstacles(ends[0], moved, now, "b") == []


@pytest.mark.parametrize("days", [-1, 366])
def test_a_certificate_out_of_its_time_is_an_obstacle(state: Path, hosts: Two, days: int) -> None:
    a, b = issued(state, *hosts)
    found = obstacles((hosts[0], a), (hosts[1], b), time.time() + days * DAY_S)
    assert {o.remedy for o in found} >= {"vmckpt pki issue a", "vmckpt pki issue b"}


def test_an_expired_authority_vouches_for_nobody(tmp_path: Path, hosts: Two) -> None:
    make_ca(tmp_path / "s", days=1)
    a, b = issued(tmp_path / "s", *hosts)
    forever = time.time() + 400 * DAY_S
    a, b = (
        identity._replace(
            client=replace(identity.client, not_after_unix_s=forever),
            server=replace(identity.server, not_after_unix_s=forever),
        )
        for identity in (a, b)
    )
    found = obstacles((hosts[0], a), (hosts[1], b), time.time() + 2 * DAY_S)
    assert len(found) == 2
    assert all("authority" in o.reason for o in found)


def test_another_authority_is_an_obstacle(state: Path, tmp_path: Path, hosts: Two) -> None:
    make_ca(tmp_path / "other")
    a, b = asyncio.run(issue(state, hosts[0])), asyncio.run(issue(tmp_path / "other", hosts[1]))
    assert not is_issued_by(b.server, a.ca)
    found = obstacles((hosts[0], a), (hosts[1], b), time.time())
    assert len(found) == 2
    assert all("vmckpt pki issue a b" in o.remedy for o in found)


def test_a_moved_hosts_certificate_is_an_obstacle(state: Path, hosts: Two) -> None:
    a, b = issued(state, *hosts)
    moved = replace(hosts[1], migration_address="10.77.1.9")
    found = obstacles((hosts[0], a), (moved, b), time.time())
    assert [o.remedy for o in found] == ["vmckpt pki issue b"]
    assert "10.77.1.9" in found[0].reason


@pytest.mark.parametrize(
    ("tls", "certified", "scheme"),
    [
        (Tls.AUTO, "", Scheme.UNENCRYPTED),
        (Tls.AUTO, "ab", Scheme.CERTIFICATES),
        (Tls.AUTO, "a", None),
        (Tls.AUTO, "b", None),
        (Tls.REQUIRE, "", None),
        (Tls.REQUIRE, "a", None),
        (Tls.REQUIRE, "ab", Scheme.CERTIFICATES),
        (Tls.PSK, "", Scheme.ONE_TIME_KEY),
        (Tls.PSK, "ab", Scheme.ONE_TIME_KEY),
        (Tls.OFF, "ab", Scheme.UNENCRYPTED),
    ],
)
def test_who_has_certificates_and_what_is_asked_decide(
    state: Path, hosts: Two, tls: Tls, certified: str, scheme: Scheme | None
) -> None:
    issued(state, *(host for host in hosts if host.name in certified))
    if scheme is None:
        with pytest.raises(RefusedError) as refused:
            asyncio.run(choose(tls, *hosts))
        without = [host.name for host in hosts if host.name not in certified]
        assert f"vmckpt pki issue {' '.join(without)};" in refused.value.remedy
        return
    chosen = asyncio.run(choose(tls, *hosts))
    assert chosen.scheme is scheme
    assert chosen.peer == ("CN=a" if scheme is Scheme.CERTIFICATES else "")


@pytest.mark.parametrize(
    ("tls", "certified", "scheme"),
    [
        (Tls.AUTO, "ab", Scheme.ONE_TIME_KEY),
        (Tls.AUTO, "a", Scheme.ONE_TIME_KEY),
        (Tls.AUTO, "", Scheme.UNENCRYPTED),
        (Tls.REQUIRE, "ab", Scheme.CERTIFICATES),
        (Tls.OFF, "ab", Scheme.UNENCRYPTED),
    ],
)
def test_a_vms_user_gets_no_hosts_key_unasked(
    state: Path, hosts: Two, tls: Tls, certified: str, scheme: Scheme
) -> None:
    issued(state, *(host for host in hosts if host.name in certified))
    assert asyncio.run(choose(tls, *hosts, own_users=True)).scheme is scheme
    far = FaultyHost("b", hosts[1].state_dir, "10.0.0.2", is_this_machine=False)
    if tls is Tls.AUTO:  # to another machine nothing goes unencrypted
        found = asyncio.run(choose(tls, hosts[0], far, own_users=True))
        assert found.scheme is Scheme.ONE_TIME_KEY


def test_a_name_that_a_certificate_is_for_asks_for_certificates(state: Path, hosts: Two) -> None:
    issued(state, *hosts)
    name = hosts[1].migration_address
    found = asyncio.run(choose(Tls.AUTO, *hosts, name=name, own_users=True))
    assert found.scheme is Scheme.CERTIFICATES


def test_nothing_goes_in_clear_to_another_machine_unasked(
    hosts: Two,
) -> None:
    far = FaultyHost("b", hosts[1].state_dir, "10.0.0.2", is_this_machine=False)
    with pytest.raises(RefusedError, match="cannot be encrypted"):
        asyncio.run(choose(Tls.AUTO, hosts[0], far))
    assert asyncio.run(choose(Tls.OFF, hosts[0], far)).scheme is Scheme.UNENCRYPTED


def test_bad_certificates_never_mean_in_clear(state: Path, hosts: Two) -> None:
    issued(state, *hosts)
    with pytest.raises(RefusedError) as refused:
        asyncio.run(choose(Tls.AUTO, *hosts, time.time() + 366 * DAY_S))
    assert "expired" in refused.value.why


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, None), ([49152, 49160], (49152, 49160)), ([1, 65535], (1, 65535)), ([7, 7], (7, 7))],
)
def test_a_range_of_ports_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: object, expected: object
) -> None:
    assert host_with(tmp_path, monkeypatch, migration_ports=given).migration_ports == expected


@pytest.mark.parametrize(
    "wrong",
    [
        {"migration_ports": ports}
        for ports in ([], [1], [1, 2, 3], [0, 5], [5, 4], [1, 65536], ["1", "2"], [True, 2], 5)
    ]
    + [{"kind": "ssh"}, {"kind": None}],
)
def test_a_wrong_range_or_kind_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, object]
) -> None:
    with pytest.raises(UsageError, match="malformed"):
        host_with(tmp_path, monkeypatch, **wrong)


def host_with(state: Path, monkeypatch: pytest.MonkeyPatch, **entry: object) -> Host:
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(state))
    (state / "hosts").mkdir()
    full = {"state_dir": "/run/a", "migration_address": "10.77.1.1"} | entry
    (state / "hosts" / "a.json").write_text(json.dumps(full))
    return find_host("a")
