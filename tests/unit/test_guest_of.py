"""A measurement, written down and read again, as the guest that is forecast."""

import json

import pytest

from vmckpt.forecast.guest_of import guest_of
from vmckpt.forecast.measure.dirty_rate import DirtyRate
from vmckpt.forecast.model.dirtying import DirtyCurve
from vmckpt.foreign import MalformedError
from vmckpt.memory.content import Content, Piece
from vmckpt.memory.windows import Dirtied, DirtyHistory

pytestmark = pytest.mark.unit

# Two pieces of 128 pages: noise, half of it zero; text, a quarter of it holes.
NOISE, TEXT = Content(0.5, 0.0, 0.5, 1.0), Content(0.25, 0.75, 0.0, 0.125)
SEEN = DirtyRate(
    source="page-tracking", why="", took_s=2.0, ram_bytes=256 * 4096,
    curve=DirtyCurve.measured([[(1.0, 50.0)], [(2.0, 100.0)]], 256),
    windows=(), faults=100, ram=NOISE, dirtied=None,
    layout=(Piece(0.0, NOISE), Piece(0.25, TEXT)),
    course=DirtyHistory((2.0,), ((100,),), ((Dirtied(0.5, 0), Dirtied(1.0, 100)),)),
)  # fmt: skip


def test_each_piece_of_memory_keeps_what_it_shrinks_to() -> None:
    read = DirtyRate.from_json(json.loads(json.dumps(SEEN.to_json())))
    assert (read.layout, read.course) == (SEEN.layout, SEEN.course)
    noise, text = guest_of(read).stretches
    assert tuple(noise) == (64, 64, 0, 1.0)
    assert tuple(text) == (96, 32, 32, 0.125)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("took_s", None),
        ("ram_bytes", "1"),
        ("curve", []),
        ("windows", [[1.0]]),
        ("ram", {"zero": 1.0}),
        ("layout", [[0.0]]),
        ("course", {"ends_s": 1}),
    ],
)
def test_what_is_no_measurement_is_malformed(field: str, value: object) -> None:
    """Another host told it: KeyError and TypeError ended the command."""
    told = json.loads(json.dumps(SEEN.to_json()))
    with pytest.raises(MalformedError):
        DirtyRate.from_json(told | {field: value})
    with pytest.raises(MalformedError):
        DirtyRate.from_json([])


def test_what_parts_of_a_span_came_to_says_when_the_guest_was_busy() -> None:
    course = guest_of(SEEN).course
    assert course
    assert course.between(0.0, 0.5) == 0
    assert course.between(0.5, 1.0) == pytest.approx(100)
    assert course.between(1.0, 2.0) == 0
