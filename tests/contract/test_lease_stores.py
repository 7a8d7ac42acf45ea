"""Stores of leases: one suite for files and for a real etcd cluster."""

import asyncio
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.etcd_cluster import Cluster, running
from vmckpt.errors import OutcomeUnknownError, RefusedError, StorageError
from vmckpt.lease.etcd_store import EtcdStore
from vmckpt.lease.file_store import FileStore
from vmckpt.lease.gateway import Gateway
from vmckpt.lease.lease import Lease
from vmckpt.lease.primary import ReplicaStanding
from vmckpt.lease.record import LeaseRecord, LeaseSpan, encode
from vmckpt.lease.rule import Claimant, Holding
from vmckpt.lease.store import NONE_YET, ArbiterDownError, RecordStore, Versioned

SPAN = LeaseSpan(0.4, 0.05)
LIMIT_S = 20.0  # of one question, on a machine that is busy
FIRST = LeaseRecord(1, "lab-a", 1, SPAN)
StoreMaker = Callable[[], RecordStore]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("etcd")) as made:
        yield made


@pytest.fixture(params=["file", "etcd"])
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> StoreMaker:
    """Makes stores that share their records, as two processes have them; they begin empty."""
    if request.param == "file":
        return lambda: FileStore(tmp_path / "leases", timeout_s=LIMIT_S)
    urls = request.getfixturevalue("cluster").urls
    prefix = f"/{tmp_path.name}/"
    gateways = [Gateway(url) for url in urls]
    return lambda: EtcdStore(gateways, prefix=prefix, timeout_s=LIMIT_S)


def test_nothing_stands_there_until_something_is_put(make_store: StoreMaker) -> None:
    async def play() -> None:
        store, other = make_store(), make_store()
        assert await store.read("web") is None
        put = await store.replace("web", FIRST, over=NONE_YET)
        assert put.record == FIRST
        assert put.version > NONE_YET
        assert await other.read("web") == put
        assert await other.read("db") is None

    asyncio.run(play())


def test_only_what_was_seen_is_replaced(make_store: StoreMaker) -> None:
    async def play() -> None:
        store = make_store()
        first = await store.replace("web", FIRST, over=NONE_YET)
        late = replace(FIRST, holder="lab-b", attempt=7)
        assert await store.replace("web", late, over=NONE_YET) == first
        second = await store.replace("web", replace(FIRST, attempt=2), over=first.version)
        assert second.version > first.version
        assert await store.replace("web", late, over=first.version) == second
        assert await store.replace("web", late, over=second.version + 1) == second
        assert await store.read("web") == second

    asyncio.run(play())


def test_of_many_at_once_one_gets_it_and_all_see_whom(make_store: StoreMaker) -> None:
    async def play() -> None:
        version = NONE_YET
        for attempt in range(1, 6):
            wishes = [LeaseRecord(attempt, f"host-{n}", attempt, SPAN) for n in range(6)]
            answers = await asyncio.gather(
                *(make_store().replace("web", wish, over=version) for wish in wishes)
            )
            assert len(set(answers)) == 1
            assert answers[0].record in wishes
            assert answers[0].version > version
            version = answers[0].version

    asyncio.run(play())


def test_all_of_a_record_comes_back_under_any_name(make_store: StoreMaker) -> None:
    record = LeaseRecord(
        2**40, "lab-a/ü 'x\"", 2**33, LeaseSpan(1.25, 0.001), "lab-b\n1", released=True
    )

    async def play() -> None:
        store = make_store()
        for vm in ("web", "../web", "we/b", "é ..", "."):
            put = await store.replace(vm, record, over=NONE_YET)
            assert put.record == record
            assert await make_store().read(vm) == put

    asyncio.run(play())


def test_a_term_goes_from_hand_to_hand(make_store: StoreMaker) -> None:
    async def play() -> None:
        primary = Lease(make_store(), "web", Claimant("lab-a"), SPAN)
        standby = Lease(make_store(), "web", Claimant("lab-b", replica="r1"), SPAN)
        assert (await primary.take()).term == 1
        assert primary.standing is ReplicaStanding.SOLO
        with pytest.raises(RefusedError, match="it runs alone"):
            await standby.take()
        await primary.record_in_sync("r1")
        with pytest.raises(RefusedError, match="may still be held"):
            await standby.take()
        await primary.renew()
        # Proof of another term's holder is none of this one's.
        with pytest.raises(RefusedError, match="may still be held"):
            await standby.take(Holding(1, "lab-c"))
        assert (await standby.take(Holding(1, "lab-a"))).term == 2
        with pytest.raises(RefusedError, match="names lab-b"):
            await primary.renew()
        assert primary.held is None
        assert primary.highest_term == 2
        assert standby.standing is ReplicaStanding.SOLO

    asyncio.run(play())


