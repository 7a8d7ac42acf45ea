"""Sessions with libvirtds outlive their blocks for the next one, if asked to, and while they do."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest

from vmckpt.errors import HostDownError
from vmckpt.hosts.host import Host
from vmckpt.hosts.local import LocalHost
from vmckpt.vm.domains import sessions
from vmckpt.vm.domains.libvirtd import Libvirtd
from vmckpt.vm.domains.sessions import close_sessions, keep_sessions, libvirtd, libvirtds

pytestmark = pytest.mark.contract
A, B = (LocalHost(name, Path("/"), "::1", libvirt=Path("/none")) for name in "ab")


class Opened:
    """Sessions of libvirt's test driver, in the order in which they were opened and closed."""

    def __init__(self) -> None:
        self.all: list[Libvirtd] = []
        self.closed: list[Libvirtd] = []

    async def open(self, host: Host) -> sessions._OpenSession:
        session, ending = Libvirtd("test:///default", host), AsyncExitStack()
        await session.open()
        self.all.append(session)
        ending.callback(self.closed.append, session)
        ending.push_async_callback(session.close)
        return sessions._OpenSession(session, ending)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    one = Opened()
    monkeypatch.setattr(sessions, "_open", one.open)
    yield one
    assert set(one.all) == set(one.closed)


def test_each_block_has_one_of_its_own_that_ends_with_it(opened: Opened) -> None:
    async def main() -> None:
        for _ in range(2):
            async with libvirtd(A):
                pass
            assert opened.closed == opened.all

    asyncio.run(main())
    assert len(opened.all) == 2


def test_one_that_is_kept_is_used_again_by_one_at_a_time(opened: Opened) -> None:
    async def main() -> None:
        keep_sessions()
        async with libvirtd(A) as first:
            pass
        async with libvirtds(A, B, A) as (again, other, second):
            assert again is first
            assert len({id(one) for one in (again, other, second)}) == 3
            assert other.host == B
        assert opened.closed == []
        await close_sessions()
        async with libvirtd(A) as anew:
            assert anew is not first

    asyncio.run(main())
    assert len(opened.all) == 4


def test_one_that_left_a_question_unanswered_is_not_kept(opened: Opened) -> None:
    async def main() -> None:
        keep_sessions()
        answer = threading.Event()
        async with libvirtd(A) as silent:
            with suppress(HostDownError):
                await silent._ask("be silent", answer.wait, 0.05)
            threading.Timer(0.2, answer.set).start()
        async with libvirtd(A) as other:
            assert other is not silent
        await close_sessions()

    asyncio.run(main())
    assert len(opened.all) == 2
