"""Leases in a real etcd cluster whose members die, stall and are cut off: no majority, no grant."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tests.etcd_cluster import Cluster, free_ports, running
from tests.proxy import Proxy
from vmckpt.errors import OutcomeUnknownError, RefusedError, UsageError
from vmckpt.lease.clock import boottime_s
from vmckpt.lease.etcd_store import EtcdStore
from vmckpt.lease.gateway import Gateway
from vmckpt.lease.lease import Lease
from vmckpt.lease.record import LeaseRecord, LeaseSpan
from vmckpt.lease.rule import Claimant
from vmckpt.lease.store import NONE_YET, ArbiterDownError, Versioned

LIMIT_S = 20.0
SHORT_S = 1.5
SPAN = LeaseSpan(1.0, 0.05)
FIRST = LeaseRecord(1, "lab-a", 1, SPAN)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("etcd")) as made:
        yield made


def store(cluster: Cluster, timeout_s: float = LIMIT_S) -> EtcdStore:
    return EtcdStore([Gateway(url) for url in cluster.urls], timeout_s=timeout_s)


def put(where: EtcdStore, vm: str, attempt: int, over: int) -> Versioned:
    return asyncio.run(where.replace(vm, LeaseRecord(1, "lab-a", attempt, SPAN), over=over))


def test_without_its_leader_a_majority_goes_on(cluster: Cluster) -> None:
    where = store(cluster)
    first = put(where, "one-dies", 1, NONE_YET)
    with cluster.without(cluster.leader()):
        assert asyncio.run(where.read("one-dies")) == first
        second = put(where, "one-dies", 2, first.version)
        assert second.record.attempt == 2
    with cluster.stopped(cluster.leader()):
        third = put(where, "one-dies", 3, second.version)
        assert asyncio.run(where.read("one-dies")) == third


def test_without_a_majority_nothing_is_granted_and_what_was_stays(cluster: Cluster) -> None:
    first = put(store(cluster), "two-die", 1, NONE_YET)
    left = cluster.members[0]
    with cluster.without(*cluster.members[1:]):
        hasty = store(cluster, SHORT_S)
        # At first it may not know yet that it is alone: then no one knows what becomes of a write.
        with pytest.raises((ArbiterDownError, OutcomeUnknownError)):
            put(hasty, "two-die", 2, first.version)
        with pytest.raises(ArbiterDownError) as caught:
            asyncio.run(hasty.read("two-die"))
        assert "bring a majority of its members back" in caught.value.remedy
        assert f"{cluster.urls[1]}: " in caught.value.why
        deadline_s = time.monotonic() + 20
        while not left.is_up() or "no leader" not in caught.value.why:
            assert time.monotonic() < deadline_s, caught.value.why
            with pytest.raises(ArbiterDownError) as caught:
                put_or_down(hasty, "two-die", 3, first.version)
    after = asyncio.run(store(cluster).read("two-die"))
    assert after is not None
    assert after.record.attempt in (1, 2, 3)
    assert put(store(cluster), "two-die", 9, after.version).version > after.version


def put_or_down(where: EtcdStore, vm: str, attempt: int, over: int) -> None:
    """A write that no one is sure about is one of the time before the loss was noticed."""
    try:
        put(where, vm, attempt, over)
    except OutcomeUnknownError as unknown:
        raise ArbiterDownError(unknown.what, why=unknown.why, remedy=unknown.remedy) from unknown


def test_a_majority_that_stands_still_grants_nothing_and_the_question_ends(
    cluster: Cluster,
) -> None:
    first = put(store(cluster), "two-stall", 1, NONE_YET)
    hasty = store(cluster, SHORT_S)
    with cluster.stopped(*cluster.members[:2]):
        began_s = time.monotonic()
        with pytest.raises(ArbiterDownError, match=r"no answer in 1\.5 s"):
            asyncio.run(hasty.read("two-stall"))
        with pytest.raises(OutcomeUnknownError):
            put(hasty, "two-stall", 2, first.version)
        assert time.monotonic() - began_s < 2 * SHORT_S + 5
    # Done late or never: what stands there is one of the two, and goes on from there.
    after = asyncio.run(store(cluster).read("two-stall"))
    assert after is not None
    assert after.record.attempt in (1, 2)
    assert put(store(cluster), "two-stall", 3, after.version).record.attempt == 3


def test_a_primary_that_is_cut_off_loses_its_lease_before_the_standby_gets_it(
    cluster: Cluster,
) -> None:
    with ExitStack() as undo:
        proxies = [Proxy(member.port) for member in cluster.members]
        for proxy in proxies:
            undo.callback(proxy.close)
        far = [Gateway(f"http://127.0.0.1:{proxy.port}") for proxy in proxies]
        primary = Lease(EtcdStore(far, timeout_s=0.2), "cut", Claimant("lab-a"), SPAN)
        standby = Lease(store(cluster), "cut", Claimant("lab-b", "r1"), SPAN)

        async def play() -> None:
            await patiently(primary)
            held = await primary.record_in_sync("r1")
            for proxy in proxies:
                proxy.stall()
            with pytest.raises(OutcomeUnknownError):
                await primary.renew()
            assert primary.held == held
            while True:
                try:
                    await standby.take()
                    break
                except RefusedError as refusal:
                    assert "may still be held" in refusal.what
                    await asyncio.sleep(0.05)
            assert boottime_s() > held.until_s
            assert standby.highest_term == 2
            # What was on its way arrives now, and changes nothing.
            for proxy in proxies:
                proxy.flow()
            await asyncio.sleep(0.2)
            await standby.read()
            assert standby.highest_term == 2
            assert standby.held is not None
            slow = Lease(store(cluster), "cut", primary.claimant, SPAN)
            with pytest.raises(RefusedError, match="is not for lab-a"):
                await slow.take()

        asyncio.run(play())


async def patiently(lease: Lease) -> None:
    """The first term, on a machine that may be slow."""
    while lease.held is None:
        try:
            await lease.take()
        except (ArbiterDownError, OutcomeUnknownError):
            await asyncio.sleep(0.1)


def test_a_cluster_that_was_restarted_knows_all_terms(cluster: Cluster) -> None:
    first = put(store(cluster), "restart", 1, NONE_YET)
    nothing = pytest.raises(ArbiterDownError, match="etcd grants nothing for 'restart'")
    with cluster.without(*cluster.members), nothing:
        put(store(cluster, SHORT_S), "restart", 2, first.version)
    assert asyncio.run(store(cluster).read("restart")) == first
    assert put(store(cluster), "restart", 2, first.version).version > first.version


def test_a_write_that_etcd_has_no_space_for_may_be_done_all_the_same(tmp_path: Path) -> None:
    """Of writes that are applied while the quota is used up etcd says so, and keeps them."""
    fat = replace(FIRST, holder="x" * 8000)
    quota = ("--quota-backend-bytes", str(1 << 20))

    async def play(url: str) -> None:
        where = EtcdStore([Gateway(url)], timeout_s=SHORT_S)
        failed: dict[str, BaseException] = {}
        written = 0
        while not failed:
            names = [f"vm-{number}" for number in range(written, written + 24)]
            ends = await asyncio.gather(
                *(where.replace(name, fat, over=NONE_YET) for name in names),
                return_exceptions=True,
            )
            ends_of = zip(names, ends, strict=True)
            failed = {name: end for name, end in ends_of if isinstance(end, BaseException)}
            written += len(names)
        assert {type(end) for end in failed.values()} == {OutcomeUnknownError}
        assert all("etcdctl alarm disarm" in str(end) for end in failed.values())
        # Some of them are there, each as it was to be: etcd still answers reads.
        found = [await where.read(name) for name in failed]
        assert {one.record for one in found if one is not None} <= {fat}

    with running(tmp_path, 1, options=quota) as made:
        asyncio.run(play(made.urls[0]))


# -- what is no etcd -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"", "is malformed"),
        (b"220 mail.example ESMTP\r\n", "is malformed"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}", "is malformed"),
        (b"HTTP/1.1 200 OK\r\n\r\n[]", "not an object"),
        (b"HTTP/1.1 200 OK\r\n\r\n{}", "not etcd's"),
        (b'HTTP/1.1 200 OK\r\n\r\n{"header":{}}', "not etcd's"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b" " * (2 << 20), "too long"),
    ],
)
def test_another_service_grants_nothing(answer: bytes, why: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        writer.write(answer)
        writer.close()
        with suppress(ConnectionError):  # who has heard enough hangs up
            await writer.wait_closed()

    async def play() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            where = EtcdStore([Gateway(f"http://127.0.0.1:{port}")], timeout_s=1.0)
            with pytest.raises(ArbiterDownError, match=why):
                await where.read("web")
            with pytest.raises(OutcomeUnknownError, match=why):
                await where.replace("web", FIRST, over=NONE_YET)
        await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))

    asyncio.run(play())


def test_where_nobody_listens_nothing_was_asked() -> None:
    (port,) = free_ports(1)
    where = EtcdStore([Gateway(f"http://127.0.0.1:{port}")], timeout_s=0.1)
    with pytest.raises(ArbiterDownError):
        put(where, "web", 1, NONE_YET)


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:2379", "ftp://a", "http://", "http://a:x", "http://a/b", "https://"]
)
def test_what_is_no_endpoint_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="is not an endpoint"):
        Gateway(url)


def test_a_store_takes_an_endpoint() -> None:
    with pytest.raises(UsageError, match="no endpoint"):
        EtcdStore([])
