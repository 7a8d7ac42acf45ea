"""Silences from ARP probes, and the frames."""

from ipaddress import IPv4Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmckpt.hosts.sockets.arp import Echoes, EchoFigures, answers, probe

pytestmark = pytest.mark.unit

MS = 10**6
MINE, THEIRS = bytes.fromhex("02fc00000001"), bytes.fromhex("525400112233")
ADDRESS = IPv4Address("10.77.0.7")
# From tcpdump: 10.77.0.7 answers a probe from no address.
ANSWER = bytes.fromhex(
    "02fc00000001" "525400112233" "0806" "0001" "0800" "06" "04" "0002"
    "525400112233" "0a4d0007" "02fc00000001" "00000000"
)  # fmt: skip


def test_a_probe_is_a_request_from_no_address_to_the_guest_alone() -> None:
    assert probe(MINE, THEIRS, ADDRESS).hex() == (
        "525400112233" "02fc00000001" "0806" "0001" "0800" "06" "04" "0001"
        "02fc00000001" "00000000" "000000000000" "0a4d0007"
    )  # fmt: skip


def test_an_answer_is_recognised() -> None:
    assert answers(ANSWER, MINE, THEIRS, ADDRESS)
    assert answers(ANSWER + bytes(18), MINE, THEIRS, ADDRESS)  # padded to 60 bytes


@pytest.mark.parametrize("at", range(12, len(ANSWER) - 4))
def test_another_frame_is_none(at: int) -> None:
    other = bytearray(ANSWER)
    other[at] ^= 1
    assert not answers(bytes(other), MINE, THEIRS, ADDRESS)


@given(st.binary(max_size=80))
def test_what_is_no_arp_is_no_answer(frame: bytes) -> None:
    assert not answers(frame[: len(ANSWER) - 1], MINE, THEIRS, ADDRESS)


def figures(probes_ms: range, *answers_ms: int) -> EchoFigures:
    echoes, left = Echoes(), sorted(answers_ms)
    for at_ms in probes_ms:
        while left and left[0] < at_ms:
            echoes.heard(left.pop(0) * MS)
        echoes.sent(at_ms * MS)
    for at_ms in left:
        echoes.heard(at_ms * MS)
    return echoes.figures(probes_ms.stop * MS)


def test_a_guest_that_answers_each_probe_is_never_silent() -> None:
    assert figures(range(0, 100, 5), *range(1, 100, 5)) == (20, 0, 1.0, 0.0, 5.0)


def test_a_silence_begins_with_the_first_probe_that_was_not_answered() -> None:
    early, late = range(1, 50, 5), range(81, 100, 5)
    # The probe at 50 ms is the first without an answer; the one at 80 ms is answered at 81 ms.
    assert figures(range(0, 100, 5), *early, *late) == (14, 6, 31.0, 31.0, 5.0)


def test_a_sender_that_was_delayed_is_no_silence_of_the_guest() -> None:
    echoes = Echoes()
    for at_ms in (0, 5, 200, 205):
        echoes.sent(at_ms * MS)
        echoes.heard((at_ms + 1) * MS)
    assert echoes.figures(210 * MS) == (4, 0, 1.0, 0.0, 5.0)


def test_a_guest_that_never_answers_again_is_silent_until_the_end() -> None:
    assert figures(range(0, 100, 5), 1) == (1, 19, 95.0, 95.0, 5.0)


@given(st.lists(st.integers(0, 300), max_size=80))
def test_no_answer_is_counted_twice_and_no_probe_is_forgotten(answers_ms: list[int]) -> None:
    found = figures(range(0, 300, 5), *answers_ms)
    assert found.received + found.lost == 60
    assert found.longest_gap_ms >= 0
    assert found.silent_ms <= 300


def test_a_sender_that_was_delayed_says_how_much_may_be_missing() -> None:
    """The guest may have been silent since its last answer."""
    echoes = Echoes()
    for at_ms in (0, 5, 40):
        echoes.sent(at_ms * MS)
        if at_ms < 40:
            echoes.heard((at_ms + 1) * MS)
    echoes.heard(60 * MS)
    assert echoes.figures(60 * MS) == (3, 0, 20.0, 0.0, 35.0)


def test_before_its_first_answer_a_guest_is_not_silent() -> None:
    """Whether it could have answered earlier is not known: the probe may have begun late."""
    assert figures(range(0, 100, 5), *range(81, 100, 5)) == (4, 16, 1.0, 0.0, 5.0)
