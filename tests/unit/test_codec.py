"""Typed values from JSON and back: what is read as it was written, and what is refused."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, Required, TypedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmckpt.codec import builtins, convert, require_within
from vmckpt.foreign import MOST_INTEGER, MalformedError, parse

pytestmark = pytest.mark.unit


class Colour(StrEnum):
    RED = "red"


class Point(NamedTuple):
    x: float
    n: int = 7


@dataclass(frozen=True, slots=True)
class Thing:
    number: int
    path: Path
    colour: Colour
    point: Point
    words: tuple[str, ...]
    table: Mapping[str, float]
    maybe: Point | None = None

    def __post_init__(self) -> None:
        if self.number < 0:
            raise ValueError("less than nothing")


TEXT = st.text()
THINGS = st.builds(
    Thing,
    st.integers(0, 1 << 63),
    TEXT.map(Path),
    st.just(Colour.RED),
    st.builds(Point, st.floats(allow_nan=False, allow_infinity=False)),
    st.lists(TEXT).map(tuple),
    st.dictionaries(TEXT, st.floats(0, 1)),
    st.none() | st.just(Point(1.0, 2)),
)
GOOD: dict[str, Any] = builtins(
    Thing(1, Path("/a"), Colour.RED, Point(1.5), ("a",), {"k": 1.0}, None)
)
# A path of this machine that is no UTF-8, as Python has it.
NO_UTF8 = "/\udcff"


@given(THINGS)
def test_a_value_is_read_as_it_was_written(thing: Thing) -> None:
    assert convert(Thing, json.loads(json.dumps(builtins(thing)))) == thing


def test_what_may_be_missing_or_unknown() -> None:
    assert convert(Thing, {**GOOD, "of a later version": 1}).maybe is None
    assert convert(Thing, {**GOOD, "point": [1]}).point == Point(1.0, 7)
    assert convert(Thing, {**GOOD, "path": NO_UTF8}).path == Path(NO_UTF8)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("number", "1"), ("number", True), ("number", 1.0), ("number", None), ("number", -1),
        ("path", 3), ("path", None), ("colour", "blue"), ("colour", NO_UTF8),
        ("point", {"x": 1.0}), ("point", []), ("point", [1.0, 2, 3]), ("point", ["1"]),
        ("words", "a"), ("words", [1]), ("table", {"k": "v"}), ("table", []), ("maybe", 3),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(field: str, value: object) -> None:
    with pytest.raises(MalformedError):
        convert(Thing, {**GOOD, field: value})


def test_the_error_names_the_field() -> None:
    with pytest.raises(MalformedError, match=r"Expected `float`, got `str` - at `\$\.point\[0\]`"):
        convert(Thing, {**GOOD, "point": ["1"]})
    with pytest.raises(MalformedError, match="missing required field `path`"):
        convert(Thing, {name: value for name, value in GOOD.items() if name != "path"})


@dataclass(frozen=True, slots=True)
class Said:
    """What others say: bounded, and null where it may be missing."""

    i: int
    f: float
    b: bool
    t: str | None = None
    texts: tuple[str, ...] | None = None
    counts: tuple[int, ...] = ()
    within: "Said | None" = None

    def __post_init__(self) -> None:
        require_within("i", self.i, 9)
        require_within("f", self.f)


WELL: dict[str, Any] = {"i": 3, "f": 1, "b": True, "t": "x", "texts": ["a"], "more": {}}
Dashed = TypedDict("Dashed", {"a-b": int, "c-d": NotRequired[list["Dashed"] | None]})


def test_what_others_say_is_of_its_types_and_bounds() -> None:
    said = convert(Said, WELL)
    assert (said.i, said.f, said.b, said.t, said.texts) == (3, 1.0, True, "x", ("a",))
    assert isinstance(said.f, float)
    said = convert(Said, {"i": 0, "f": 1.5, "b": False, "t": None, "texts": None})
    assert (said.t, said.texts, said.counts, said.within) == (None, None, (), None)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("t", 3), ("i", True), ("i", 1.5), ("i", 10), ("i", -1), ("b", 3), ("b", None), ("i", None),
        ("within", {**WELL, "i": -1}), ("within", ["a"]), ("within", "a"), ("counts", ["a"]),
        ("counts", [True]), ("texts", ["a", None]), ("f", -0.5), ("f", 1e300), ("f", False),
    ],
)  # fmt: skip
def test_what_others_say_otherwise_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(MalformedError, match=rf"\$\.{field}|^{field} is "):
        convert(Said, {**WELL, field: value})
    no_objects: tuple[object, ...] = ([], None, 3, "i")
    for no_object in no_objects:
        with pytest.raises(MalformedError, match="object"):
            convert(Said, no_object)


def test_a_bound_says_what_it_is() -> None:
    require_within("n", None)
    require_within("n", MOST_INTEGER)
    require_within("n", -5, 5, least=-5)
    for value in (-1, MOST_INTEGER + 1, 1e300, float("nan"), 10**400):
        with pytest.raises(MalformedError, match=f"^n is .*, not from 0 to {MOST_INTEGER}$"):
            require_within("n", value)


def test_an_object_is_anything_as_it_stands() -> None:
    for value in (None, 3, "a", [{"a": [None]}]):
        assert convert(object, value) is value


class Inner(TypedDict):
    b: bool


class Outer(TypedDict, total=False):
    a: Required[int]
    b: str
    c: list[Inner]


@pytest.mark.parametrize(
    ("kind", "well", "ill"),
    [
        (int, 3, True),
        (int, 1 << 63, 1.0),
        (float, 3, "3"),
        (list[str], [], {}),
        (list[str], ["a"], ["a", None]),
        (dict[str, Any], {"a": None}, []),
        (Outer, {"a": 1, "more": 3}, {"a": 1, "b": None}),
        (Outer, {"a": 1, "c": [{"b": False}]}, {"a": 1, "c": [{}]}),
    ],
)
def test_types_without_a_record(kind: type, well: object, ill: object) -> None:
    convert(kind, well)
    with pytest.raises(MalformedError):
        convert(kind, ill)


def test_names_that_are_none_in_python() -> None:
    said = convert(Dashed, {"a-b": 1, "c-d": [{"a-b": 2}], "more": 3})
    assert said == {"a-b": 1, "c-d": [{"a-b": 2}]}
    with pytest.raises(MalformedError, match=r"missing required field `a-b` - at `\$\.c-d\[0\]`"):
        convert(Dashed, {"a-b": 1, "c-d": [{}]})


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
                    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner)))  # fmt: skip
def test_whatever_it_is_it_fits_or_is_malformed(value: object) -> None:
    for name in GOOD:
        try:
            convert(Thing, {**GOOD, name: value})
        except MalformedError:
            continue


def test_integers_have_64_bits() -> None:
    assert parse(f"[{(1 << 64) - 1}, {-(1 << 63)}]") == [(1 << 64) - 1, -(1 << 63)]
    for much in (1 << 64, -(1 << 63) - 1, 10**400):
        with pytest.raises(MalformedError, match="64 bits"):
            parse(f"[{much}]")
