"""Snapshots of a domain, as a libvirtd tells of them that may say anything."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from tests.fake_libvirtd import FakeLibvirtd
from vmckpt.checkpoint import domain_snapshots
from vmckpt.errors import UsageError
from vmckpt.hosts.local import LocalHost
from vmckpt.vm.domains.inventory import Domain
from vmckpt.vm.domains.libvirtd import Libvirtd
from vmckpt.vm.domains.replies import DomainSnapshot

pytestmark = pytest.mark.contract


@pytest.mark.parametrize("taken", ["soon", "1e9", "", "9" * 5000])
def test_a_snapshot_of_no_time_is_malformed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: str
) -> None:
    host = LocalHost("a", tmp_path, "::1")
    xml = f"<domainsnapshot><creationTime>{taken}</creationTime></domainsnapshot>"

    @asynccontextmanager
    async def libvirtd(_: Any) -> AsyncIterator[Libvirtd]:
        yield FakeLibvirtd(host, snapshots=[DomainSnapshot("one", xml)])

    monkeypatch.setattr(domain_snapshots, "libvirtd", libvirtd)
    domain = Domain(host, cast("Any", None), cast("Any", None))
    monkeypatch.setattr(Domain, "uuid", "1")
    with pytest.raises(UsageError, match="the XML of snapshot 'one' cannot be read"):
        asyncio.run(domain_snapshots.list_all(domain))
