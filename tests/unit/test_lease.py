"""One process's dealings with the arbiter, with answers that come late, or never."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from vmckpt.errors import OutcomeUnknownError, RefusedError, StorageError
from vmckpt.lease.lease import Lease
from vmckpt.lease.primary import ReplicaStanding
from vmckpt.lease.record import LeaseRecord, LeaseSpan
from vmckpt.lease.rule import Claimant, Holding
from vmckpt.lease.store import NONE_YET, ArbiterDownError, Versioned

SPAN = LeaseSpan(10.0, 0.1)
OTHER = LeaseRecord(5, "other", 1, SPAN, in_sync="r1")


class Register:
    """A store that does with each write what it was told to."""

    def __init__(self, now: Versioned | None = None) -> None:
        self.now = now
        self.does: list[str] = []
        self.late: list[tuple[LeaseRecord, int]] = []
        self.clock_s = 1000.0
        self.takes_s = 0.0  # each question
        self.is_down = False

    async def read(self, vm: str) -> Versioned | None:
        if self.is_down:
            raise ArbiterDownError(vm, why="-", remedy="-")
        self.clock_s += self.takes_s
        return self.now

    async def replace(self, vm: str, record: LeaseRecord, *, over: int) -> Versioned:
        does = self.does.pop(0) if self.does else "do"
        self.clock_s += self.takes_s
        if does == "refuse":
            raise ArbiterDownError(vm, why="-", remedy="-")
        if does == "full":
            raise StorageError(vm, why="-", remedy="-")
        if does in ("late", "hang"):
            self.late.append((record, over))
            if does == "hang":
                await asyncio.Event().wait()
            raise OutcomeUnknownError(vm, why="-", remedy="-")
        return self.put(record, over)

    def put(self, record: LeaseRecord, over: int) -> Versioned:
        if (self.now.version if self.now else NONE_YET) == over:
            self.now = Versioned(record, over + 1)
        assert self.now is not None
        return self.now

    def comes_late(self) -> None:
        """What was not answered is done now, as far as it still can be."""
        for record, over in self.late:
            self.put(record, over)
        self.late.clear()

    def lease(self, name: str = "me", replica: str | None = "r1") -> Lease:
        claimant = Claimant(name, replica)
        return Lease(self, "web", claimant, SPAN, clock=lambda: self.clock_s)


def standing(lease: Lease) -> ReplicaStanding:
    """Asked again each time."""
    return lease.standing


def played(work: Callable[[], Awaitable[None]]) -> None:
    async def play() -> None:
        await work()

    asyncio.run(play())


def test_a_lease_ends_by_the_time_before_it_was_asked_for() -> None:
    store = Register()
    store.takes_s = 2.0
    lease = store.lease()
    assert (lease.held, lease.held_until_s, lease.highest_term) == (None, -math.inf, 0)
    held = asyncio.run(lease.take())
    # Looked at 1000, asked at 1002, answered at 1004.
    assert held.until_s == lease.held_until_s == 1002 + 9
    assert lease.renew_from_s == 1002 + 3
    assert lease.highest_term == 1


def test_a_renewal_without_an_answer_prolongs_nothing_until_it_is_seen() -> None:
    store = Register()
    lease = store.lease()

    async def play() -> None:
        before = await lease.take()
        store.clock_s, store.does = 1003, ["late"]
        with pytest.raises(OutcomeUnknownError):
            await lease.renew()
        assert lease.held == before
        store.comes_late()
        store.clock_s = 1008
        await lease.read()
        # From before it was sent, however late it was done.
        assert lease.held_until_s == 1003 + 9

    played(play)


def test_a_late_renewal_is_not_taken_for_the_one_that_came_after_it() -> None:
    store = Register()
    lease = store.lease()

    async def play() -> None:
        await lease.take()
        store.clock_s, store.does = 1003, ["late", "late"]
        with pytest.raises(OutcomeUnknownError):
            await lease.renew()
        store.clock_s = 1006
        with pytest.raises(OutcomeUnknownError):
            await lease.renew()
        store.comes_late()  # the first is done, the second cannot be any longer
        await lease.read()
        assert lease.held_until_s == 1003 + 9

    played(play)


@pytest.mark.parametrize("does", ["late", "hang"])
def test_going_solo_counts_only_once_it_is_known(does: str) -> None:
    store = Register()
    lease = store.lease()

    async def play() -> None:
        await lease.take()
        await lease.record_in_sync("r1")
        assert standing(lease) is ReplicaStanding.IN_SYNC
        store.does = [does]
        # A caller that loses patience is in the same case as one that is told that no one knows.
        with pytest.raises((OutcomeUnknownError, TimeoutError)):
            await asyncio.wait_for(lease.record_solo(), 0.01)
        assert standing(lease) is ReplicaStanding.UNSETTLED
        # It may still be done, even if it is not there yet.
        await lease.read()
        assert standing(lease) is ReplicaStanding.UNSETTLED
        store.comes_late()
        await lease.read()
        assert standing(lease) is ReplicaStanding.SOLO

    played(play)


def test_a_write_that_came_late_comes_before_the_next_and_both_are_done() -> None:
    store = Register()
    lease = store.lease()

    async def play() -> None:
        await lease.take()
        store.does = ["late"]
        with pytest.raises(OutcomeUnknownError):
            await lease.record_in_sync("r1")
        assert standing(lease) is ReplicaStanding.UNSETTLED

        async def overtaken(vm: str) -> Versioned | None:
            found = store.now
            store.comes_late()  # between our look and our write
            return found

        store.read = overtaken  # type: ignore[method-assign]
        await lease.record_solo()
        assert standing(lease) is ReplicaStanding.SOLO
        assert store.now is not None
        assert store.now.record.in_sync is None

    played(play)


def test_what_was_certainly_not_done_leaves_all_as_it_was() -> None:
    for does, error in (("refuse", ArbiterDownError), ("full", StorageError)):
        store = Register()
        lease = store.lease()
        before = asyncio.run(lease.take())
        store.does = [does]
        with pytest.raises(error):
            asyncio.run(lease.record_in_sync("r1"))
        assert lease.held == before
        assert standing(lease) is ReplicaStanding.SOLO


def test_a_take_without_an_answer_may_turn_out_to_be_ours() -> None:
    store = Register(Versioned(OTHER, 7))
    store.does = ["late"]
    lease = store.lease()
    dead = Holding(5, "other")
    with pytest.raises(OutcomeUnknownError):
        asyncio.run(lease.take(dead))
    assert lease.held_until_s == -math.inf
    store.comes_late()
    store.clock_s += 100
    asyncio.run(lease.read())
    # Ours, but its time is over: it is renewed before anything runs.
    assert lease.held is not None
    assert lease.held.term == 6
    assert lease.held_until_s < store.clock_s
    assert asyncio.run(lease.take()).until_s > store.clock_s


def test_a_restarted_claimant_waits_anew() -> None:
    store = Register(Versioned(OTHER, 7))
    first = store.lease()
    asyncio.run(first.read())
    store.clock_s += 8
    second = store.lease("me again")
    asyncio.run(second.read())
    store.clock_s += 3.1
    assert asyncio.run(first.take()).term == 6
    with pytest.raises(RefusedError, match=r"\(term 6\)"):
        asyncio.run(second.take())
    store.now = Versioned(OTHER, 9)
    third = store.lease("me once more")
    asyncio.run(third.read())
    store.clock_s += 10.9
    with pytest.raises(RefusedError, match=r"for another 0\.100 s"):
        asyncio.run(third.take())
    store.clock_s += 0.2
    assert asyncio.run(third.take()).term == 6


def test_each_renewal_makes_the_claimant_wait_from_where_it_saw_it() -> None:
    store = Register(Versioned(OTHER, 7))
    lease = store.lease()
    asyncio.run(lease.read())
    store.clock_s += 10.0
    store.now = Versioned(LeaseRecord(5, "other", 2, SPAN, in_sync="r1"), 8)
    store.clock_s += 5.0
    with pytest.raises(RefusedError, match=r"for another 11\.000 s"):
        asyncio.run(lease.take())


def test_a_term_that_was_lost_is_not_renewed_or_written_about() -> None:
    store = Register()
    lease = store.lease()
    asyncio.run(lease.take())
    store.now = Versioned(OTHER, 9)
    asyncio.run(lease.read())
    assert lease.held is None
    assert standing(lease) is ReplicaStanding.UNSETTLED
    assert lease.highest_term == 5
    for question in (lease.renew, lease.record_solo, lease.give_up):
        with pytest.raises(RefusedError, match="names other"):
            asyncio.run(question())
    assert store.now == Versioned(OTHER, 9)


def test_an_arbiter_that_forgot_is_found_out() -> None:
    forgot = (
        None,
        Versioned(OTHER, 6),
        Versioned(LeaseRecord(4, "x", 1, SPAN), 9),
        # Written over an older copy: as many times as the one that was seen.
        Versioned(LeaseRecord(6, "x", 1, SPAN), 7),
    )
    for found in forgot:
        store = Register(Versioned(OTHER, 7))
        lease = store.lease()
        asyncio.run(lease.read())
        store.now = found
        with pytest.raises(RefusedError, match="has forgotten"):
            asyncio.run(lease.read())


def test_what_was_written_over_an_older_copy_is_not_replaced_when_versions_meet() -> None:
    """Its former holder, which was told to stop, got its term back from who had taken it since."""
    store = Register()
    primary, standby = store.lease("a", None), store.lease("b", "b")

    async def play() -> None:
        await primary.take()
        await primary.record_in_sync("b")
        older = store.now
        for _ in range(4):
            await primary.renew()
        assert older is not None
        store.now = older  # restored
        with pytest.raises(RefusedError, match="has forgotten"):
            await primary.renew()
        await standby.read()
        store.clock_s += 20
        await standby.take()
        while primary.seen is not None and store.now.version < primary.seen.now.version:
            with pytest.raises(RefusedError, match="has forgotten"):
                await primary.record_solo()
            await standby.renew()
        with pytest.raises(RefusedError, match="has forgotten"):
            await primary.record_solo()
        assert store.now.record.holder == "b"
        await standby.renew()

    played(play)


@pytest.mark.parametrize("is_cut_off", [True, False])
def test_who_was_away_replaces_nothing_that_was_written_over_an_older_copy(
    *, is_cut_off: bool
) -> None:
    """Frozen, or without an arbiter that took anything: two guests ran, for good."""
    store = Register()
    primary, standby = store.lease("a", None), store.lease("b", "b")

    async def play() -> None:
        await primary.take()
        await primary.record_in_sync("b")
        older = store.now
        await primary.renew()
        if is_cut_off:
            store.does = ["refuse"]
            with pytest.raises(ArbiterDownError):
                await primary.renew()
        store.now = older  # what came last is lost: the arbiter's machine had no power
        await standby.read()
        store.clock_s += 20
        await standby.take()
        assert store.now is not None
        assert primary.seen is not None
        assert store.now.version == primary.seen.now.version
        for ask in (primary.renew, primary.record_solo, primary.give_up):
            with pytest.raises(RefusedError, match="has forgotten"):
                await ask()
        assert store.now.record.holder == "b"

    played(play)


def test_questions_wait_for_one_another() -> None:
    store = Register()
    lease = store.lease()

    async def play() -> None:
        await lease.take()
        await asyncio.gather(lease.renew(), lease.record_in_sync("r1"), lease.renew())
        assert store.now is not None
        assert store.now.version == 4
        assert store.now.record.in_sync == "r1"
        assert lease.held is not None

    played(play)


def test_a_claim_is_had_before_the_holder_is_dead_and_ends_what_that_one_can_record() -> None:
    store = Register(Versioned(OTHER, 7))
    other, me = store.lease("other", "r0"), store.lease()

    async def play() -> None:
        with pytest.raises(RefusedError):  # its lease may still run
            await me.take()
        store.clock_s += 1
        assert (await me.claim()).term == 6
        assert me.replaced is not None
        assert me.replaced.now.record == OTHER
        # Waited for from when it was first seen.
        assert me.replaced.since_s == 1000
        with pytest.raises(RefusedError):
            await other.record_solo()

    played(play)


def test_a_claim_comes_too_late_for_a_holder_that_went_solo() -> None:
    store = Register(Versioned(OTHER, 7))
    me = store.lease()

    async def play() -> None:
        await me.read()
        store.now = Versioned(replace(OTHER, in_sync=None, attempt=2), 8)
        with pytest.raises(RefusedError, match="not for me"):
            await me.claim()
        assert me.held is None

    played(play)


def test_a_claim_without_an_answer_is_known_for_what_it_is_once_it_is_seen() -> None:
    store = Register(Versioned(OTHER, 7))
    me = store.lease()

    async def play() -> None:
        store.does = ["late"]
        with pytest.raises(OutcomeUnknownError):
            await me.claim()
        assert me.held_until_s == -math.inf
        store.comes_late()
        await me.read()
        assert me.held is not None
        assert me.replaced is not None
        assert me.replaced.now.record == OTHER

    played(play)


@pytest.mark.parametrize("is_down", [True, False])
def test_a_term_that_was_given_up_is_never_renewed_whatever_is_answered_late(
    *, is_down: bool
) -> None:
    """A guest that was handed over was paused for good: each renewal kept the standby waiting."""
    store = Register()

    async def play() -> None:
        lease = store.lease()
        await lease.take()
        store.does = ["late", "late"]
        with pytest.raises(OutcomeUnknownError):
            await lease.renew()
        store.is_down = is_down
        with pytest.raises(ArbiterDownError if is_down else OutcomeUnknownError):
            await lease.give_up()
        store.is_down = False
        store.comes_late()  # the renewal: what came after it was to be put over an older record
        with pytest.raises(RefusedError):
            await lease.renew()
        assert lease.held is None
        await lease.read()
        assert lease.held is None

    played(play)
