"""QEMU's key=value syntax and its JSON: read as QEMU reads it, and written alike."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmckpt.vm.adopted.escape import escaped
from vmckpt.vm.adopted.settings import JsonObject, KeyValues, parse_settings

KEYS = st.text("abcdefghijklmnopqrstuvwxyz-._", min_size=1).filter(lambda key: key[0] != "{")
VALUES = st.text(st.characters(exclude_characters="\0"))
PAIRS = st.lists(st.tuples(KEYS, VALUES), min_size=1)


@given(PAIRS)
def test_what_is_written_is_read_again(pairs: list[tuple[str, str]]) -> None:
    settings = KeyValues(tuple(pairs))
    assert parse_settings(str(settings)) == settings


@given(PAIRS, KEYS, VALUES)
def test_a_value_that_is_put_counts(pairs: list[tuple[str, str]], key: str, value: str) -> None:
    settings = KeyValues(tuple(pairs)).put(key, value)
    assert parse_settings(str(settings)).get(key) == value
    assert settings.all(key) == [value]
    others = [pair for pair in pairs if pair[0] != key]
    assert [pair for pair in settings.pairs if pair[0] != key] == others
    assert settings.without(key).get(key) is None


@given(st.dictionaries(KEYS, st.text() | st.booleans() | st.integers(), min_size=1))
def test_json_is_read_and_written_alike(data: dict[str, str | bool | int]) -> None:
    settings = parse_settings(json.dumps(data))
    assert settings == JsonObject(data)
    assert json.loads(str(settings)) == data


@given(VALUES)
def test_a_text_fits_into_both_syntaxes(text: str) -> None:
    assert parse_settings(f"path={escaped(text, 'path=HERE')}").get("path") == text
    assert parse_settings(f'{{"path":"{escaped(text, "{")}"}}').get("path") == text


@pytest.mark.parametrize(
    ("text", "implied", "pairs"),
    [
        ("socket,id=a,server,nowait", "backend",
         [("backend", "socket"), ("id", "a"), ("server", "on"), ("wait", "off")]),
        ("file=/a,,b.qcow2,if=virtio", None, [("file", "/a,b.qcow2"), ("if", "virtio")]),
        ("user,hostfwd=tcp::1-:2,hostfwd=tcp::3-:4", "type",
         [("type", "user"), ("hostfwd", "tcp::1-:2"), ("hostfwd", "tcp::3-:4")]),
        ("a,,b,c=,,", "size", [("size", "a,b"), ("c", ",")]),
        ("", "type", []),
    ],
)  # fmt: skip
def test_it_is_read_as_qemu_reads_it(
    text: str, implied: str | None, pairs: list[tuple[str, str]]
) -> None:
    assert parse_settings(text, implied) == KeyValues(tuple(pairs))


def test_keys_reach_into_json() -> None:
    settings = parse_settings('{"driver":"qcow2","file":{"driver":"file","filename":"/a"}}')
    assert settings.get("file.filename") == "/a"
    moved = settings.put("file.filename", "/b").put("read-only", True)
    assert moved.get("file.driver") == "file"
    assert json.loads(str(moved))["file"]["filename"] == "/b"
    assert moved.get("read-only") == "on"
    assert settings.get("file") is None
    assert parse_settings('{"hostfwd":[{"str":"tcp::1-:2"}]}').all("hostfwd") == ["tcp::1-:2"]
