"""What libvirt is told so that a held QEMU allows the downtime that is requested."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmckpt.migrate.domains.hold import Hold
from vmckpt.options.reading import UNLIMITED_DOWNTIME_MS
from vmckpt.preflight.domains.checks import held_mib_per_s
from vmckpt.units import MIB
from vmckpt.vm.domains.job import DomainJob

pytestmark = pytest.mark.unit
# QEMU's own limit while libvirt has been told of none.
DEFAULT_S = 0.3


def job(number: int, mib_per_s: float) -> DomainJob:
    return DomainJob(active=True, round=number, throughput_bytes_per_s=mib_per_s * MIB)


@given(memory_bytes=st.integers(16 * MIB, 1 << 44))
def test_a_held_guest_may_still_be_stopped_with_all_of_its_memory_left(memory_bytes: int) -> None:
    held = held_mib_per_s(memory_bytes) * MIB
    assert held * UNLIMITED_DOWNTIME_MS / 1000 >= memory_bytes
    assert held * DEFAULT_S <= max(0.3 * MIB, 0.0002 * memory_bytes)  # next to nothing till then


def test_it_is_held_until_all_has_gone_once_and_then_told_the_best_speed_seen() -> None:
    hold = Hold(1)
    told = []
    for look in (job(1, 100), job(1, 400), job(2, 300), job(3, 420), job(4, 800)):
        hold.see(look)
        told.append(hold.order(look, 300))
    # 400 MiB/s for 300 ms are 120 s at 1 MiB/s; a little more is not worth a call.
    assert told == [None, None, 120_000, None, 240_000]
    assert not hold.is_on


def test_a_limit_of_the_bandwidth_holds_at_the_switchover_too() -> None:
    hold = Hold(2, 50 * MIB)
    assert hold.is_on
    hold.see(job(2, 400))
    assert hold.give(300) == 7500
    hold.limit_bytes_per_s = 20 * MIB
    assert hold.give(300) == 3000
    assert hold.give(UNLIMITED_DOWNTIME_MS) == UNLIMITED_DOWNTIME_MS


def test_a_link_that_was_not_seen_to_move_says_nothing() -> None:
    assert Hold(1).order(job(2, 0), 300) is None
