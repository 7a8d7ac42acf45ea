"""JSON of others: what is read of it, and what is refused."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmckpt.foreign import MOST_DEPTH, MOST_TOML_CHARACTERS, MalformedError, parse, parse_toml

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), 1 << 63) | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
)


@given(JSON)
def test_what_is_written_well_is_read_as_it_was_written(value: object) -> None:
    assert parse(json.dumps(value)) == value
    assert parse(json.dumps(value, ensure_ascii=False).encode()) == value


@given(st.binary() | st.text())
def test_whatever_it_is_it_is_a_value_or_malformed(data: bytes | str) -> None:
    try:
        parse(data)
    except MalformedError:
        return
    json.loads(data)


@pytest.mark.parametrize(
    "text",
    ["", "nul", "NaN", "[Infinity]", "1e999", '{"a": 1, "a": 1}', '"\\ud800"', '["\ud800"]',
     "1" * 5000,
     "[" * (MOST_DEPTH + 1) + "]" * (MOST_DEPTH + 1), "[" * 200_000, '{"a":' * 200_000],
)  # fmt: skip
def test_what_readers_disagree_on_is_refused(text: str) -> None:
    with pytest.raises(MalformedError):
        parse(text)
    with pytest.raises(MalformedError, match="bytes"):
        parse("[1]", most_bytes=2)


def test_brackets_in_texts_are_no_depth() -> None:
    assert parse(json.dumps(["[{" * 100, '\\"[' * 100])) == ["[{" * 100, '\\"[' * 100]
    assert len(parse("[" + "[]," * 1000 + "[]]")) == 1001


@pytest.mark.parametrize(
    "text",
    ["[" * (MOST_DEPTH + 1) + '"' + '\\"' * 10_000,
     "{" + "".join(f'"{n}":1,' for n in range(15_000)) + '"14999":1}'],
    ids=["a text that does not end", "many names, the last one twice"],
)  # fmt: skip
def test_what_a_guest_writes_is_refused_in_time_that_grows_with_its_length(text: str) -> None:
    began_s = time.process_time()
    with pytest.raises(MalformedError):
        parse(text)
    assert time.process_time() - began_s < 3


@given(st.text())
def test_whatever_it_is_it_is_a_table_or_malformed(text: str) -> None:
    try:
        assert isinstance(parse_toml(text), dict)
    except MalformedError:
        return


@pytest.mark.parametrize(
    "text",
    ["a = " + "[" * 5000, "a = " + "[" * (MOST_DEPTH + 1) + "]" * (MOST_DEPTH + 1),
     "a = " + "{a = " * 5000, ".".join("a" * (MOST_DEPTH + 2)) + " = 1", "a = " + "9" * 5000,
     "a = 0x" + "f" * 5000, f"a = {1 << 63}", "a = [1979-13-45]",
     "#" * (MOST_TOML_CHARACTERS + 1)],
)  # fmt: skip
def test_toml_that_no_one_writes_is_refused(text: str) -> None:
    """The spec of one host's VM ended commands that look at those of all hosts."""
    with pytest.raises(MalformedError):
        parse_toml(text)


def test_toml_within_bounds_is_read() -> None:
    deep = "a = " + "[" * (MOST_DEPTH - 1) + "]" * (MOST_DEPTH - 1)
    assert "a" in parse_toml(deep)
    assert parse_toml(f"a = {(1 << 63) - 1}") == {"a": (1 << 63) - 1}
