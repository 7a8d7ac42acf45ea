"""Two paths between primary and standby, each played lost: who is heard, and what is told."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.waiting_qemu import it_waits
from vmckpt.errors import OperationFailedError
from vmckpt.hosts.local import LocalHost
from vmckpt.lease.clock import boottime_s
from vmckpt.lease.file_store import FileStore
from vmckpt.lease.lease import Lease
from vmckpt.lease.record import LeaseSpan
from vmckpt.lease.rule import Claimant
from vmckpt.lease.standby import StandbyMove
from vmckpt.replicate import paths
from vmckpt.replicate.disks.journal import DisksJournal
from vmckpt.replicate.paths import (
    HEARD,
    NONE,
    ONE_WAY,
    SILENT,
    WAITING,
    SecondPath,
    second_path,
)
from vmckpt.replicate.standby.following import LOST
from vmckpt.replicate.standby.takeover import SILENCE_S, TakeOver
from vmckpt.replicate.status import ReplicaStatus, Role
from vmckpt.replicate.wire.beats import Hearing, Sender

FIRST = ("127.0.0.1", "127.0.0.1")
STATUS = ReplicaStatus(role=Role.PRIMARY, state="protected")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "HEARTBEAT_S", 0.02)
    monkeypatch.setattr(paths, "PATIENCE_S", 0.3)


def request(first: str | None = "127.0.0.2", second: str | None = "127.0.0.3") -> Any:
    hosts = [
        LocalHost(name, Path("/none"), "127.0.0.1", second_address=address)
        for name, address in (("a", first), ("b", second))
    ]
    return SimpleNamespace(primary=hosts[0], standby=hosts[1])


@asynccontextmanager
async def both(token: str = "one") -> AsyncIterator[tuple[SecondPath, SecondPath]]:
    """Both sides, which do not beat yet; `token` is the standby's."""
    async with (
        second_path(request(), Sender.PRIMARY, "one") as primary,
        second_path(request(), Sender.STANDBY, token) as standby,
    ):
        yield primary, standby


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():  # noqa: ASYNC110 - no one tells
            await asyncio.sleep(0.005)


def are(primary: SecondPath, standby: SecondPath, *states: str) -> Callable[[], bool]:
    return lambda: (primary.state(), standby.state()) == states


def test_both_sides_hear_one_another_and_a_lost_path_is_silent_for_both() -> None:
    async def main() -> None:
        async with both() as (primary, standby):
            assert are(primary, standby, WAITING, WAITING)()
            standby.begin(primary.port)
            primary.begin(standby.port)
            await until(are(primary, standby, HEARD, HEARD))
            standby.close()
            await until(lambda: primary.state() == SILENT)
            assert "no heartbeats of b arrive at 127.0.0.2" in primary.diagnosis(boottime_s())

    asyncio.run(main())


def test_a_path_on_which_nothing_ever_comes_is_silent_after_a_while() -> None:
    async def main() -> None:
        async with both("another") as (primary, standby):
            standby.begin(primary.port)
            primary.begin(standby.port)
            assert primary.state() == WAITING
            await until(are(primary, standby, SILENT, SILENT))
            assert primary.heard_s is None

    asyncio.run(main())


def test_a_path_that_carries_one_way_only_is_told_from_one_that_carries_both() -> None:
    async def main() -> None:
        async with both() as (primary, standby):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as nowhere:
                nowhere.bind(("127.0.0.2", 0))
                standby.begin(nowhere.getsockname()[1])
                primary.begin(standby.port)
                await until(are(primary, standby, SILENT, ONE_WAY))

    asyncio.run(main())


