"""What pages of each kind cost, told by pieces of moves."""

import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.test_learned import run
from vmckpt.events.record import RunRecord
from vmckpt.migrate.calibrate import COMPRESSED, NOISE, TEXT_BYTES, _laps, words
from vmckpt.migrate.learned import learned, moved
from vmckpt.plan.link import Costs, Moved, Piece
from vmckpt.plan.pieces import FEW_PIECES, costs_by_pieces

pytestmark = pytest.mark.unit

MULTIFD = Costs(3e-6, 5e-7, 0.0, 6e-6, 2e-6)
ZSTD = MULTIFD._replace(page_s=5e-6)


def piece(costs: Costs, pages: float, zero_pages: float, holes: float, squeezed: float) -> Piece:
    took_s = pages * costs.page_s + zero_pages * costs.zero_page_s
    took_s += holes * costs.hole_s + squeezed * costs.squeezed_s
    return Piece(took_s, pages, zero_pages, holes, squeezed)


def whole(*pieces: Piece, weight: float = 1.0) -> Moved:
    _, pages, zero_pages, holes, squeezed = (sum(column) for column in zip(*pieces, strict=True))
    return Moved(
        pages, zero_pages, sum(one.took_s for one in pieces), 9.0, None,
        holes=holes, squeezed=squeezed, pieces=pieces, weight=weight,
    )  # fmt: skip


# What each move sends is mixed alike in the end: only its pieces tell what was what.
SENT = {
    "multifd": [whole(*(piece(MULTIFD, n, 10**4 - n, 0, 0) for n in (0, 9000, 400, 10**4)))] * 2,
    "zstd": [
        whole(
            piece(ZSTD, 10**4, 0, 0, 0),
            piece(ZSTD, 10**4, 0, 0, 8000),
            piece(ZSTD, 100, 3 * 10**4, 3 * 10**4, 0),
        )
    ]
    * 2,
}


def test_pieces_tell_what_whole_moves_cannot() -> None:
    found = costs_by_pieces(SENT)
    assert found["multifd"] == pytest.approx(MULTIFD, abs=1e-10)
    assert found["zstd"] == pytest.approx(ZSTD, abs=1e-10)


def test_a_few_pieces_tell_nothing_and_ways_that_were_not_gone_are_not_told() -> None:
    few = SENT["multifd"] + [whole(*SENT["zstd"][0].pieces[: FEW_PIECES - 8 - 1])]
    assert costs_by_pieces({"multifd": few}) == {}
    assert costs_by_pieces({"multifd": SENT["multifd"] * 2, "zstd": []}).keys() == {"multifd"}
    assert costs_by_pieces({}) == {}


def test_pieces_of_moves_that_count_little_count_little() -> None:
    idle = [whole(piece(MULTIFD._replace(page_s=1e-6), 10**4, 0, 0, 0), weight=0.01)] * 9
    found = costs_by_pieces({"multifd": SENT["multifd"] * 2 + idle})
    assert found["multifd"].page_s == pytest.approx(3e-6, rel=0.01)


@given(
    st.lists(
        st.tuples(
            st.floats(0.04, 2.0), st.integers(0, 10**5), st.integers(0, 10**5), st.floats(0, 1)
        ),
        max_size=30,
    )
)
def test_no_cost_is_below_zero(pieces: list[tuple[float, int, int, float]]) -> None:
    made = [Piece(s, n, zero, zero * part, n * part) for s, n, zero, part in pieces]
    for costs in costs_by_pieces({"zstd": [whole(*made)] if made else []}).values():
        assert min(costs) >= 0
        assert costs.page_s > 0


def looked_at(how: dict[str, Any], costs: Costs, content: list[tuple[int, int, int]]) -> RunRecord:
    """A move whose looks saw so many pages, zero pages (all holes) and saved pages between them."""
    holes = sum(zero for _, zero, _ in content)
    record = run(request={**how, "hole_pages": holes})
    at_s, pages, zeroes, sent_bytes = 1.0, 1, 0, 4104.0
    looks = [(at_s, pages, zeroes, sent_bytes)]
    for more, zero, saved in content:
        at_s += piece(costs, more, zero, zero, saved).took_s
        pages, zeroes, sent_bytes = pages + more, zeroes + zero, sent_bytes + 4104 * (more - saved)
        looks.append((at_s, pages, zeroes, sent_bytes))
    record.samples = [
        {"at_s": at_s, "status": "active", "round": 1, "normal_pages": pages, "zero_pages": zeroes,
         "transferred_bytes": sent_bytes}
        for at_s, pages, zeroes, sent_bytes in looks
    ]  # fmt: skip
    record.samples.append(record.samples[-1] | {"status": "completed", "round": 4})
    took_s = at_s - 1.0
    came = {
        "transferred_bytes": sent_bytes,
        "transfer_time_s": took_s,
        "total_time_s": took_s + 0.3,
    }
    record.result = {**(record.result or {}), **came}
    return record


CONTENT = [(20_000, 0, 0), (20_000, 0, 16_000), (100, 40_000, 0), (15_000, 15_000, 5_000)]


def test_looks_at_a_move_teach_what_a_hole_and_a_compressed_page_cost() -> None:
    moves = [looked_at({"compression": "zstd"}, ZSTD, CONTENT) for _ in range(3)]
    # Every zero page was a hole: what one costs that is none nobody knows, but what both come to.
    costs = learned(moves, "a", "b")["zstd"].costs
    assert costs.page_s == pytest.approx(5e-6, rel=1e-3)
    assert costs.squeezed_s == pytest.approx(6e-6, rel=1e-3)
    assert costs.zero_page_s + costs.hole_s == pytest.approx(2.5e-6, rel=1e-3)


@pytest.mark.parametrize("how", [{}, {"channels": 2, "bandwidth_bytes_per_s": 1000}])
def test_a_move_over_one_channel_or_held_to_a_bandwidth_has_no_pieces(how: dict[str, Any]) -> None:
    split, other = (
        moved(looked_at(request, MULTIFD, CONTENT)) for request in ({"channels": 2}, how)
    )
    assert split is not None
    assert other is not None
    assert len(split.pieces) == len(CONTENT)
    assert {one.squeezed for one in split.pieces} == {0.0}  # what is not compressed saves nothing
    assert other.pieces == ()


def test_a_piece_that_a_limit_held_back_tells_nothing() -> None:
    """Noise at 820 MB/s, text at 84 MB/s: under 500 MB/s only the text came as fast as it goes."""
    slow = {"compression": "zstd", "bandwidth_bytes_per_s": 500 * 10**6}
    one = moved(looked_at(slow, ZSTD, [(20_000, 0, 0), (90_000, 0, 80_000)]))
    assert one is not None
    assert not one.limited
    assert [piece.pages for piece in one.pieces] == [90_000]


def test_calibration_compresses_noise_and_text() -> None:
    filled = {lap.fill.source for lap in _laps(Path("words")) if lap.options == COMPRESSED}
    assert filled == {NOISE, "words"}
    text = words().encode()
    assert len(text) == TEXT_BYTES
    assert 0.2 < len(zlib.compress(text[: 1 << 20], 1)) / (1 << 20) < 0.5
