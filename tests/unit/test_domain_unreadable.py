"""A domain whose description cannot be read keeps no other from being found."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from vmckpt.errors import NotFoundError, UsageError, VmckptError
from vmckpt.hosts.local import LocalHost
from vmckpt.vm.domains import inventory
from vmckpt.vm.domains.definition.description import MOST_CHARS, parse_domain
from vmckpt.vm.domains.flags import DomainState
from vmckpt.vm.domains.replies import DomainInfo

pytestmark = pytest.mark.unit
WELL = "<domain type='kvm'><name>web</name><os><type>hvm</type></os></domain>"
LAUGHS = (
    "<!DOCTYPE d [<!ENTITY a 'aaaaaaaaaa'><!ENTITY b '&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;'>]>"
    "<domain><name>&b;</name><os><type>hvm</type></os></domain>"
)
ILL = [
    "",
    "<domain>",
    "<domain/>",
    "\x00",
    "\ud800",
    WELL.replace("web", "\ud800"),
    WELL.replace("</os>", "</os><vcpu>many</vcpu>"),
    WELL.replace("</os>", "</os><memory unit='bushel'>1</memory>"),
    LAUGHS,
    "<a>" * 100_000,
    WELL.replace("web", "x" * MOST_CHARS),
]


@pytest.mark.parametrize("xml", ILL)
def test_what_is_no_domain_is_said(xml: str) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        parse_domain(xml)


def test_the_others_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Session:
        async def domains(self) -> list[DomainInfo]:
            ill = [
                DomainInfo(f"u{n}", f"ill{n}", DomainState.RUNNING, 1, True, one)
                for n, one in enumerate(ILL)
            ]
            return [*ill, DomainInfo("u", "web", DomainState.RUNNING, 1, True, WELL)]

    @asynccontextmanager
    async def libvirtd(_: Any) -> AsyncIterator[Session]:
        yield Session()

    monkeypatch.setattr(inventory, "libvirtd", libvirtd)
    host = LocalHost("a", tmp_path, "127.0.0.1", libvirt=tmp_path / "sock")
    found = asyncio.run(inventory.all_domains([host]))
    assert [one.name for one in found.given] == ["web"]
    assert found.unanswered == ()
    assert len(found.silent) == len(ILL)
    assert "'ill0' on a is left out" in found.silent[0].what
    assert asyncio.run(inventory.find_domain("web", [host])) is not None
    with pytest.raises(VmckptError) as error:
        asyncio.run(inventory.find_domain("ill0", [host]))
    assert not isinstance(error.value, NotFoundError)
