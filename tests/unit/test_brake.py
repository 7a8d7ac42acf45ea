"""How a guest that writes faster than the link takes is slowed, and what that leads to."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmckpt.replicate.operator.begin import _slowed
from vmckpt.replicate.primary.brake import (
    BACKLOG_S,
    GRACE_S,
    LEAST_RUN_S,
    MOST_OWED_S,
    SHARE,
    SLOT_S,
    STALL_S,
    WATCHED_S,
    Brake,
    Writing,
)
from vmckpt.replicate.status import PROTECTED, ReplicaStatus, Role


def test_a_link_that_was_not_seen_slows_nobody() -> None:
    brake = Brake()
    assert brake.takes_pages_per_s(0, 10.0) == math.inf
    assert not brake.is_due(1 << 40, brake.takes_pages_per_s(0, 10.0))


def test_a_link_that_has_become_slow_is_noticed_by_what_is_on_it() -> None:
    brake = Brake()
    brake.took(10_000, 1.0)
    assert brake.takes_pages_per_s(500, STALL_S) == 10_000
    assert brake.takes_pages_per_s(500, 5.0) == 100
    assert brake.is_due(31, 100)
    assert not brake.is_due(30, 100)
    brake.took(1, 100.0)  # says nothing
    assert brake.pages_per_s == 10_000


@given(link=st.floats(1e3, 1e6), times=st.floats(0.1, 4.9), first=st.floats(0, 1e7))
def test_epochs_come_to_be_bounded_whatever_the_guest_writes(
    link: float, times: float, first: float
) -> None:
    """Each epoch is what was written while the one before was on its way.

    Up to nearly five times what the link takes: beyond that a tenth of its time is too much.
    """
    brake, epoch, writes = Brake(), first, times * link
    for _ in range(200):
        on_its_way_s = epoch / link
        brake.took(int(epoch), on_its_way_s)
        takes = min(link, brake.takes_pages_per_s(int(epoch), on_its_way_s))
        free_s = min(on_its_way_s, GRACE_S + takes * BACKLOG_S / writes)
        slots = max(0.0, on_its_way_s - free_s) / SLOT_S
        each = min(writes * SLOT_S, max(brake.allowance(takes), writes * LEAST_RUN_S))
        epoch = free_s * writes + slots * each
    assert epoch <= 2 * (GRACE_S * writes + BACKLOG_S * link) + 1


@pytest.mark.parametrize("share", [SHARE])
def test_less_than_the_link_takes_is_allowed(share: float) -> None:
    assert 0 < share < 1
    assert Brake().allowance(1000) == share * 1000 * SLOT_S


def test_a_guest_that_could_write_more_than_an_epoch_may_have_is_slowed_on_any_link() -> None:
    brake = Brake(most_pages=3200)
    assert not brake.is_due(1600, math.inf)
    assert brake.is_due(1601, math.inf)
    assert brake.allowance(math.inf) == 100
    assert not Brake().is_due(1 << 40, math.inf)


def test_how_fast_a_guest_writes_is_told_by_its_first_moments() -> None:
    """Later it writes the same pages again, which are found once."""
    writing = Writing()
    now_s, dirty = 100.0, 0
    for found in (0, 5000, 6000, 6100, 6100):
        assert writing.is_due(now_s)
        dirty = found
        writing.found(dirty, now_s, now_s + 0.001)
        assert not writing.is_due(now_s + WATCHED_S / 2)
        now_s += WATCHED_S
    assert writing.pages_per_s == 5000 / WATCHED_S


def test_counts_that_take_long_are_made_seldom() -> None:
    writing = Writing()
    writing.found(0, 0.0, 0.5)
    assert not writing.is_due(4.9)
    assert writing.is_due(5.0)


MIB = 1 << 20


@pytest.mark.parametrize(
    ("writes", "takes", "slowed", "says"),
    [
        (0, 0, 0, None),
        (100, 0, 0, None),
        (70, 100, 0, None),
        (90, 100, 0, "the guest writes 90.0 MiB/s, and the link transfers 100 MiB/s of it"),
        (400, 100, 0, "the guest writes 400 MiB/s, and the link transfers 100 MiB/s of it"),
        (400, 100, 62, "now for 62 % of its time"),
        (10, 100, 3, "the guest writes faster than the link transfers"),
    ],
)
def test_start_warns_by_what_it_measured(
    writes: int, takes: int, slowed: int, says: str | None
) -> None:
    status = ReplicaStatus(
        role=Role.PRIMARY,
        state=PROTECTED,
        written_bytes_per_s=writes * MIB,
        link_bytes_per_s=takes * MIB,
        slowed_percent=slowed,
    )
    warnings = _slowed(status)
    assert len(warnings) == (says is not None)
    assert says is None or says in warnings[0]


def test_nothing_is_said_by_a_service_that_does_not_measure() -> None:
    assert _slowed(ReplicaStatus(role=Role.PRIMARY, state=PROTECTED)) == []


def test_a_guest_that_ran_for_longer_than_it_was_to_is_stopped_all_the_same() -> None:
    """On a busy machine each sleep takes longer."""
    brake, takes = Brake(), 1000.0
    allowed = brake.allowance(takes)
    assert brake.owed_s(allowed, 0.04, takes) == pytest.approx(SLOT_S - 0.04)
    assert brake.owed_s(2 * allowed, SLOT_S, takes) == pytest.approx(SLOT_S)
    assert brake.owed_s(0, SLOT_S, takes) == 0.0
    assert brake.owed_s(math.inf, 3.0, takes) == MOST_OWED_S


@pytest.mark.parametrize("look_s", [0.01, 0.1, 0.4])
@pytest.mark.parametrize("times", [1.5, 2.0, 4.0])
def test_it_writes_less_than_the_link_takes_however_long_a_look_at_it_takes(
    look_s: float, times: float
) -> None:
    brake, takes = Brake(), 1000.0
    writes = times * takes
    owed_s = brake.owed_s(look_s * writes, look_s, takes)
    runs_s = look_s + owed_s * LEAST_RUN_S / SLOT_S
    assert runs_s * writes / (look_s + owed_s) < takes


@given(
    written=st.floats(0, 1e9), ran_s=st.floats(0, 100), takes=st.floats(0, 1e6) | st.just(math.inf)
)
def test_what_it_owes_is_bounded(written: float, ran_s: float, takes: float) -> None:
    assert 0.0 <= Brake().owed_s(written, ran_s, takes) <= MOST_OWED_S
