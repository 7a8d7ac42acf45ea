"""Certificates that QEMU's user cannot read: `host check` and the checks of a migration say so."""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.fake_libvirtd import FakeLibvirtd
from vmckpt.hosts.host import Completed
from vmckpt.hosts.inventory.paste import Paste
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.pki.ca import issue, make_ca
from vmckpt.hosts.pki.identity import FILES, pki_dir
from vmckpt.options.migration import MigrationOptions
from vmckpt.preflight.domains import checks
from vmckpt.preflight.domains.certificates import QEMU_CONF, unreadable
from vmckpt.preflight.finding import OK, REFUSE, WARN
from vmckpt.preflight.host import libvirtd
from vmckpt.preflight.migration.encryption import Scheme

pytestmark = pytest.mark.contract
USER = 64055
CAPABILITIES = (
    "<capabilities><host><secmodel><model>dac</model>"
    "<baselabel type='kvm'>+{0}:+{0}</baselabel></secmodel></host></capabilities>"
)


class Site(LocalHost):
    """A host whose QEMUs run as USER, who cannot read the files that `closed` names."""

    closed: tuple[str, ...] = ()

    async def user_id(self) -> int:
        return 0

    async def read_text(self, path: Path) -> str | None:
        if path == QEMU_CONF:
            return f'migrate_tls_x509_cert_dir = "{pki_dir(self)}"\n'
        return await super().read_text(path)

    async def run(self, argv: Sequence[str], timeout_s: float = 10.0) -> Completed:
        assert argv[:3] == ["setpriv", "--reuid", str(USER)]
        unread = [path for path in argv[6:] if Path(path).name in self.closed]
        return Completed(0, "".join(f"{path}\n" for path in unread), "")


@pytest.fixture
def sites(tmp_path: Path) -> tuple[Site, Site]:
    make_ca(tmp_path / "operator")
    found = Site("a", tmp_path / "a", "127.0.0.1"), Site("b", tmp_path / "b", "127.0.0.2")
    for site in found:
        asyncio.run(issue(tmp_path / "operator", site))
    return found


def test_copies_that_name_an_earlier_address_are_told_apart(sites: tuple[Site, Site]) -> None:
    """`vmckpt pki issue` changes only what they were copied from."""
    moved = Site("a", sites[0].state_dir, "192.0.2.1")
    found = asyncio.run(libvirtd._encrypts(moved, Paste(moved, root=True), None))
    assert (found.code, found.verdict) == ("libvirt-certificates", WARN)
    assert "does not name its address 192.0.2.1" in found.reason
    assert "vmckpt pki issue a" in found.remedy


@pytest.mark.parametrize("name", FILES)
def test_host_check_names_each_file_that_qemus_user_cannot_read(
    sites: tuple[Site, Site], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    host = sites[0]
    paste = Paste(host, root=True)
    assert asyncio.run(libvirtd._encrypts(host, paste, USER)).verdict == OK
    monkeypatch.setattr(Site, "closed", (name,))
    found = asyncio.run(libvirtd._encrypts(host, paste, USER))
    assert (found.code, found.verdict) == ("libvirt-certificates", WARN)
    assert f"(uid {USER}) cannot read {name} in {pki_dir(host)}" in found.reason
    assert f"install -o {USER}" in found.remedy
    # Root reads it.
    assert asyncio.run(libvirtd._encrypts(host, paste, None)).verdict == OK


@pytest.mark.parametrize(
    ("closed", "refusing"),
    [("ca-cert.pem", "ab"), ("client-key.pem", "a"), ("server-key.pem", "b")],
)
def test_a_migration_is_refused_where_a_qemu_cannot_read_what_it_needs(
    sites: tuple[Site, Site], monkeypatch: pytest.MonkeyPatch, closed: str, refusing: str
) -> None:
    ends = [FakeLibvirtd(site, capabilities=CAPABILITIES.format(USER)) for site in sites]
    options = MigrationOptions()

    encryption, found = asyncio.run(checks._encryption(ends[0], ends[1], options))
    assert (encryption.scheme, found.code, found.verdict) == (Scheme.CERTIFICATES, "tls", OK)

    monkeypatch.setattr(Site, "closed", (closed,))
    encryption, found = asyncio.run(checks._encryption(ends[0], ends[1], options))
    assert (encryption.scheme, found.verdict) == (Scheme.UNENCRYPTED, REFUSE)
    said = [name for name in "ab" if f"QEMU on {name} cannot encrypt" in found.reason]
    assert said == list(refusing)
    assert f"(uid {USER}) cannot read {closed} in" in found.reason
    assert found.remedy.startswith("vmckpt host check --fixes a b")

    roots = [FakeLibvirtd(site, capabilities=CAPABILITIES.format(0)) for site in sites]
    assert asyncio.run(checks._encryption(roots[0], roots[1], options))[1].verdict == OK


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_what_another_user_can_read_is_found_out_as_that_user() -> None:
    # Not in tmp_path, which is below a directory that only its owner enters.
    with TemporaryDirectory() as name:
        directory = Path(name)
        directory.chmod(0o755)
        host = LocalHost("a", directory, "127.0.0.1")
        for file, mode in (("open.pem", 0o644), ("key 1.pem", 0o600)):
            (directory / file).write_text("x")
            (directory / file).chmod(mode)
        names = ("open.pem", "key 1.pem", "missing.pem")

        def found(user: int | None) -> list[str]:
            return asyncio.run(unreadable(host, user, directory, names))

        assert found(USER) == ["key 1.pem", "missing.pem"]
        assert found(None) == []
        directory.chmod(0o700)
        assert found(USER) == list(names)