def test_a_path_that_is_cut_both_ways_and_mended_never_looks_one_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the other side had answered last when it was cut."""
    now_s = 100.0
    monkeypatch.setattr(paths, "boottime_s", lambda: now_s)
    ours, theirs = (Hearing(side, b"key") for side in Sender)
    path, states = SecondPath(ours, "b", "127.0.0.2", "127.0.0.3"), list[str]()

    async def main() -> None:
        nonlocal now_s
        await path.open(None)
        path.begin(path.port)
        for step in range(200):
            now_s += 0.01
            is_cut = 60 <= step < 130
            if step % 5 == 0 and not is_cut:  # it says more often what it has than it gets more
                path.datagram_received(theirs.next_datagram(), None)
            if step % 20 == 10 and not is_cut:
                theirs.receive(ours.next_datagram(), now_s)
            states.append(path.state())
        path.close()

    asyncio.run(main())
    assert [state for state, _ in groupby(states)] == [HEARD, SILENT, HEARD]


@pytest.mark.parametrize("answers", [True, False])
def test_nothing_waits_for_the_name_of_a_second_address(
    monkeypatch: pytest.MonkeyPatch, *, answers: bool
) -> None:
    """It was resolved for each heartbeat, and the lease was not renewed until the name server had
    answered: without one, the guest was paused.
    """
    path = SecondPath(Hearing(Sender.PRIMARY, b"key"), "b", "127.0.0.2", "b.example")
    asked, sent, there = list[str](), list[Any](), ("127.0.0.3", 9)

    async def getaddrinfo(name: str, *_: object, **__: object) -> list[Any]:
        asked.append(name)
        if not answers:
            await asyncio.Event().wait()
        return [(None, None, None, None, there)]

    async def main() -> None:
        await path.open(None)
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
        monkeypatch.setattr(path._transport, "sendto", lambda _, where: sent.append(where))
        path.begin(9)
        await asyncio.sleep(0.1)
        path.close()

    asyncio.run(main())
    assert asked == ["b.example"]
    assert set(sent) == ({there} if answers else set())


def test_what_others_send_is_not_heard() -> None:
    async def main() -> None:
        async with both() as (primary, _):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
                stranger.sendto(b"vkb1" + bytes(52), ("127.0.0.2", int(primary.port or 0)))
                stranger.sendto(b"", ("127.0.0.2", int(primary.port or 0)))
            await asyncio.sleep(0.05)
            assert primary.heard_s is None

    asyncio.run(main())


@pytest.mark.parametrize(
    ("first", "second", "lacks"),
    [
        (None, "127.0.0.3", "a has one address only"),
        ("127.0.0.2", None, "b has one address only"),
        (None, None, "a and b have one address only"),
    ],
)
def test_hosts_with_one_address_have_one_path_and_it_is_said(
    first: str | None, second: str | None, lacks: str
) -> None:
    async def main() -> None:
        async with second_path(request(first, second), Sender.PRIMARY, "one") as path:
            path.begin(1)
            assert (path.port, path.state(), path.lacks) == (None, NONE, lacks)
            assert lacks in path.diagnosis(boottime_s())

    asyncio.run(main())


def test_an_address_that_is_not_the_hosts_is_refused() -> None:
    async def main() -> None:
        with pytest.raises(OperationFailedError, match=r"192\.0\.2\.1") as failed:
            async with second_path(request("192.0.2.1"), Sender.PRIMARY, "one"):
                pass
        assert "--second-addr" in failed.value.remedy

    asyncio.run(main())


def test_heartbeats_come_in_on_the_hosts_own_ports() -> None:
    async def main() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
            taken.bind(("127.0.0.2", 0))
            first = taken.getsockname()[1]
            path = SecondPath(Any, "b", "127.0.0.2", "127.0.0.3")  # type: ignore[arg-type]
            await path.open((first, first + 20))
            assert path.port is not None
            assert first < path.port <= first + 20
            path.close()

    asyncio.run(main())


def test_a_host_without_a_free_port_is_not_told_that_its_address_is_wrong() -> None:
    async def main() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
            taken.bind(("127.0.0.2", 0))
            port = taken.getsockname()[1]
            path = SecondPath(Any, "b", "127.0.0.2", "127.0.0.3")  # type: ignore[arg-type]
            with pytest.raises(
                OperationFailedError, match="heartbeats cannot be received"
            ) as failed:
                await path.open((port, port))
            assert "is in use" in failed.value.why
            assert "--migration-ports" in failed.value.remedy

    asyncio.run(main())


def test_a_lost_connection_is_told_from_a_lost_standby() -> None:
    async def main() -> None:
        async with both() as (primary, standby):
            standby.begin(primary.port)
            primary.begin(standby.port)
            await until(are(primary, standby, HEARD, HEARD))
            lost_s = boottime_s()
            await until(lambda: "only the connection is lost" in primary.diagnosis(lost_s))
            told = primary.added_to(STATUS, FIRST, lost_s - 1.0, is_lost=False)
            assert told.paths == {"replication": SILENT, "second": HEARD}
            assert told.path_addresses is not None
            assert told.path_addresses["second"] == ("127.0.0.2", "127.0.0.3")
            told = primary.added_to(STATUS, FIRST, boottime_s(), is_lost=True)
            assert told.paths == {"replication": SILENT, "second": HEARD}
            told = primary.added_to(STATUS, FIRST, None, is_lost=False)
            assert told.paths == {"replication": WAITING, "second": HEARD}

    asyncio.run(main())


def test_who_was_heard_just_before_the_connection_ended_is_not_told_to_be_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A killed service's connection ends at once."""
    monkeypatch.setattr(paths, "HEARTBEAT_S", 60.0)
    hearing: Any = SimpleNamespace(heard_s=boottime_s() - 1.0)
    path = SecondPath(hearing, "b", "127.0.0.2", "127.0.0.3")
    assert "b was heard at 127.0.0.2 until a moment ago" in path.diagnosis(boottime_s())
    hearing.heard_s -= 1000.0
    assert "no heartbeats of b arrive" in path.diagnosis(boottime_s())