def test_without_proof_the_lease_is_waited_out(make_store: StoreMaker) -> None:
    async def play() -> None:
        primary = Lease(make_store(), "web", Claimant("lab-a"), SPAN)
        standby = Lease(make_store(), "web", Claimant("lab-b", replica="r1"), SPAN)
        await primary.take()
        held = await primary.record_in_sync("r1")
        while True:
            try:
                taken = await standby.take()
                break
            except RefusedError as refusal:
                assert "may still be held" in refusal.what
                await asyncio.sleep(0.02)
        assert taken.term == 2
        # Its lease was asked for when the other's had ended, by the one clock of this machine.
        assert taken.until_s - SPAN.holder_s > held.until_s

    asyncio.run(play())


def test_what_is_given_up_is_taken_at_once(make_store: StoreMaker) -> None:
    async def play() -> None:
        primary = Lease(make_store(), "web", Claimant("lab-a"), LeaseSpan(3600.0))
        standby = Lease(make_store(), "web", Claimant("lab-b", replica="r1"), SPAN)
        await primary.take()
        await primary.record_in_sync("r1")
        await primary.give_up()
        assert primary.held is None
        other = Lease(make_store(), "web", Claimant("lab-c", replica="r2"), SPAN)
        with pytest.raises(RefusedError, match="is not for lab-c"):
            await other.take()
        assert (await standby.take()).term == 2

    asyncio.run(play())


def test_two_that_ask_at_once_do_not_both_get_it(make_store: StoreMaker) -> None:
    async def play() -> None:
        leases = [Lease(make_store(), "web", Claimant(f"h{n}"), SPAN) for n in range(4)]
        results = await asyncio.gather(*(one.take() for one in leases), return_exceptions=True)
        assert [type(one) for one in results].count(RefusedError) == len(leases) - 1
        holders = [one for one in leases if one.held]
        assert len(holders) == 1
        seen = await make_store().read("web")
        assert isinstance(seen, Versioned)
        assert seen.record.holder == holders[0].claimant.name

    asyncio.run(play())


def test_an_empty_value_in_etcd_is_no_lease() -> None:
    """Someone put it there to remove the record; its JSON has no value then."""

    class Member:
        url = "http://127.0.0.1:2379"

        async def ask(self, _path: str, _question: object) -> dict[str, Any]:
            return {"header": {"revision": "5"}, "kvs": [{"mod_revision": "3"}]}

    member: Any = Member()
    with pytest.raises(StorageError, match="holds no lease"):
        asyncio.run(EtcdStore([member]).read("web"))


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"responses": []},
        {"responses": [{}]},
        {
            "responses": [
                {"response_range": {"kvs": [{"value": b64encode(encode(FIRST).encode()).decode()}]}}
            ]
        },
        {"responses": [{"response_range": {"kvs": "none"}}]},
    ],
)
def test_an_answer_that_is_not_etcds_is_none(said: dict[str, Any]) -> None:
    """A member that is being replaced, or something else at its address: others may answer."""

    class Member:
        def __init__(self, port: int, answer: dict[str, Any]) -> None:
            self.url, self._answer = f"http://127.0.0.1:{port}", answer

        async def ask(self, _path: str, _question: object) -> dict[str, Any]:
            return {"header": {"revision": "5"}, **self._answer}

    async def play() -> None:
        odd: Any = Member(2379, said)
        empty: Any = Member(2379, {"kvs": [None]})
        with pytest.raises(OutcomeUnknownError, match="is malformed"):
            await EtcdStore([odd], timeout_s=0.2).replace("web", FIRST, over=NONE_YET)
        with pytest.raises(ArbiterDownError, match="is malformed"):
            await EtcdStore([empty], timeout_s=0.2).read("web")
        good: Any = Member(2380, {"succeeded": True})
        put = await EtcdStore([odd, good]).replace("web", FIRST, over=NONE_YET)
        assert put == Versioned(FIRST, 5)

    asyncio.run(play())


def test_a_member_that_gives_no_token_is_asked_nothing() -> None:
    async def post(path: str, _question: object) -> dict[str, Any]:
        assert path == "/v3/auth/authenticate"
        return {"header": {"revision": "5"}}

    member: Any = Gateway("http://127.0.0.1:2379")
    member._user, member._post = "vmckpt", post
    with pytest.raises(ArbiterDownError, match="gives no token"):
        asyncio.run(EtcdStore([member], timeout_s=0.2).replace("web", FIRST, over=NONE_YET))
