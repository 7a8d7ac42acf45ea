"""What primary and standby decide, from views alone."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmckpt.errors import StorageError, UsageError
from vmckpt.lease import primary, standby
from vmckpt.lease.primary import ReplicaStanding
from vmckpt.lease.record import LeaseRecord, LeaseSpan, decode, encode
from vmckpt.lease.rule import (
    Claimant,
    Holding,
    SeenRecord,
    given_up,
    is_entitled,
    renewed,
    taken,
    wait_s,
    with_in_sync,
)
from vmckpt.lease.standby import Fencing
from vmckpt.lease.store import Versioned

SPAN = LeaseSpan(1.0, 0.01)
RECORD = LeaseRecord(term=3, holder="a", attempt=5, span=SPAN, in_sync="r1")
SEEN = SeenRecord(Versioned(RECORD, 7), since_s=100.0)
STANDBY = Claimant("b", replica="r1")


# -- the rule ------------------------------------------------------------------------------------


@given(
    duration_s=st.floats(0.01, 1000),
    drift=st.floats(0, 0.2),
    holder_rate=st.floats(-1, 1),
    claimant_rate=st.floats(-1, 1),
)
def test_whoever_waits_by_a_fast_clock_outlasts_a_holder_with_a_slow_one(
    duration_s: float, drift: float, holder_rate: float, claimant_rate: float
) -> None:
    span = LeaseSpan(duration_s, drift)
    # True time that passes while each clock, which drifts as far as is allowed, counts its part.
    held_s = span.holder_s / (1 + holder_rate * drift)
    waited_s = span.claimant_s / (1 + claimant_rate * drift)
    assert held_s <= waited_s * (1 + 1e-12)


def test_a_claimant_counts_from_when_it_saw_the_last_renewal() -> None:
    assert wait_s(SEEN, now_s=100.0) == pytest.approx(1.01)
    assert wait_s(SEEN, now_s=101.0) == pytest.approx(0.01)
    assert wait_s(SEEN, now_s=101.02) == 0


def test_only_proof_of_this_holders_death_makes_the_wait_shorter() -> None:
    assert wait_s(SEEN, now_s=100.0, dead=Holding(3, "a")) == 0
    for other in (Holding(2, "a"), Holding(4, "a"), Holding(3, "b")):
        assert wait_s(SEEN, now_s=100.0, dead=other) > 1
    released = SeenRecord(Versioned(given_up(RECORD, 6), 8), 100.0)
    assert wait_s(released, now_s=100.0) == 0


def test_who_may_take_the_next_term() -> None:
    solo = with_in_sync(RECORD, None, 6)
    assert is_entitled(RECORD, STANDBY)
    assert not is_entitled(RECORD, Claimant("b", replica="r0"))
    assert not is_entitled(RECORD, Claimant("b"))
    assert not is_entitled(solo, STANDBY)
    assert not is_entitled(solo, Claimant("b"))
    # Its own successor, where the guest runs.
    assert is_entitled(solo, Claimant("a2", succeeds="a"))
    assert not is_entitled(solo, Claimant("a2", succeeds="z"))
    # Given up with no one in sync: protection has ended in good order.
    assert is_entitled(given_up(solo, 6), Claimant("b"))
    assert not is_entitled(given_up(RECORD, 6), Claimant("c"))


def test_terms_only_grow_and_a_new_one_begins_alone() -> None:
    assert taken(RECORD, STANDBY, SPAN, attempt=1) == LeaseRecord(4, "b", 1, SPAN)
    for same in (renewed(RECORD, 6), with_in_sync(RECORD, "r2", 6), given_up(RECORD, 6)):
        assert (same.term, same.holder, same.attempt) == (3, "a", 6)


# -- records -------------------------------------------------------------------------------------


@given(
    st.builds(
        LeaseRecord,
        term=st.integers(1, 1 << 63),
        holder=st.text(),
        attempt=st.integers(0, 1 << 63),
        span=st.builds(LeaseSpan, st.floats(0.001, 1000), st.floats(0, 0.49)),
        in_sync=st.none() | st.text(),
        released=st.booleans(),
    )
)
def test_a_record_is_read_as_it_was_written(record: LeaseRecord) -> None:
    assert decode(encode(record), "here") == record


def test_the_text_of_a_record_does_not_change() -> None:
    assert encode(RECORD) == (
        '{"format":1,"term":3,"holder":"a","attempt":5,"span":{"duration_s":1.0,"drift":0.01},'
        '"in_sync":"r1","released":false}'
    )


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('"format":1', '"format":2', "another version of vmckpt"),
        ("{", "", "it is not valid JSON"),
        ('"term":3', '"term":0', "term"),
        ('"term":3', '"term":true', "got `bool` - at `.*term`"),
        ('"in_sync":"r1"', '"in_sync":7', "in_sync"),
        (',"released":false', "", "missing or unknown"),
        ('"drift":0.01', '"drift":0.7', "a lease cannot last"),
        ('"drift":0.01', '"drift":"0"', "got `str` - at `.*drift`"),
        ('{"duration_s":1.0,"drift":0.01}', "[]", "Expected `object`"),
        ('"term":3', '"term":', "it is not valid JSON"),
    ],
)
def test_a_record_that_is_damaged_is_no_record(old: str, new: str, why: str) -> None:
    text = encode(RECORD).replace(old, new, 1)
    with pytest.raises(StorageError, match=why) as caught:
        decode(text, "there")
    assert caught.value.what == "there holds no lease"


@pytest.mark.parametrize(
    ("duration_s", "drift"), [(0.0, 0.1), (-1.0, 0.1), (1.0, -0.1), (1.0, 0.5)]
)
def test_a_span_that_cannot_be_is_refused(duration_s: float, drift: float) -> None:
    with pytest.raises(UsageError, match="a lease cannot last"):
        LeaseSpan(duration_s, drift)


# -- the primary ---------------------------------------------------------------------------------

HOLDS = primary.PrimaryView(term=3, highest_term=3, held_until_s=200.0, renew_from_s=150.0)


def move(view: primary.PrimaryView, now_s: float) -> primary.PrimaryMove:
    return primary.decide(view, now_s=now_s, margin_s=1.0, patience_s=5.0)


def test_a_primary_serves_renews_and_stops_by_its_clock() -> None:
    assert move(HOLDS, 149.9) is primary.PrimaryMove.SERVE
    assert move(HOLDS, 150.0) is primary.PrimaryMove.RENEW
    assert move(HOLDS, 198.9) is primary.PrimaryMove.RENEW
    assert move(HOLDS, 199.0) is primary.PrimaryMove.STOP_GUEST
    # One that was paused, and one that never held it.
    assert move(HOLDS, 1e6) is primary.PrimaryMove.STOP_GUEST
    assert move(primary.PrimaryView(term=3, highest_term=3), 0.0) is primary.PrimaryMove.STOP_GUEST


def test_a_higher_term_ends_it_whatever_the_lease_says() -> None:
    assert move(replace(HOLDS, highest_term=4), 100.0) is primary.PrimaryMove.STAND_DOWN


def test_a_silent_standby_is_recorded_as_stale_before_anything_goes_on_without_it() -> None:
    waits = replace(
        HOLDS, standing=ReplicaStanding.IN_SYNC, unanswered_since_s=100.0, acknowledged=6
    )
    assert move(waits, 105.0) is primary.PrimaryMove.SERVE
    assert move(waits, 105.1) is primary.PrimaryMove.RECORD_SOLO
    unsettled = replace(waits, standing=ReplicaStanding.UNSETTLED)
    assert move(unsettled, 105.1) is primary.PrimaryMove.RECORD_SOLO
    assert move(replace(waits, standing=ReplicaStanding.SOLO), 105.1) is primary.PrimaryMove.SERVE


def releases(view: primary.PrimaryView, epoch: int, now_s: float = 100.0) -> bool:
    return primary.may_release(view, epoch, now_s=now_s, margin_s=1.0)


@pytest.mark.parametrize("standing", [ReplicaStanding.IN_SYNC, ReplicaStanding.UNSETTLED])
def test_output_leaves_only_when_a_replica_that_may_take_over_has_seen_it(
    standing: ReplicaStanding,
) -> None:
    view = replace(HOLDS, standing=standing, acknowledged=6)
    assert releases(view, 6)
    assert not releases(view, 7)
    assert releases(replace(view, standing=ReplicaStanding.SOLO), 7)


def test_no_output_leaves_without_the_lease_or_under_a_higher_term() -> None:
    acknowledged = replace(HOLDS, acknowledged=6)
    assert releases(acknowledged, 6, now_s=198.9)
    for view in (acknowledged, replace(HOLDS, standing=ReplicaStanding.SOLO)):
        assert not releases(view, 6, now_s=199.0)
        assert not releases(replace(view, highest_term=4), 6)
        assert not primary.may_run(view, now_s=199.0, margin_s=1.0)


# -- the standby ---------------------------------------------------------------------------------

FOLLOWS = standby.StandbyView(
    me=STANDBY, complete=True, follows_term=3, heard_s=(100.0, 90.0), seen=SEEN
)


def choose(view: standby.StandbyView, now_s: float) -> standby.StandbyMove:
    return standby.decide(view, now_s=now_s, margin_s=0.1, silence_s=0.3)


def test_a_standby_follows_whom_it_hears_on_any_path() -> None:
    assert choose(FOLLOWS, 100.2) is standby.StandbyMove.FOLLOW
    assert choose(replace(FOLLOWS, seen=None), 1e6) is standby.StandbyMove.FOLLOW
    assert choose(replace(FOLLOWS, heard_s=(90.0, 100.4)), 100.5) is standby.StandbyMove.FOLLOW


def test_a_silent_primary_is_fenced_once_or_waited_out() -> None:
    silent_s = 100.4
    assert choose(FOLLOWS, silent_s) is standby.StandbyMove.WAIT
    assert choose(replace(FOLLOWS, fencing=Fencing.READY), silent_s) is standby.StandbyMove.CLAIM
    assert choose(replace(FOLLOWS, fencing=Fencing.UNDER_WAY), silent_s) is standby.StandbyMove.WAIT
    assert choose(replace(FOLLOWS, dead=Holding(3, "a")), silent_s) is standby.StandbyMove.TAKE
    assert choose(replace(FOLLOWS, dead=Holding(2, "a")), silent_s) is standby.StandbyMove.WAIT
    assert choose(FOLLOWS, 101.02) is standby.StandbyMove.TAKE
    # It is heard, but has not renewed: it has stopped its guest.
    assert choose(replace(FOLLOWS, heard_s=(101.0,)), 101.02) is standby.StandbyMove.TAKE


def test_a_replica_that_is_not_in_sync_never_takes_over() -> None:
    solo = SeenRecord(Versioned(with_in_sync(RECORD, None, 6), 8), 100.0)
    for view in (
        replace(FOLLOWS, seen=solo),
        replace(FOLLOWS, complete=False),
        replace(FOLLOWS, me=Claimant("b", replica="r0")),
    ):
        for dead in (None, Holding(3, "a")):
            assert choose(replace(view, dead=dead), 1e6) is standby.StandbyMove.STALE


def test_a_replica_of_an_earlier_term_stands_down() -> None:
    other = SeenRecord(Versioned(LeaseRecord(4, "c", 1, SPAN), 9), 100.0)
    assert choose(replace(FOLLOWS, seen=other), 1e6) is standby.StandbyMove.STAND_DOWN


def test_a_replica_is_not_of_a_term_that_was_given_up_after_its_primarys() -> None:
    """The guest went on without it; another standby took it over in vain: its primary has it."""
    solo = with_in_sync(RECORD, None, 6)
    for later in (replace(RECORD, term=4), LeaseRecord(5, "c", 1, SPAN)):
        given = given_up(with_in_sync(later, None, 2), 3)
        seen = SeenRecord(Versioned(given, 9), 100.0)
        assert choose(replace(FOLLOWS, seen=seen), 1e6) is standby.StandbyMove.STAND_DOWN
    # Of its own one that died as it was about to go on alone nothing more was let out.
    died = SeenRecord(Versioned(given_up(solo, 7), 9), 100.0)
    assert choose(replace(FOLLOWS, seen=died), 100.0) is standby.StandbyMove.TAKE


def test_the_guest_runs_here_only_while_the_term_is_held() -> None:
    mine = SeenRecord(Versioned(LeaseRecord(4, "b", 1, SPAN), 9), 100.0)
    view = replace(FOLLOWS, seen=mine, term=4, held_until_s=101.0)
    assert choose(view, 100.8) is standby.StandbyMove.PROMOTE
    assert choose(view, 100.95) is standby.StandbyMove.RENEW
    higher = SeenRecord(Versioned(LeaseRecord(5, "c", 1, SPAN), 10), 100.9)
    assert choose(replace(view, seen=higher), 100.8) is standby.StandbyMove.STAND_DOWN


def test_a_claimed_term_lets_the_guest_run_only_when_its_former_holder_cannot_act() -> None:
    mine = SeenRecord(Versioned(LeaseRecord(4, "b", 1, SPAN), 9), 100.4)
    claimed = replace(FOLLOWS, seen=mine, term=4, held_until_s=101.4, replaced=SEEN)
    assert choose(claimed, 100.5) is standby.StandbyMove.WAIT
    assert choose(replace(claimed, fencing=Fencing.READY), 100.5) is standby.StandbyMove.FENCE
    assert choose(replace(claimed, dead=Holding(3, "a")), 100.5) is standby.StandbyMove.PROMOTE
    assert choose(replace(claimed, dead=Holding(4, "b")), 100.5) is standby.StandbyMove.WAIT
    # The former lease is counted from when it was seen, not from the claim.
    assert choose(claimed, 101.02) is standby.StandbyMove.PROMOTE
    assert choose(claimed, 101.35) is standby.StandbyMove.RENEW
