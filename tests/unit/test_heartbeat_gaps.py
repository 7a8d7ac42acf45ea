"""Silences from arrival times, and what the sequence numbers tell."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmckpt.lab.heartbeats import Beats, answer
from vmckpt.lab.silence import Gap, gaps, summarise

pytestmark = pytest.mark.unit

MS = 10**6
times_ns = st.lists(st.integers(0, 10**6), max_size=50).map(sorted)


def test_gaps_lie_between_arrivals() -> None:
    assert gaps([10, 20, 50], 0, 60) == [Gap(10, 10), Gap(20, 30), Gap(50, 10)]


def test_silence_to_the_end_of_the_window_counts() -> None:
    assert gaps([10, 20], 0, 1000)[-1] == Gap(20, 980)


def test_the_beginning_counts_only_for_a_guest_heard_before() -> None:
    assert gaps([40], 0, 40) == []
    assert gaps([40], 0, 40, heard_before=True) == [Gap(0, 40)]


def test_a_guest_silent_throughout_has_one_gap_if_it_was_heard_before() -> None:
    assert gaps([], 5, 25, heard_before=True) == [Gap(5, 20)]
    assert gaps([], 5, 25) == []


def test_arrivals_outside_the_window_are_ignored() -> None:
    assert gaps([1, 10, 20, 99], 5, 30) == [Gap(10, 10), Gap(20, 10)]


@given(times_ns, st.integers(0, 10**6), st.integers(0, 10**6), st.booleans())
def test_gaps_tile_the_window_from_the_first_bound(
    arrivals: list[int], one: int, other: int, heard_before: bool
) -> None:
    since, until = sorted((one, other))
    found = gaps(arrivals, since, until, heard_before=heard_before)
    inside = [arrival for arrival in arrivals if since <= arrival <= until]
    start = since if heard_before else min(inside, default=until)
    assert sum(gap.length_ns for gap in found) == until - start
    assert all(since <= gap.began_ns < gap.began_ns + gap.length_ns <= until for gap in found)


def test_a_steady_beat_loses_nothing() -> None:
    arrivals = [at * MS for at in range(100)]
    heard = summarise(arrivals, list(range(500, 600)), 0, 99 * MS, heard_before=True)
    assert (heard.received, heard.lost, heard.reordered, heard.duplicated) == (100, 0, 0, 0)
    assert heard.longest_gap_ms == 1.0
    assert heard.gaps_over_20ms == []
    assert (heard.first_ns, heard.last_ns) == (0, 99 * MS)


def test_a_hole_is_lost_beats_and_a_long_gap() -> None:
    heard = summarise([0, 1 * MS, 51 * MS], [7, 8, 58], 0, 51 * MS, heard_before=True)
    assert heard.lost == 49
    assert (heard.longest_gap_ms, heard.gap_began_ns) == (50.0, 1 * MS)
    assert heard.gaps_over_20ms == [(1 * MS, 50.0)]


def test_a_late_beat_is_reordered_and_not_lost() -> None:
    heard = summarise([1, 2, 3, 4], [10, 12, 11, 13], 0, 4, heard_before=False)
    assert (heard.lost, heard.reordered, heard.duplicated) == (0, 1, 0)


def test_a_number_heard_twice_is_duplicated() -> None:
    heard = summarise([1, 2, 3, 4], [10, 11, 11, 12], 0, 4, heard_before=False)
    assert (heard.lost, heard.reordered, heard.duplicated) == (0, 0, 1)


@pytest.mark.parametrize("first", [0, 1])
def test_counting_anew_after_a_reboot_is_no_loss(first: int) -> None:
    numbers = [8000, 8001, first, first + 1, first + 2]
    heard = summarise([1, 2, 3, 4, 5], numbers, 0, 5, heard_before=False)
    assert (heard.lost, heard.reordered, heard.duplicated) == (0, 0, 0)


@given(st.permutations(range(1000, 1020)), st.sets(st.integers(1001, 1018)))
def test_lost_counts_what_is_missing_whatever_the_order(
    order: list[int], missing: set[int]
) -> None:
    numbers = [number for number in order if number not in missing]
    heard = summarise(range(len(numbers)), numbers, 0, 100, heard_before=False)
    assert heard.lost == len(missing)
    assert heard.duplicated == 0


def test_an_empty_window() -> None:
    heard = summarise([], [], 10, 20 * MS, heard_before=False)
    assert (heard.received, heard.longest_gap_ms, heard.first_ns) == (0, 0.0, None)


def test_beats_are_found_across_chunks_and_forgotten_after_15_minutes() -> None:
    beats = Beats()
    for at in range(10_000):
        beats.add(at * MS, at)
    heard = beats.silence(4000 * MS, 8500 * MS, dropped=3)
    assert (heard.received, heard.lost, heard.dropped) == (4501, 0, 3)
    assert heard.longest_gap_ms == 1.0
    for at in range(10_000, 20_000):
        beats.add((at + 15 * 60 * 1000) * MS, at)
    assert beats.silence(0, 8000 * MS, dropped=0).received == 0


@pytest.mark.parametrize(
    "line",
    [b"", b"nonsense", b"[]", b"7", b"null", b"{}", b'{"id": 1}', b'{"id": "x", "since_ns": 0}'],
)
def test_a_malformed_request_is_answered_with_an_error(line: bytes) -> None:
    assert list(answer({}, line, 0)) == ["error"]


def test_an_id_never_heard() -> None:
    assert answer({}, b'{"id": 1, "since_ns": 0}', 0) == {"received": 0}


def test_an_answer_holds_the_fields_of_a_silence() -> None:
    beats = Beats()
    for number in range(3):
        beats.add(number * MS, number)
    reply = answer({7: beats}, b'{"id": 7, "since_ns": 0, "until_ns": 2000000}', 0)
    assert json.loads(json.dumps(reply)) == {
        "received": 3,
        "lost": 0,
        "reordered": 0,
        "duplicated": 0,
        "dropped": 0,
        "longest_gap_ms": 1.0,
        "gap_began_ns": 0,
        "gaps_over_20ms": [],
        "first_ns": 0,
        "last_ns": 2 * MS,
    }
