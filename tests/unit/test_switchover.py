"""When the guest of a pre-copy may be stopped, and how fast the target then is said to read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmckpt.forecast.model.switchover import (
    LEAST_PART,
    SentSample,
    behind_s,
    switchover_bytes_per_s,
)
from vmckpt.hosts.host import Queues
from vmckpt.hosts.sockets.tcp_table import listening_ports, table_queues

MB = 1_000_000


def steady(*, bytes_per_s: float, queued: int, count: int = 11) -> tuple[SentSample, ...]:
    """Looks 0.1 s apart of a target that reads at a steady speed."""
    return tuple(
        SentSample(i / 10, 500 * MB + round(bytes_per_s * i / 10) + queued, queued)
        for i in range(count)
    )


def test_the_guest_waits_while_the_first_pass_is_not_read() -> None:
    looks = steady(bytes_per_s=100 * MB, queued=0)
    read = looks[-1].taken_bytes
    assert switchover_bytes_per_s(looks, read + 1, 0.3) is None
    assert switchover_bytes_per_s(looks, read, 0.3) == pytest.approx(100 * MB)


def test_what_is_queued_has_to_be_read_within_the_downtime_too() -> None:
    looks = steady(bytes_per_s=100 * MB, queued=6 * MB)
    # 6 MB of the 30 MB that go in 0.3 s.
    assert switchover_bytes_per_s(looks, 0, 0.3) == pytest.approx(80 * MB)


def test_a_link_that_is_always_full_ends_all_the_same() -> None:
    looks = steady(bytes_per_s=100 * MB, queued=50 * MB)
    assert switchover_bytes_per_s(looks, 0, 0.03) == pytest.approx(LEAST_PART * 100 * MB)


def test_the_best_of_the_last_second_counts_and_nothing_older() -> None:
    slow = [SentSample(i / 10, 100 * MB * i, 0) for i in range(3)]
    looks = (*slow, *(SentSample(2 + i / 10, 300 * MB + MB * i, 0) for i in range(4)))
    assert switchover_bytes_per_s(looks, 0, 0.3) == pytest.approx(10 * MB)


def test_bursts_under_a_limit_do_not_tell_a_speed_beyond_it() -> None:
    looks = steady(bytes_per_s=120 * MB, queued=0)
    assert switchover_bytes_per_s(looks, 0, 0.3, 60 * MB) == pytest.approx(60 * MB)
    assert switchover_bytes_per_s(looks, 0, 0.3, 200 * MB) == pytest.approx(120 * MB)


def test_how_far_behind_a_target_is() -> None:
    assert behind_s(()) == 0.0
    assert behind_s(steady(bytes_per_s=100 * MB, queued=0)) == 0.0
    assert behind_s(steady(bytes_per_s=100 * MB, queued=6 * MB)) == pytest.approx(0.06)
    assert behind_s(steady(bytes_per_s=0, queued=1)) == float("inf")
    # One look tells no speed, nor do two at once; and what it read long ago says nothing.
    assert behind_s(steady(bytes_per_s=0, queued=6 * MB, count=1)) == 0.0
    assert behind_s([SentSample(0.0, 0, 0), SentSample(0.01, 6 * MB, 6 * MB)]) == 0.0
    slow = [SentSample(0.0, 0, 0), SentSample(0.1, 50 * MB, 0), SentSample(0.2, 57 * MB, 6 * MB)]
    assert behind_s(slow) == pytest.approx(0.6)


def test_a_target_that_reads_nothing_gives_no_speed() -> None:
    assert switchover_bytes_per_s(steady(bytes_per_s=0, queued=0), 0, 0.3) is None
    assert switchover_bytes_per_s(steady(bytes_per_s=1, queued=0, count=1), 0, 0.3) is None


@given(
    st.lists(st.tuples(st.integers(1, 10**9), st.integers(0, 10**7)), min_size=1, max_size=50),
    st.integers(0, 10**10),
    st.floats(0.001, 10.0),
)
def test_a_speed_is_never_more_than_what_was_seen(
    steps: list[tuple[int, int]], first_pass: int, downtime_s: float
) -> None:
    looks, sent = [], 10**7
    for number, (more, queued) in enumerate(steps):
        sent += more
        looks.append(SentSample(number / 10, sent, queued))
    speed = switchover_bytes_per_s(tuple(looks), first_pass, downtime_s)
    if speed is not None:
        assert looks[-1].taken_bytes >= first_pass
        assert 0 < speed <= max(1.0, 10 * (10**9 + 10**7) * 1.001)


TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:C000 00000000:0000 0A 00000000:00000080 00:00000000 00000000     0        0 1
   1: 0100007F:C000 0100007F:9999 01 00000007:00001000 00:00000000 00000000     0        0 2
   2: 0100007F:9999 0100007F:C000 01 00002000:00000003 00:00000000 00000000     0        0 3
   3: 0100007F:C000 0100007F:9998 06 00000007:00001000 00:00000000 00000000     0        0 0
   4: 0100007F:9997 0100007F:C001 01 00000100:00000003 00:00000000 00000000     0        0 4
"""


def test_the_queues_of_a_port_are_those_of_its_open_connections() -> None:
    assert table_queues(TABLE, 0xC000) == Queues(7 + 0x2000, 0x1000 + 3)
    assert table_queues(TABLE, 0xC001) == Queues(0x100, 3)
    assert table_queues("", 0xC000) == Queues(0, 0)
    assert listening_ports(TABLE, "127.0.0.1") == {0xC000}


def test_a_connection_that_the_kernel_tells_of_twice_counts_once() -> None:
    again = TABLE.splitlines(keepends=True)[2]
    assert table_queues(TABLE + again, 0xC000) == table_queues(TABLE, 0xC000)
