"""A domain that a migration has paused is neither resumed nor taken for one that a user paused."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from vmckpt.errors import RefusedError
from vmckpt.hosts.local import LocalHost
from vmckpt.vm.domains import lifecycle
from vmckpt.vm.domains.flags import DomainState, PausedReason
from vmckpt.vm.domains.inventory import Domain
from vmckpt.vm.domains.replies import DomainInfo

pytestmark = pytest.mark.contract
BY_USER = 1


class Session:
    """What is asked of libvirtd."""

    def __init__(self) -> None:
        self.asked = list[str]()

    async def resume(self, _: str) -> None:
        self.asked.append("resume")

    async def suspend(self, _: str) -> None:
        self.asked.append("suspend")


def paused(reason: int) -> Domain:
    seen = DomainInfo("u", "web", DomainState.PAUSED, reason, persistent=True, xml="")
    unread: Any = None
    return Domain(LocalHost("a", Path("/"), "::1"), seen, unread)


def asked(
    monkeypatch: pytest.MonkeyPatch, work: Callable[[Domain], Awaitable[None]], domain: Domain
) -> list[str]:
    session = Session()

    @asynccontextmanager
    async def held(*_: object) -> AsyncIterator[tuple[Domain, Session]]:
        yield domain, session

    async def main() -> None:
        await work(domain)

    monkeypatch.setattr(lifecycle, "held_domain", held)
    asyncio.run(main())
    return session.asked


@pytest.mark.parametrize("reason", PausedReason)
@pytest.mark.parametrize("work", [lifecycle.resume_domain, lifecycle.pause_domain])
def test_one_that_a_migration_has_paused_is_left_to_it(
    monkeypatch: pytest.MonkeyPatch, work: Callable[[Domain], Awaitable[None]], reason: PausedReason
) -> None:
    """All of it had been sent, by virsh: its guest ran on the other host, and here once more."""
    with pytest.raises(RefusedError, match="paused by a migration") as refused:
        asked(monkeypatch, work, paused(reason))
    assert "virsh resume web" in refused.value.remedy


def test_one_that_a_user_has_paused_is_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(monkeypatch, lifecycle.resume_domain, paused(BY_USER)) == ["resume"]
    assert asked(monkeypatch, lifecycle.pause_domain, paused(BY_USER)) == []
