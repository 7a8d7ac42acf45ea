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


CURVE = SEEN.to_json()["curve"]
POINTS = [list(point) for point in CURVE["points"]]
COURSE = SEEN.to_json()["course"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("took_s", 1e308),
        ("faults_per_s", 1e308),
        ("ram_bytes", -1),
        ("busy", 0.0),
        ("curve", CURVE | {"points": [POINTS[0], POINTS[0]]}),
        ("curve", CURVE | {"points": [POINTS[0], [2.0, 0.0, 0.0, 0.0]]}),
        ("curve", CURVE | {"points": [[0.0, 1.0, 1.0, 1.0]]}),
        ("curve", CURVE | {"points": [[1.0, 1.0, 1e308, 1e308]]}),
        ("ram", {"zero": 1e308, "compressible": 0.0, "incompressible": 0.0, "ratio": 1.0}),
        ("ram", {"zero": 0.0, "compressible": 0.0, "incompressible": 1.0, "ratio": -1.0}),
        ("layout", [[7.0, 0.5, 0.0, 0.5, 1.0]]),
        ("windows", [[0.0, -1.0, 5]]),
        ("course", COURSE | {"pages": []}),
        ("course", COURSE | {"counts": []}),
        ("course", COURSE | {"pages": [[-5]]}),
        ("course", COURSE | {"ends_s": [1e308]}),
        ("course", {"ends_s": [2.0, 1.0], "pages": [[1, 2], [1]], "counts": [[], []]}),
        ("course", {"ends_s": [1.0, 2.0], "pages": [[2, 1], [1]], "counts": [[], []]}),
    ],
)
def test_what_no_guest_can_do_is_malformed(field: str, value: object) -> None:
    """Another host told it: forecasts divided by nothing, or took a logarithm of it."""
    told = json.loads(json.dumps(SEEN.to_json()))
    with pytest.raises(MalformedError):
        DirtyRate.from_json(told | {field: value})


def test_shares_that_are_off_by_their_rounding_are_shares() -> None:
    told = json.loads(json.dumps(SEEN.to_json()))
    sums = {"zero": 1.0000000000000002, "compressible": -1e-17, "incompressible": 0.0, "ratio": 1.0}
    assert DirtyRate.from_json(told | {"ram": sums}).ram


def test_what_parts_of_a_span_came_to_says_when_the_guest_was_busy() -> None:
    course = guest_of(SEEN).course
    assert course
    assert course.between(0.0, 0.5) == 0
    assert course.between(0.5, 1.0) == pytest.approx(100)
    assert course.between(1.0, 2.0) == 0
