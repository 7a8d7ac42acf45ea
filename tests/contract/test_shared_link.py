"""Migrations on one link find one another by files that die with them."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.faulty_host import Fault, FaultyHost
from vmckpt.forecast.measure.link_users import OUT, limits, others_on_the_link
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.lock import Owner
from vmckpt.migrate import shared_link
from vmckpt.migrate.shared_link import Share, SharedLink, on_the_link

pytestmark = pytest.mark.contract


def host(tmp_path: Path, name: str) -> LocalHost:
    return LocalHost(name, tmp_path / name, "127.0.0.1")


@asynccontextmanager
async def moving(
    source: LocalHost, target: LocalHost, run: str, limit: int
) -> AsyncIterator[tuple[SharedLink, list[str]]]:
    said: list[str] = []
    async with on_the_link(
        source, target, run, limit, lambda code, text: said.append(f"{code}: {text}")
    ) as link:
        yield link, said


def test_a_limit_that_no_link_has_is_none(tmp_path: Path) -> None:
    """A host that was broken into may list anything."""
    lists = Fault("list_dir", answers=[f"r1.{'9' * 5000}", "r2.x", "r3"])
    evil = FaultyHost("a", tmp_path, "127.0.0.1", faults=(lists,))
    assert asyncio.run(limits(evil, OUT)) == {}


def test_each_gets_its_share_and_the_rest_when_the_other_ends(tmp_path: Path) -> None:
    asyncio.run(share_by_turns(tmp_path))


async def share_by_turns(tmp_path: Path) -> None:
    a, b, c = (host(tmp_path, name) for name in "abc")
    async with moving(a, b, "r1", 60) as (first, said):
        assert await first.current() == Share(0, 60)
        async with moving(a, b, "r2", 60) as (second, _):
            assert await first.current() == await second.current() == Share(1, 30)
            # What comes to the same target shares its link; what leaves a target does not.
            async with moving(c, b, "r3", 60) as (third, _), moving(b, a, "r4", 60) as (back, _):
                assert (await first.current(), await third.current()) == (
                    Share(2, 20),
                    Share(2, 20),
                )
                assert await back.current() == Share(0, 60)
            # One without a limit is seen, and takes what it gets.
            async with moving(a, b, "r5", 0) as (free, _):
                assert (await first.current(), await free.current()) == (Share(2, 30), Share(2, 0))
            assert await others_on_the_link(a, b) == 2
        told: list[int] = []

        async def hold_to(share: int) -> None:
            told.append(share)

        async with moving(a, b, "r6", 20), first.kept(hold_to):
            while not told or not said:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert (told, said) == ([40], ["shared-link: another migration uses the link: "
                                       "continuing, at 40 B/s"])  # fmt: skip
    assert await others_on_the_link(a, b) == 0
    assert not list(tmp_path.glob("*/links/*/*"))


PRESENT = """
import asyncio, sys
from pathlib import Path
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.lock import Owner
from vmckpt.migrate.shared_link import on_the_link

async def be_there():
    a, b = (LocalHost(name, Path(sys.argv[1]) / name, "127.0.0.1") for name in "ab")
    async with on_the_link(a, b, "dead", 60, print):
        print("there", flush=True)
        await asyncio.sleep(600)

asyncio.run(be_there())
"""


def test_a_killed_one_counts_no_more_and_its_files_go(tmp_path: Path) -> None:
    asyncio.run(be_killed(tmp_path))


async def be_killed(tmp_path: Path) -> None:
    other = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PRESENT, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    assert other.stdout is not None
    assert await other.stdout.readline() == b"there\n"
    a, b = host(tmp_path, "a"), host(tmp_path, "b")
    async with moving(a, b, "r1", 60) as (link, _):
        assert await link.current() == Share(1, 30)
        os.kill(other.pid, signal.SIGKILL)
        await other.wait()
        assert await link.current() == Share(0, 60)
    assert not list(tmp_path.glob("*/links/*/*"))


@pytest.mark.timeout(10)
@pytest.mark.parametrize("in_turn", [False, True])
def test_who_looks_for_killed_ones_is_waited_for(tmp_path: Path, *, in_turn: bool) -> None:
    """It has a file in hand for a moment, which may be one that has just come to be."""
    a, b = host(tmp_path, "a"), host(tmp_path, "b")
    path = b.state_dir / "links" / "in" / "r1.60"

    async def meanwhile() -> None:
        link = SharedLink(a, b, "r1", 60, lambda *_: None)
        async with b.lock(path, Owner("", "tidy up", os.getpid(), 0.0)):
            coming = asyncio.create_task(link.my_turn() if in_turn else link.come())
            await asyncio.sleep(0.2)
            assert not coming.done()
        await coming
        assert await others_on_the_link(a, b) == 1
        await link.leave()
        assert await others_on_the_link(a, b) == 0

    asyncio.run(meanwhile())


@pytest.mark.timeout(10)
def test_who_waits_for_a_frozen_one_says_for_whom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drain was paused for good, without a word."""
    monkeypatch.setattr(shared_link, "WAITS_S", 0.1)
    a, b = host(tmp_path, "a"), host(tmp_path, "b")
    told: list[str] = []

    async def wait() -> None:
        frozen = SharedLink(a, b, "r0", 0, lambda *_: None)
        await frozen.my_turn()
        link = SharedLink(a, b, "r1", 0, lambda _, text: told.append(text))
        waiting = asyncio.create_task(link.my_turn())
        while not told:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert not waiting.done()
        await frozen.leave()
        await waiting
        await link.leave()

    asyncio.run(wait())
    assert "held by migrate (run r0, pid" in told[0]