@pytest.mark.parametrize("over_second", [True, False])
def test_a_primary_that_is_heard_over_either_path_is_not_claimed_over(
    tmp_path: Path, *, over_second: bool
) -> None:
    """Its connection is lost and it renews its lease: only who is silent on both is fenced."""
    store, span = FileStore(tmp_path), LeaseSpan(60.0)
    primary = Lease(store, "web", Claimant("a/1"), span)
    standby = Lease(store, "web", Claimant("b/1", replica="b/1"), span)
    long_ago_s = boottime_s() - 2 * SILENCE_S
    heard = SimpleNamespace(
        heard_s=long_ago_s, epoch_s=long_ago_s, term=1, why="it was closed",
        hello=SimpleNamespace(machine="another", emitters=()),
        heard_by_path_s=lambda: (long_ago_s, *([boottime_s()] if over_second else [])),
        second=SimpleNamespace(diagnosis=lambda _: "a lives"),
    )  # fmt: skip
    options: Any = SimpleNamespace(options=SimpleNamespace(fence=("agent",)), one_machine=False)

    async def main() -> None:
        await primary.take()
        await primary.record_in_sync("b/1")
        complete: Any = SimpleNamespace(complete=True, is_applying=False, disks=DisksJournal(()))
        following: Any = heard
        taking = TakeOver(options, standby, complete, following, asyncio.Event(), lack=it_waits)
        receiving: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        receiving.set_result(LOST)
        assert taking.is_due(receiving)
        assert await taking._next(receiving) is (
            StandbyMove.FOLLOW if over_second else StandbyMove.CLAIM
        )
        if over_second:  # until it says that it goes on alone
            settling = asyncio.ensure_future(taking.settled(receiving))
            await until(lambda: "waiting for its lease to expire" in taking.why)
            await primary.record_solo()
            assert await settling is StandbyMove.STALE
            assert "a lives" in taking.why

    asyncio.run(main())
